"""Reads and writes one site of a running forward, inside a module's output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..diffusion.schedule import append_dims
from ..errors import VitrineError, refuse
from ..families import Inputs, Tokens, tokens_reader
from ..families.packing import GRIDS
from ..network.site import AdaLN, Columns, ModuleSite, Site
from ..runtime.compat_torch import module_at, source_of, version_of
from ..runtime.forward_hooks import hook_after, hook_before


@dataclass(frozen=True)
class Activation:
    """A tensor and where it was read.

    Attributes:
        address: canonical name.
        tensor: (B, C, h, w) for image sites, (B, C, T, h, w) in a video, (B, N, C) for text tokens,
            (B, heads, Q, K) for attention maps.
        grid: (h, w) for image sites, else None.
    """

    address: str
    tensor: torch.Tensor
    grid: tuple[int, int] | None = None


class OtherRows(VitrineError):
    """A layer runs on another number of batch rows than the network: nobody knows whose they are."""


def check_rows(tensor: torch.Tensor, rows: int, layer: str = "layer") -> None:
    """Refuses a tensor (B, ...) of a layer with other batch rows than those that are known.

    Raises:
        OtherRows: If it has.
    """
    if len(tensor) != rows:
        remedy = "remove what repeats or splits rows inside attention"
        raise OtherRows(str(refuse(layer, f"{len(tensor)} batch rows", f"the network's own {rows}", remedy)))


class ForwardContext:
    """State of the running forward for hooks: positions of its tokens, latent size, token grids.

    Attributes:
        tokens: of the running forward.
    """

    def __init__(self, backbone: nn.Module, sites: Sequence[Site], latent_size: tuple[int, int] | None = None) -> None:
        self.tokens = Tokens(0, None)
        self._read = tokens_reader(backbone)
        self._grids: dict[str, tuple[int, int]] = {}
        self._latent_size = latent_size
        self._positions: tuple[torch.Tensor, int, tuple[int, int]] | None = None
        self._added: dict[str, torch.Tensor] = {}
        self._plus = sorted(
            {s.adaln.plus for s in sites if s.kind == "adaln" and isinstance(s, ModuleSite) and s.adaln}
        )
        self._backbone, self._vits = backbone, sorted({s.grid for s in sites if isinstance(s, ModuleSite) and s.grid})

    def watch(self, on_start: Callable[[], None]) -> list[Any]:
        """Hooks on the backbone and on each enclosing spatial transformer."""

        def root(module: nn.Module, args: tuple, kwargs: dict) -> None:
            on_start()
            self.tokens = self._read(Inputs(module, args, kwargs, self._sides, self._latent_size))

        def vit(path: str) -> Callable:
            def read(module: nn.Module, args: tuple, kwargs: dict) -> None:
                x = args[0] if args else kwargs["hidden_states"]
                self._grids[path] = tuple(x.shape[-2:])

            return read

        handles = [hook_before(self._backbone, root, with_kwargs=True)]
        for path in filter(None, self._plus):

            def keep(module: nn.Module, args: tuple, output: Any, path: str = path) -> None:
                self._added[path] = (output[-1] if isinstance(output, (tuple, list)) else output).detach()

            handles.append(hook_after(module_at(self._backbone, path), keep))
        for path in self._vits:
            handles.append(hook_before(module_at(self._backbone, path), vit(path), with_kwargs=True))
        return handles

    def _sides(self, positions: torch.Tensor) -> tuple[int, int]:
        """(height, width) of a token grid; read once per tensor, which a sampler passes at every step."""
        base = source_of(positions)
        if base in GRIDS:  # made by us for this grid
            known: tuple[int, int] = GRIDS[base]
            return known
        version = version_of(base)
        seen = self._positions
        if seen is None or seen[0] is not base or seen[1] != version or version < 0:
            row, column = positions.reshape(-1, 2).amax(0).tolist()
            self._positions = seen = (base, version, (int(row) + 1, int(column) + 1))
        return seen[2]

    def grid(self, site: ModuleSite) -> tuple[int, int]:
        """Token grid (h, w) of a site."""
        return self._grids[site.grid] if site.grid else self._token_grid(site.patch)

    def _token_grid(self, patch: int) -> tuple[int, int]:
        """Token grid of the whole latent, with sides rounded up to whole patches, because the models pad."""
        if self.tokens.size is None:
            raise refuse("latents", None, "a size", "pass latent_size, or call the network as its own pipeline does")
        h, w = self.tokens.size
        return -(-h // patch), -(-w // patch)

    def check_rows(self, address: str, tensor: torch.Tensor) -> None:
        """Refuses a layer's tensor (B, ...) with other rows than the running forward's."""
        if self.tokens.batch:
            check_rows(tensor, self.tokens.batch, address)

    def rows(self, patch: int, kind: str) -> slice:
        """The slice of image or text tokens in a joint sequence."""
        if kind == "text":
            return slice(self.tokens.text_start, self.tokens.text_start + self.tokens.text)
        h, w = self._token_grid(patch)
        return slice(self.tokens.first_image, self.tokens.first_image + self.tokens.frames * h * w)

    def modulation(self, adaln: AdaLN, output: torch.Tensor) -> torch.Tensor:
        """(B, 2, C) float32 shift and factor of a norm without weights: f = factor norm(x) + shift."""
        output = output.detach().float()[: self.tokens.batch]  # reference pictures' rows follow (Qwen-Image, Krea 2)
        if adaln.plus:
            output = output + self._added[adaln.plus].to(output)
        if not adaln.rows:
            output = output.reshape(len(output), -1, output.shape[-1]).mean(1)  # over frames, which share one timestep
        parts = output.reshape(len(output), adaln.parts, -1)
        if adaln.table:
            parts = parts + self._parameter(adaln.table).to(parts).reshape(adaln.parts, -1)
        factor = 1 + parts[:, adaln.scale]
        if adaln.weight:
            factor = factor * (self._parameter(adaln.weight).to(parts) + float(adaln.above_one))
        shift = torch.zeros_like(factor) if adaln.shift is None else parts[:, adaln.shift]
        return torch.stack([shift, factor], 1).expand(self.tokens.batch, -1, -1)

    def _parameter(self, name: str) -> torch.Tensor:
        return self._backbone.get_parameter(name).detach()


# --- reading and writing one site ---------------------------------------------------------------------------------
def _pick(site: ModuleSite, output: Any) -> tuple[torch.Tensor, bool]:
    """The tensor of a site inside a module's output, and whether it has both kinds of tokens."""
    if isinstance(output, torch.Tensor):
        return output, site.joint
    if isinstance(output, (tuple, list)):
        return output[site.element or 0], False  # separate streams are not sliced
    return output[0], False  # diffusers' ModelOutput


