"""Reads and writes one site in a running forward: what a site means inside a module's output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .attention import text_bias
from .errors import refuse
from .schedule import append_dims
from .site import ModuleSite, Site


@dataclass(frozen=True)
class Activation:
    """A tensor and where it was read.

    Attributes:
        address: canonical name.
        tensor: (B, C, h, w) for image places, (B, N, C) for text tokens, (B, heads, Q, K) for attention maps.
        grid: (h, w) for image places, else None.
    """

    address: str
    tensor: torch.Tensor
    grid: tuple[int, int] | None = None


class Surroundings:
    """What a hook needs to know about the running forward: latent size, number of text tokens, sizes in each ViT."""

    def __init__(self, backbone: nn.Module, sites: Sequence[Site], latent_size: tuple[int, int] | None = None) -> None:
        self.batch, self.text_tokens = 0, 0
        self.text_bias: torch.Tensor | None = None
        self.grids: dict[str, tuple[int, int]] = {}
        self._latent_size = latent_size
        self._positions: tuple[torch.Tensor, int] | None = None
        self._backbone, self._vits = backbone, sorted({s.grid for s in sites if isinstance(s, ModuleSite) and s.grid})

    def watch(self, on_start: Callable[[], None]) -> list[Any]:
        """Hooks on the backbone and on each enclosing spatial transformer."""

        def root(module: nn.Module, args: tuple, kwargs: dict) -> None:
            on_start()
            self._read_root(args, kwargs)

        def vit(path: str) -> Callable:
            def read(module: nn.Module, args: tuple, kwargs: dict) -> None:
                x = args[0] if args else kwargs["hidden_states"]
                self.grids[path] = tuple(x.shape[-2:])

            return read

        handles = [self._backbone.register_forward_pre_hook(root, with_kwargs=True)]
        for path in self._vits:
            handles.append(module_at(self._backbone, path).register_forward_pre_hook(vit(path), with_kwargs=True))
        return handles

    def _read_root(self, args: tuple, kwargs: dict) -> None:
        x = _first(args[0] if args else None, kwargs, ("hidden_states", "sample", "x"))
        text = _first(args[2] if len(args) > 2 else None, kwargs, ("encoder_hidden_states", "context"))
        self.batch = x.shape[0]
        self.text_bias = text_bias(kwargs.get("encoder_attention_mask"))
        self.text_tokens = text.shape[1] if isinstance(text, torch.Tensor) and text.ndim == 3 else 0
        if x.ndim == 4:
            self.grids[""] = (x.shape[-2], x.shape[-1])
        elif kwargs.get("img_ids") is not None:  # diffusers' Flux takes packed tokens with their positions
            self.grids[""] = self._latent_size or self._size_of(kwargs["img_ids"])

    def _size_of(self, positions: torch.Tensor) -> tuple[int, int]:
        """The latents' sides; read once for one tensor of positions, which a sampler passes at every step."""
        seen, version = self._positions or (None, 0)
        if seen is positions and version == positions._version:
            return self.grids[""]
        self._positions = (positions, positions._version)
        row, column = positions.reshape(-1, 3)[:, 1:].amax(0).tolist()
        return 2 * (int(row) + 1), 2 * (int(column) + 1)

    def grid(self, site: ModuleSite) -> tuple[int, int]:
        """Token grid (h, w) of a site; latent sides are rounded up to whole patches, because the models pad."""
        h, w = self.grids[site.grid or ""]
        patch = site.patch if site.grid == "" else 1
        return -(-h // patch), -(-w // patch)


def _first(value: Any, kwargs: dict, names: tuple[str, ...]) -> Any:
    return next((kwargs[n] for n in names if kwargs.get(n) is not None), value)


def module_at(backbone: nn.Module, path: str) -> nn.Module:
    """A submodule by its dotted path; the backbone itself for an empty one."""
    return backbone.get_submodule(path)


# --- reading and writing one site ---------------------------------------------------------------------------------
def _pick(site: ModuleSite, output: Any) -> tuple[torch.Tensor, bool]:
    """The tensor of a site inside a module's output, and whether it still starts with the text tokens."""
    if isinstance(output, torch.Tensor):
        return output, site.skip_text
    if isinstance(output, (tuple, list)):
        return output[site.element or 0], False  # separate streams need no cutting
    return output[0], False  # diffusers' ModelOutput


def columns_of(tensor: torch.Tensor, columns: tuple[int, int] | None, width: int = 0) -> torch.Tensor:
    """The i-th of n slices of the last axis, each ``width`` wide where they do not divide it evenly; a view."""
    if columns is None:
        return tensor
    i, n = columns
    width = width or tensor.shape[-1] // n
    return tensor[..., i * width : (i + 1) * width]


def unfolded(tensor: torch.Tensor, site: Site, around: Surroundings) -> torch.Tensor:
    """(1, B N, C) -> (B, N, C) where the site's module folds the batch into the tokens; a view."""
    if site.flat_batch and tensor.ndim == 3 and tensor.shape[0] != around.batch:
        return tensor.reshape(around.batch, -1, tensor.shape[-1])
    return tensor


def _view(site: ModuleSite, tensor: torch.Tensor, cut: bool, around: Surroundings) -> torch.Tensor:
    """A view (B, N, C) or (B, C, h, w) of exactly the site's numbers; writing to it writes to the module's tensor."""
    tensor = columns_of(unfolded(tensor, site, around), site.columns, site.width)
    return tensor[:, around.text_tokens :] if cut else tensor


def read_site(site: ModuleSite, output: Any, around: Surroundings) -> Activation:
    """A copy of a site's tensor, with image tokens folded back to (B, C, h, w).

    Raises:
        VitrineError: If the number of tokens does not fit the grid.
    """
    view = _view(site, *_pick(site, output), around)
    if site.kind == "text":
        return Activation(site.address, view.detach().clone())
    if site.kind == "spatial":
        return Activation(site.address, view.detach().clone(), (view.shape[-2], view.shape[-1]))
    h, w = around.grid(site)
    if view.shape[1] != h * w:
        raise refuse(site.address, f"{view.shape[1]} tokens", f"a {h} x {w} grid", "report this model's layout")
    # Cloned because Flux blocks update their stream in place, and ControlNet adds in place to block outputs.
    image = view.detach().transpose(1, 2).reshape(view.shape[0], view.shape[2], h, w)
    return Activation(site.address, image.clone(memory_format=torch.contiguous_format), (h, w))


def write_site(site: ModuleSite, output: Any, around: Surroundings, change: Callable, rows: torch.Tensor | None) -> Any:
    """A new output in which the site holds ``change(old)`` in the chosen rows; the old output stays untouched."""
    old, cut = _pick(site, output)
    new = old.clone()
    view = _view(site, new, cut, around)
    changed = change(view.clone())
    if rows is not None:
        mask = append_dims(rows.to(view.device), view.ndim)
        changed = torch.where(mask, changed, view)
    view.copy_(changed)
    if isinstance(output, torch.Tensor):
        return new
    if isinstance(output, (tuple, list)):
        elements = list(output)
        elements[site.element or 0] = new
        return type(output)(elements)
    output = type(output)(output)
    output[next(iter(output))] = new
    return output
