"""Every family as a MODEL in real ComfyUI, through the nodes, against the same weights in diffusers."""

import copy

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import save_file
from vitrine.engine.activations import TapConfig, tap_latents
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.nemo import NeuronSet, value_sites
from vitrine.engine.tracing.addresses import resolve, sites_of
from vitrine.engine.tracing.fingerprint import fingerprint_of
from vitrine.engine.w2w import BatchedLora, Manifest
from vitrine.engine.w2w.loras.lora_files import read_lora
from vitrine.engine.w2w.space.manifest import LoraLayer
from vitrine_tests.families.twin import (
    NAMES,
    EqualEpsilon,
    comfyui_model,
    comfyui_twin,
    conditioning,
    inputs,
    network,
    twin,
)
from vitrine_tests.lanes import nightly_but


class Loaded:
    """A family's MODEL, the latents and prompt it takes, and diffusers' side of both."""

    def __init__(self, name):
        self.name, self.ours = name, network(name)
        self.model = comfyui_model(name, comfyui_twin(name, self.ours))
        self.x, _, self.cond = inputs(name, 1)
        self.prompt = conditioning(name, self.cond)
        frames = self.model.get_model_object("latent_format").latent_dimensions == 3
        self.latents = self.x[:, :, None] if frames and self.x.ndim == 4 else self.x
        self.t = getattr(twin(name), "TIME", 300.0)
        self.denoiser = Denoiser.from_diffusers(self.ours, FlowMatchEulerDiscreteScheduler())
        sites = sites_of(self.ours)
        self.place = next(a for a in reversed(sites) if a.endswith("-out"))

    def sample(self, model, steps=2):
        import comfy.sample

        noise = comfy.sample.prepare_noise(torch.zeros_like(self.latents), 3)
        with torch.inference_mode():
            return comfy.sample.sample(
                model,
                noise,
                steps,
                2.0,
                "euler",
                "simple",
                self.prompt,
                self.prompt,
                torch.zeros_like(noise),
                disable_pbar=True,
                seed=3,
            )

    def output(self, model):
        """Of ComfyUI's network, bare, with the model's patches in its weights."""
        import comfy.model_management

        with torch.inference_mode():
            comfy.model_management.load_models_gpu([model])
            t = torch.full((1,), self.t)
            return twin(self.name).run(self.model.model.diffusion_model, self.x, t, self.cond)


@pytest.fixture(scope="module", params=nightly_but([n for n in NAMES if hasattr(twin(n), "MODEL")]))
def loaded(comfy, request):
    with torch.no_grad():
        return Loaded(request.param)


def test_one_prediction_through_both_doors(comfy, loaded):
    """Time, direction, sign, packing and masks are right in both, or x0 would differ; also at both ends of time."""
    from vitrine.nodes.comfy.conditioning import condition_of
    from vitrine.nodes.comfy.model import denoiser_of

    denoiser, times = denoiser_of(loaded.model), [loaded.t, 0.0, 1.0, 1000.0]
    with torch.inference_mode():
        cond = condition_of(loaded.model, loaded.prompt, loaded.latents)
        theirs = [denoiser.predict(loaded.latents, t, cond) for t in times]
    # ComfyUI's Flux.2 fills prompts with zeros on the left, up to 512 tokens.
    text = cond.text if loaded.name in ("flux2", "klein") else loaded.cond.text
    ours_cond = type(loaded.cond)(text.clone(), loaded.cond.pooled, loaded.cond.extra)
    with torch.no_grad(), EqualEpsilon(loaded.name, loaded.ours):
        ours = [loaded.denoiser.predict(loaded.x, t, ours_cond) for t in times]
    for t, one, other in zip(times, ours, theirs, strict=True):
        bound = 5e-6 if t == loaded.t else 2e-5  # the embedding of t = 1000 rounds differently
        for a, b in zip(one, other, strict=True):
            assert (a - b.reshape(a.shape)).abs().max() <= bound * a.abs().max(), t