def columns_of(tensor: torch.Tensor, columns: Columns | None) -> torch.Tensor:
    """(start, length) of the last axis; a view."""
    return tensor if columns is None else tensor[..., columns[0] : columns[0] + columns[1]]


_LAYOUT = "remove what merges or tiles tokens (HyperTile, ToMe); without such a patch, report this model's layout"


def unfolded(tensor: torch.Tensor, site: Site, around: ForwardContext) -> torch.Tensor:
    """(1, B N, C) -> (B, N, C) where the site's module folds the batch into the tokens; a view."""
    if site.flat_batch and tensor.ndim == 3 and tensor.shape[0] != around.tokens.batch:
        return tensor.reshape(around.tokens.batch, -1, tensor.shape[-1])
    return tensor


def _view(site: ModuleSite, tensor: torch.Tensor, joint: bool, around: ForwardContext) -> torch.Tensor:
    """A view (B, N, C) or (B, C, h, w) of the site's values; writing to it writes to the module's tensor."""
    tensor = columns_of(unfolded(tensor, site, around), site.columns)
    if site.kind == "tokens" and tensor.ndim == 5:  # (B, T, h, w, C): some networks never flatten their grid
        tensor = tensor.view(tensor.shape[0], -1, tensor.shape[-1])
    return tensor[:, around.rows(site.patch, site.kind)] if joint else tensor


def read_site(site: ModuleSite, output: Any, around: ForwardContext) -> Activation:
    """A copy of a site's tensor, with image tokens folded back to (B, C, h, w), or (B, C, T, h, w) of T > 1 frames.

    The numbers lie in memory as the network had them: folded tokens are in torch's channels-last order, since turning
    them around would take five to ten times as long as copying them.
    """
    tensor, joint = _pick(site, output)
    if site.adaln is not None and site.kind == "adaln":
        return Activation(site.address, around.modulation(site.adaln, tensor))
    view = _view(site, tensor.contiguous() if tensor.ndim == 5 else tensor, joint, around)
    around.check_rows(site.address, view)
    if site.kind == "text":
        return Activation(site.address, view.detach().clone())
    if site.kind == "spatial":
        return Activation(site.address, view.detach().clone(), (view.shape[-2], view.shape[-1]))
    (h, w), frames = around.grid(site), around.tokens.frames if site.grid == "" else 1
    if view.shape[1] != frames * h * w:
        expected = f"a {h} x {w} grid" + (f" in {frames} frames" if frames > 1 else "")
        raise refuse(site.address, f"{view.shape[1]} tokens", expected, _LAYOUT)
    # Cloned because Flux blocks update their stream in place, and ControlNet adds in place to block outputs.
    tokens = view.detach().clone(memory_format=torch.contiguous_format)
    sides = (frames, h, w) if frames > 1 else (h, w)
    return Activation(site.address, tokens.view(len(tokens), *sides, tokens.shape[-1]).movedim(-1, 1), (h, w))


def write_site(
    site: ModuleSite, output: Any, around: ForwardContext, change: Callable, rows: torch.Tensor | None
) -> Any:
    """A copy of the output in which the site's chosen batch rows are ``change(old)``."""
    old, joint = _pick(site, output)
    new = old.clone(memory_format=torch.contiguous_format if old.ndim == 5 else torch.preserve_format)
    view = _view(site, new, joint, around)
    changed = change(view.clone())
    if rows is not None:
        check_rows(view, len(rows), site.address)
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
