"""Weights of a base model by layer, read on demand, for DoRAs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ...errors import refuse
from ...io.files import named
from ...io.folders import files_in, has_ending
from .layer_names import bare, canonical

Sources = Mapping[str, tuple[tuple[int, ...], Callable[[], torch.Tensor]]]


def modules_of(backbone: nn.Module) -> dict[str, nn.Module]:
    """Module path in diffusers' naming -> module, for diffusers networks and ComfyUI's (ldm) UNets."""
    blocks = getattr(backbone, "num_res_blocks", 2)
    layers = int(blocks[0] if isinstance(blocks, (list, tuple)) else blocks)
    return {canonical(path, layers): module for path, module in backbone.named_modules()}


class BaseWeights(Mapping[str, torch.Tensor]):
    """Layer path in diffusers' UNet naming (for transformers: in the model's naming) -> weight.

    Args:
        sources: layer path -> (shape, function that reads the weight).
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = dict(sources)

    def __getitem__(self, path: str) -> torch.Tensor:
        return self._sources[path][1]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def shape(self, path: str) -> tuple[int, ...]:
        """Shape of a weight, without reading it."""
        return self._sources[path][0]

    def only(self, paths: Iterable[str]) -> BaseWeights:
        """The weights of the given layers only."""
        return BaseWeights({path: self._sources[path] for path in sorted(paths)})

    @classmethod
    def of_module(cls, backbone: nn.Module, originals: Mapping[str, torch.Tensor] | None = None) -> BaseWeights:
        """Weights of a loaded network, without the LoRAs of diffusers or PEFT.

        Args:
            originals: module path -> unpatched weight, for modules whose weight is patched (a LoRA in ComfyUI).
        """
        sources = {}
        unpatched = {id(backbone.get_submodule(path)): weight for path, weight in (originals or {}).items()}
        for path, module in modules_of(backbone).items():
            weight = getattr(getattr(module, "base_layer", module), "weight", None)
            weight = unpatched.get(id(module), weight)
            if isinstance(weight, torch.Tensor):
                sources[path] = tuple(weight.shape), weight.detach
        return cls(sources)

    @classmethod
    def of_file(cls, path: str | Path, layers_per_block: int = 2) -> BaseWeights:
        """Weights of a checkpoint or a diffusers network: one safetensors file, or a folder of shards."""
        path = Path(path)
        files = files_in(path, ".safetensors") if path.is_dir() else [path]
        if not files or any(not has_ending(f, ".safetensors") or not f.is_file() for f in files):
            remedy = "the checkpoint, or diffusers' unet folder"
            raise refuse("base weights", path.name, "a .safetensors file, or a folder of them", remedy)
        return cls({layer: source for file in files for layer, source in _in_file(file, layers_per_block).items()})


def _in_file(path: Path, layers: int) -> Sources:
    from safetensors import safe_open

    sources = {}
    with _opening(path), safe_open(str(path), "pt") as opened:
        for key in list(opened.keys()):
            if key.endswith(".weight"):
                layer = canonical(bare(key.removesuffix(".weight"))[0], layers)
                sources[layer] = tuple(opened.get_slice(key).get_shape()), partial(_read, path, key)
    return sources


def _read(path: Path, key: str) -> torch.Tensor:
    from safetensors import safe_open

    with _opening(path), safe_open(str(path), "pt") as opened:
        return opened.get_tensor(key)


def _opening(path: Path) -> named:
    return named(path, "base weights", "a whole safetensors file", "download it again")