def test_taps_while_comfyui_samples(comfy, loaded):
    before = loaded.sample(loaded.model)
    watched, recorder = comfy.call(
        "VitrineTapDuringSampling", model=loaded.model, layers=loaded.place, record_steps="0 1"
    )
    assert torch.equal(loaded.sample(watched), before)
    taps = recorder.record[1]["cond"][loaded.place]
    assert list(recorder.record) == [0, 1] and taps.grid is not None and taps.tensor.shape[0] == 1


def untouched(comfy, node_id):
    """The inputs of a node freshly added, as ComfyUI fills them."""
    schema = comfy.nodes.NODE_CLASS_MAPPINGS[node_id].define_schema()
    return {i.id: i.default for i in schema.inputs if getattr(i, "default", None) is not None}


def test_nodes_freshly_added_run(comfy, loaded):
    """``auto`` is one place in both libraries; recorder, collector and picture run as they are added."""
    (site,), (other,) = resolve(loaded.ours, "auto"), resolve(loaded.model.model.diffusion_model, "auto")
    assert site.address == other.address and site.kind == "tokens"
    watched, recorder = comfy.call(
        "VitrineTapDuringSampling", model=loaded.model, **untouched(comfy, "VitrineTapDuringSampling")
    )
    latent = {"samples": loaded.sample(watched)}
    taps, drawn, _ = comfy.call(
        "VitrineCollectTaps", recorder=recorder, latent=latent, **untouched(comfy, "VitrineCollectTaps")
    )
    assert list(taps) == [site.address]
    (again,) = comfy.call("VitrineActivationPicture", activations=taps, **untouched(comfy, "VitrineActivationPicture"))
    assert torch.equal(again, drawn) and drawn.shape[1] == 256


def test_neurons_are_blocked_while_comfyui_samples(comfy, loaded):
    site = value_sites(loaded.ours)[0]
    neurons = NeuronSet({site.address: tuple(range(8))}, fingerprint_of(loaded.ours))
    blocked = comfy.call(
        "VitrineNEMONeuronBlocker",
        model=loaded.model,
        neurons=neurons,
        factor=0.0,
        branch="both",
        start_percent=0.0,
        end_percent=1.0,
        tokens="",
    )[0]
    before = loaded.sample(loaded.model)
    assert not torch.equal(loaded.sample(blocked), before) and torch.equal(loaded.sample(loaded.model), before)


def test_one_tap_through_both_doors(comfy, loaded):
    from vitrine.nodes.comfy.conditioning import condition_of
    from vitrine.nodes.comfy.model import denoiser_of

    config = TapConfig((loaded.place,), timestep=loaded.t, seeds=(5, 6))
    with torch.inference_mode():
        cond = condition_of(loaded.model, loaded.prompt, loaded.latents)
        theirs = tap_latents(denoiser_of(loaded.model), loaded.latents, cond, config)[loaded.place]
    text = cond.text if loaded.name in ("flux2", "klein") else loaded.cond.text
    ours_cond = type(loaded.cond)(text.clone(), loaded.cond.pooled, loaded.cond.extra)
    with EqualEpsilon(loaded.name, loaded.ours):
        ours = tap_latents(loaded.denoiser, loaded.x, ours_cond, config)[loaded.place]
    assert ours.grid == theirs.grid and ours.tensor.shape == theirs.tensor.shape
    assert (ours.tensor - theirs.tensor).abs().max() <= 5e-6 * ours.tensor.abs().max()


def lora_of(net, rank=2):
    """A random LoRA on every linear layer of the last block's attention and MLP, under diffusers' names."""
    g = torch.Generator().manual_seed(7)
    names = [n for n, m in net.named_modules() if isinstance(m, torch.nn.Linear) and ".1." in n]
    names = [n for n in names if "norm1_context" not in n]  # SD3's last one has its halves exchanged: left to core
    block = sorted({n[: n.index(".1.") + 3] for n in names})[-1]
    layers = {}
    for name in (n for n in names if n.startswith(block)):
        out, inside = net.get_submodule(name).weight.shape
        factors = torch.randn(rank, inside, generator=g) / inside**0.5, torch.randn(out, rank, generator=g)
        layers[name] = LoraLayer(*factors, alpha=1.0)
    return layers


