"""What NEMO needs of ComfyUI's insides: conditions of prompts, blocking while sampling."""

from __future__ import annotations

from typing import Any

import comfy.patcher_extension
import comfy.sample
import torch

from ...engine.condition import Condition
from ...engine.nemo import BlockConfig, NeuronSet, bake, block, value_sites
from ...engine.nemo.block import Now
from ...engine.nemo.score import probe_noise
from . import model as bridge

_KEY = "vitrine.nemo"
_PREFIX = "diffusion_model."


def conditions(model: Any, clip: Any, prompts: list[str], latents: torch.Tensor) -> list[Condition]:
    """One condition of one row for each prompt, through the model's own ``extra_conds``."""
    found = []
    for prompt in prompts:
        encoded = clip.encode_from_tokens_scheduled(clip.tokenize(prompt))
        found.append(bridge.condition_of(model, encoded, latents[:1]))
    return found


def latents_of(model: Any, latent: dict) -> torch.Tensor:
    """A zero latent of the model's own shape, on its device, for the size of ``latent``."""
    blank = torch.zeros_like(latent["samples"][:1])
    ratio = latent.get("downscale_ratio_spacial")  # Empty Latent Image assumes a factor of 8 and says so here
    return comfy.sample.fix_empty_latent_channels(model, blank, ratio).to(model.load_device)


def shape_of(latents: torch.Tensor) -> tuple[int, int, int]:
    """(C, h, w) of one latent."""
    channels, height, width = latents.shape[-3:]
    return channels, height, width


def blocked(model: Any, neurons: NeuronSet, config: BlockConfig) -> Any:
    """A clone whose forwards run with the neurons blocked. Hooks exist only inside each of its own forwards.

    Raises:
        VitrineError: neurons of another model.
    """
    own = bridge.fingerprint(model)
    neurons.check(bridge.backbone_of(model), value_sites(bridge.backbone_of(model), "all"), own)
    clone = model.clone()

    def apply_model(executor: Any, x: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
        base = executor.class_obj
        options = args[3] if len(args) > 3 else kwargs.get("transformer_options", {})
        now = Now()
        now.update(config, float(base.model_sampling.timestep(t[:1])), _cond_rows(options, len(x)))
        with block(base.diffusion_model, neurons, config, now=now, fingerprint=own):
            return executor(x, t, *args, **kwargs)

    clone.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.APPLY_MODEL, _KEY, apply_model)
    return clone


def _cond_rows(options: dict, batch: int) -> torch.Tensor:
    """(B,) bool: rows that have the positive prompt. ComfyUI lists its chunks, unconditional ones as 1."""
    chunks = options.get("cond_or_uncond") or [0]
    return torch.tensor([c == 0 for c in chunks]).repeat_interleave(max(1, batch // len(chunks)))[:batch]


def baked(model: Any, neurons: NeuronSet, factor: float) -> Any:
    """A clone with ordinary weight patches that scale the neurons' rows of the checkpoint.

    Weights that carry another clone's LoRA at the moment are read from ComfyUI's backup: it must not leak in here.
    """
    clone, state = model.clone(), model.model_state_dict()
    kept = {k.removeprefix(_PREFIX): b.weight for k, b in model.backup.items() if k.startswith(_PREFIX)}
    changed = bake(bridge.backbone_of(model), neurons, factor, bridge.fingerprint(model), kept)
    patches = {}
    for name, value in changed.items():
        old = kept.get(name, state[_PREFIX + name])
        patches[_PREFIX + name] = (value.to(old.device, old.dtype) - old,)
    accepted = clone.add_patches(patches, 1.0)
    assert set(accepted) == set(patches)
    return clone


@torch.no_grad()
def previews(model: Any, vae: Any, probe: Any, cond: Condition, shape: tuple[int, int, int]) -> torch.Tensor:
    """IMAGE (S, H, W, 3): the clean one-step prediction of each of the probe's seeds."""
    noise = probe_noise(probe.config, shape).to(model.load_device)
    clean = probe.denoiser.predict(noise, probe.t, cond.take(torch.zeros(len(noise), dtype=torch.long))).x0
    return vae.decode(model.model.process_latent_out(clean.float()))
