"""Other programs' reading of a LoRA file: diffusers' own load, and LyCORIS' formula."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Collection
from pathlib import Path

import diffusers
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from safetensors.torch import load_file
from vitrine.engine.w2w.loras.lora_files import LoraFile, read_lora
from vitrine_tests.models import SD15, SD21

CONFIGS = {"Stable Diffusion 1.x": SD15, "Stable Diffusion 2.x": SD21}
"""Base model -> the configuration of its UNet."""
Change = Callable[[str], torch.Tensor]
"""Layer -> change of its weight."""
COLUMNS = 128
"""Of a layer whose factors have a high rank, as many as are compared, at random; of others all are."""


@functools.cache
def bare_unet(base: str) -> UNet2DConditionModel:
    """The real class at full size. Its weights are never written, so the system gives them no memory."""
    with torch.device("meta"):
        unet = UNet2DConditionModel(**CONFIGS[base])
    return unet.to_empty(device="cpu")


def against_diffusers(path: Path, file: LoraFile) -> tuple[str, float, int]:
    """(the method that loads it, and :func:`difference`).

    ``load_lora_weights`` takes no keys without a prefix, and says so in a log only; ``load_lora_adapter`` does.
    """
    diffusers.utils.logging.set_verbosity_error()
    unet = bare_unet(file.base_model)
    pipe = StableDiffusionPipeline(
        vae=None,
        text_encoder=None,
        tokenizer=None,
        unet=unet,
        scheduler=None,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    how, options = "load_lora_weights", {"adapter_name": "a", "low_cpu_mem_usage": True}
    pipe.load_lora_weights(str(path.parent), weight_name=path.name, **options)
    if not getattr(unet, "peft_config", None):
        how = "load_lora_adapter"
        unet.load_lora_adapter(str(path), prefix=None, use_safetensors=True, **options)  # with the header's alpha
    try:
        layers = {name: module for name, module in unet.named_modules() if hasattr(module, "get_delta_weight")}
        return how, *difference(file, layers, lambda name: layers[name].get_delta_weight("a").detach())
    finally:
        unet.unload_lora()
        gc.collect()


def against_lycoris(path: Path, file: LoraFile) -> tuple[str, float, int]:
    """LoKr (Yeh et al. 2024, LyCORIS): dW = (alpha / r) W1 x W2, with W1 and W2 or their factors in the file."""
    tensors = load_file(path)

    def change(layer: str) -> torch.Tensor:
        parts = {role: tensors[key].float() for role, key in file.entries[layer].keys}
        ranks = [len(parts[role]) for role in ("lokr_w2_b", "lokr_w1_b") if role in parts]
        scale = float(parts["alpha"]) / ranks[0] if ranks else 1.0
        first, second = (_half(parts, number) for number in "12")
        return scale * torch.kron(first.reshape(*first.shape, *[1] * (second.ndim - 2)), second)

    return "LyCORIS' formula", *difference(file, file.entries, change)


def _half(parts: dict[str, torch.Tensor], number: str) -> torch.Tensor:
    """W1 or W2: whole, of two factors, or of two factors and a core."""
    whole = f"lokr_w{number}"
    if whole in parts:
        return parts[whole]
    left, right = parts[f"{whole}_a"], parts[f"{whole}_b"]
    if f"lokr_t{number}" not in parts:
        return left @ right
    return torch.einsum("ijkl, jr, ip -> prkl", parts[f"lokr_t{number}"], right, left).contiguous()


def difference(file: LoraFile, layers: Collection[str], change: Change) -> tuple[float, int]:
    """(largest difference to ours as a share of a layer's largest number, layers that are zero in both)."""
    largest, zero = 0.0, 0
    ours, g = read_lora(file), torch.Generator().manual_seed(0)
    assert set(ours) == set(layers)
    for path, layer in ours.items():
        theirs = change(path).flatten(1)
        low = len(layer.down) <= 32
        columns = torch.arange(theirs.shape[1]) if low else torch.randperm(theirs.shape[1], generator=g)[:COLUMNS]
        own = layer.scale * (layer.up.flatten(1) @ layer.down.flatten(1)[:, columns])
        size = float(theirs.abs().max())
        away = float((own - theirs[:, columns]).abs().max())
        assert size or not away, path
        zero += size == 0
        largest = max(largest, away / size if size else 0.0)
    return largest, zero
