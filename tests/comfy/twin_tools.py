"""How the twins read API graphs and sample as ComfyUI's sampler does."""

from types import SimpleNamespace

import torch
from vitrine.engine.activations import PCABasis, pca_rgb
from vitrine.engine.portraits import load_portraits, render, sample_scenes

Nodes = SimpleNamespace


class Graph:
    """Inputs of a graph's nodes by id; a link reads as the node it comes from, ``preset.steps`` as ``steps``."""

    def __init__(self, nodes):
        self.nodes = nodes

    def __call__(self, node_id):
        inputs = self.nodes[str(node_id)]["inputs"]
        return Nodes(**{name.rpartition(".")[2]: value for name, value in inputs.items()})

    def text(self, link):
        return self(link[0]).text

    def one(self, kind):
        """Inputs of the only node of a kind."""
        (found,) = [n["inputs"] for n in self.nodes.values() if n["class_type"] == kind]
        return Nodes(**found)


def pipeline(kind):
    """A pipeline over its own copy of the portraits model."""
    pipe = kind.from_pipe(load_portraits().pipeline())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def euler_sigmas(scheduler, name, steps):
    """ComfyUI's "ddim_uniform" (every n-th level from the second) and "normal" (even timesteps), then 0."""
    levels = ((1 - scheduler.alphas_cumprod) / scheduler.alphas_cumprod).double().sqrt()
    if name == "ddim_uniform":
        return [*levels[1 :: len(levels) // steps].flip(0).tolist(), 0.0]
    t = torch.linspace(len(levels) - 1, 0, steps, dtype=torch.float64)
    low, part, log = t.floor().long(), t - t.floor(), levels.log()
    high = t.ceil().long()
    return [*((1 - part) * log[low] + part * log[high]).exp().tolist(), 0.0]


def ksampler(graph, node_id, pipe, **how):
    """(B, 3, H, W) pictures of a KSampler node: ``euler`` and ``ddim`` are both DDIM's step with eta 0."""
    from diffusers import EulerDiscreteScheduler

    s = graph(node_id)
    assert s.sampler_name in ("euler", "ddim") and s.denoise == 1
    size = graph(s.latent_image[0])
    if "prompt_embeds" in how:
        prompts = {"prompt_embeds": how.pop("prompt_embeds")}
    else:
        prompts = {"prompt": graph.text(s.positive)}
    scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    sigmas = euler_sigmas(scheduler, s.scheduler, s.steps)
    scheduler.set_timesteps(sigmas=sigmas)
    shape = (size.batch_size, 4, size.height // 4, size.width // 4)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(s.seed))
    full = sigmas[0] >= float(scheduler.sigmas.max()) and sigmas[0] > 14  # only from the highest level of all
    start = (1 + sigmas[0] ** 2) ** 0.5 if full else sigmas[0]
    pipe.scheduler = scheduler
    if "prompt" in prompts:
        prompts["prompt"] = [prompts["prompt"]] * size.batch_size
    told = {"height": size.height, "width": size.width, "guidance_scale": s.cfg, "output_type": "pt"}
    latents = noise * start / scheduler.init_noise_sigma
    empty = [graph.text(s.negative)] * size.batch_size
    return pipe(**prompts, negative_prompt=empty, sigmas=sigmas, latents=latents, **told, **how).images


def colours(maps, size=256):
    """The drawing of one place that the nodes make."""
    return pca_rgb(maps, PCABasis.fit(maps), (size, size))


def enlarged(pictures, times):
    """Each pixel a square, as core's nearest-exact."""
    return pictures.repeat_interleave(int(times), -1).repeat_interleave(int(times), -2)


def prompt_and_seed(graph, inputs):
    return graph.text(inputs.positive), [inputs.seed + i for i in range(graph(inputs.latent[0]).batch_size)]


def portraits(inputs):
    return render(sample_scenes(range(inputs.seed, inputs.seed + inputs.count)), inputs.size)


def part_number(name):
    from vitrine.engine.portraits import PARTS

    return PARTS.index(name)