def written(layers, spelling):
    """The same LoRA in a trainer's spelling: factors and alpha."""
    tensors = {}
    for name, layer in layers.items():
        if spelling.endswith("_"):
            stem, down, up = spelling + name.replace(".", "_"), "lora_down", "lora_up"
        else:
            stem, down, up = spelling + name, "lora_A", "lora_B"
        tensors[f"{stem}.{down}.weight"], tensors[f"{stem}.{up}.weight"] = layer.down, layer.up
        tensors[f"{stem}.alpha"] = torch.tensor(layer.alpha)
    return tensors


SPELLINGS = ("transformer.", "base_model.model.", "lora_unet_", "lora_transformer_", "lycoris_", "")


def test_loras_of_every_spelling_change_both_networks_alike(loaded, tmp_path):
    """diffusers', PEFT's, Musubi's, OneTrainer's, SimpleTuner's and DiffSynth's names: core loads only some of them."""
    from vitrine.nodes.comfy.lora import with_lora

    layers = lora_of(loaded.ours)
    changed = copy.deepcopy(loaded.ours)
    for name, layer in layers.items():
        changed.get_submodule(name).weight.data += layer.alpha / layer.rank * layer.up @ layer.down
    t = torch.full((1,), loaded.t)
    with torch.no_grad(), EqualEpsilon(loaded.name, changed):
        expected = Denoiser.from_diffusers(changed, FlowMatchEulerDiscreteScheduler()).forward(loaded.x, t, loaded.cond)
    for i, spelling in enumerate(SPELLINGS):
        file = tmp_path / f"{i}.safetensors"
        save_file(written(layers, spelling), file)
        found = read_lora(file)
        assert set(found) == set(layers), spelling
        assert all(torch.equal(found[n].up, layers[n].up) and found[n].alpha == 1.0 for n in layers)
    plain, theirs, again = (loaded.output(m) for m in (loaded.model, with_lora(loaded.model, found), loaded.model))
    assert torch.equal(plain, again)
    assert (theirs - expected).abs().max() <= 5e-6 * expected.abs().max()
    assert (plain - expected).abs().max() > 1e-3 * expected.abs().max()


def test_a_lora_inside_the_forward_is_the_patch(loaded):
    """What a W2W edit is from a timestep on, and an inversion trains: also where ComfyUI fuses the layers."""
    from vitrine.nodes.comfy.lora import with_lora

    layers = lora_of(loaded.ours)
    manifest = Manifest.of(layers)
    plain, patched = (loaded.output(m) for m in (loaded.model, with_lora(loaded.model, layers)))
    weights = manifest.flatten(layers)[None]
    with BatchedLora(loaded.model.model.diffusion_model, manifest, weights):
        inside = loaded.output(loaded.model)
    assert (inside - patched).abs().max() <= 5e-6 * patched.abs().max() < 1e-2 * (plain - patched).abs().max()
    assert torch.equal(loaded.output(loaded.model), plain)


def test_loras_under_comfyuis_names_load_with_ours(comfy, loaded):
    """One table of names: what a trainer of either library calls a layer is one place of the network."""
    from vitrine.nodes.comfy.lora import _all_names

    names, layers = _all_names(loaded.model), lora_of(loaded.ours)
    network = loaded.model.model.diffusion_model
    for name, layer in layers.items():
        places = {str(names[f"{p}{name}"]) for p in ("", "transformer.", "diffusion_model.", "base_model.model.")}
        places |= {str(names[p + name.replace(".", "_")]) for p in ("lora_unet_", "lycoris_", "lora_transformer_")}
        assert len(places) == 1, name
        key, rows = names[name] if isinstance(names[name], tuple) else (names[name], None)
        weight = network.get_submodule(key.removeprefix("diffusion_model.").removesuffix(".weight")).weight
        weight = weight if rows is None else weight[rows[1] : rows[1] + rows[2]]
        assert torch.equal(weight, loaded.ours.get_submodule(name).weight) and weight.shape[0] == layer.up.shape[0]
