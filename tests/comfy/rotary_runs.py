"""Whole short runs of the rotary families through both doors: a stock pipeline's, and core's sampler on a MODEL.

A pipeline takes encoded prompts and the noise of one seed; its scheduler has ComfyUI's shift. What is left to differ is
what the libraries compute. ``GUIDED`` says how each pipeline is told ComfyUI's cfg.
"""

import copy

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from vitrine.engine.families.packing import unpack
from vitrine_tests.comfy.emd_families import with_parts
from vitrine_tests.families.twin import EqualEpsilon, conditioning
from vitrine_tests.pipelines.test_family_taps import flux2_vae

CFG, STEPS, SEED = 2.0, 2, 5
"""Two even steps are levels that core's tables of 1,000 and of 10,000 both have."""
CALM = 0.1
"""Of the weights that read the time. The libraries round it differently, up to 6e-5 of its fastest sinusoid's argument:
random weights make 2e-5 of a picture of that, with nothing moved as well, and it is not what is to be shown here."""
KINDS = {
    "flux": "FluxPipeline",
    "flux2": "Flux2Pipeline",
    "qwen_image": "QwenImagePipeline",
    "z_image": "ZImagePipeline",
    "lumina2": "Lumina2Pipeline",
    "chroma": "ChromaPipeline",
    "krea2": "Krea2Pipeline",
    "wan": "WanPipeline",
}
GUIDED = {
    "flux": {"true_cfg_scale": CFG},
    "flux2": {"guidance_scale": 4.0},
    "qwen_image": {"true_cfg_scale": 1.0},
    "z_image": {"guidance_scale": CFG - 1},
    "krea2": {"guidance_scale": CFG - 1},
    "chroma": {"guidance_scale": CFG},
    "lumina2": {"guidance_scale": CFG, "cfg_normalization": False},
    "wan": {"guidance_scale": CFG, "num_frames": 9},
}
UNGUIDED = ("flux2", "qwen_image")
"""Flux.2 is told its guidance; QwenImagePipeline rescales guided predictions, which core does not."""
OWN_END = ("wan",)
"""WanPipeline counts evenly between the highest and the lowest level, as core's scheduler *normal* does. Untouched they
are the same levels; moved, core's last one follows the moved table, the pipeline's is moved itself."""
MASKED = {
    "chroma": "prompt_attention_mask",
    "lumina2": "prompt_attention_mask",
    "qwen_image": "prompt_embeds_mask",
    "krea2": "prompt_embeds_mask",
}


def calmed(net):
    """A copy of diffusers' network in which time acts as smoothly as in a trained one."""
    net = copy.deepcopy(net)
    reads = [n for n, m in net.named_modules() if isinstance(m, torch.nn.Linear) and ("time" in n or "t_embedder" in n)]
    place = reads[0] if reads else "distilled_guidance_layer.in_proj"
    with torch.no_grad():
        net.get_submodule(place).weight.mul_(CALM)
    return net


def anima(net, scheduler):
    """diffusers has blocks for Anima but no pipeline class; those behind its conditioner, whose size is fixed."""
    from diffusers.guiders import ClassifierFreeGuidance
    from diffusers.modular_pipelines import SequentialPipelineBlocks
    from diffusers.modular_pipelines.anima import before_denoise, denoise

    class Blocks(SequentialPipelineBlocks):
        model_name = "anima"
        block_classes = [  # noqa: RUF012
            before_denoise.AnimaTextInputStep,
            before_denoise.AnimaPrepareLatentsStep,
            before_denoise.AnimaSetTimestepsStep,
            denoise.AnimaDenoiseStep,
        ]
        block_names = ["input", "prepare_latents", "set_timesteps", "denoise"]  # noqa: RUF012

    pipe = Blocks().init_pipeline()
    pipe.update_components(transformer=net, scheduler=scheduler, guider=ClassifierFreeGuidance(guidance_scale=CFG))
    return pipe


def stock(family):
    """The stock pipeline of a family around its tiny network, with ComfyUI's shift."""
    from vitrine.nodes.comfy.schedule import own_shift

    shift = own_shift(family.model.get_model_object("model_sampling"))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    if family.name == "anima":
        pipe = anima(family.net, scheduler)
    elif family.name == "flux2":
        pipe = diffusers.Flux2Pipeline(scheduler, flux2_vae(), None, None, family.net)
    else:
        pipe = with_parts(getattr(diffusers, KINDS[family.name]), scheduler)(family.net)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def negative(cond):
    """Another prompt of the same form."""
    return type(cond)(cond.text.flip(1) * 0.5, None if cond.pooled is None else -cond.pooled, cond.extra)


def told(family, plain):
    """Arguments of the pipeline's call: encoded prompts, masks that hide nothing, guidance."""
    prompts, how = {"": family.cond, "negative_": negative(family.cond)}, {}
    for which, cond in prompts.items():
        how[f"{which}prompt_embeds"] = list(cond.text) if family.name == "z_image" else cond.text
        if family.name in MASKED:
            how[which + MASKED[family.name]] = torch.ones(cond.text.shape[:2], dtype=torch.bool)
        if family.name == "flux":
            how[f"{which}pooled_prompt_embeds"] = cond.pooled
    if family.name == "flux2":
        del how["negative_prompt_embeds"]
    size = {"height": family.rows, "width": family.columns} if plain else {}
    return how | GUIDED.get(family.name, {}) | size


def ours(family, pipe, plain):
    """(latents of a pipeline's run in ComfyUI's shape, its levels); ``plain`` where nobody else says the size."""
    how = told(family, plain) | {"num_inference_steps": STEPS, "generator": torch.Generator().manual_seed(SEED)}
    with Levels() as levels, EqualEpsilon(family.name, family.net):
        if family.name == "anima":
            tokens = pipe(output="latents", **how)
        else:
            found = []
            keep = lambda pipe, i, t, given: found.append(given["latents"]) or {}  # noqa: E731
            pipe(**how, output_type="latent", callback_on_step_end=keep)
            tokens = found[-1]
    if tokens.ndim > 3:
        return tokens.reshape(family.latents.shape), levels.sigmas
    return unpack(tokens, family.latents, 1 if family.name == "flux2" else 2), levels.sigmas


class Levels:
    """Sees what a scheduler steps over, whichever object takes the steps."""

    def __enter__(self):
        self.step = step = FlowMatchEulerDiscreteScheduler.step

        def seen(scheduler, *args, **kwargs):
            self.sigmas = scheduler.sigmas.float()
            return step(scheduler, *args, **kwargs)

        FlowMatchEulerDiscreteScheduler.step = seen
        return self

    def __exit__(self, *error):
        FlowMatchEulerDiscreteScheduler.step = self.step


def theirs(family, model, sigmas=None):
    """Latents of core's Euler sampler, as the network sees them; ``sigmas`` instead of those that core chooses."""
    import comfy.sample

    scheduler = "normal" if family.name in OWN_END else "simple"
    latent = torch.zeros_like(family.latents)
    noise = comfy.sample.prepare_noise(latent, SEED)
    prompts = [conditioning(family.name, cond) for cond in (family.source, negative(family.source))]
    with torch.inference_mode():
        found = comfy.sample.sample(
            model,
            noise,
            STEPS,
            1.0 if family.name in UNGUIDED else CFG,
            "euler",
            scheduler,
            *prompts,
            latent,
            disable_pbar=True,
            seed=SEED,
            sigmas=sigmas,
        )
    return model.get_model_object("latent_format").process_in(found)
