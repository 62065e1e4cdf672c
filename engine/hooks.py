"""Capture and edit activations: context managers over torch's own forward hooks.

Only torch hook handles are used. diffusers' HookRegistry loses forwards when hooks are removed out of order, and
replaced ``forward`` methods do not survive offloading. Leaving a block removes every hook, also after an exception,
and leaves the module as it was, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .addresses import Site, resolve
from .attention import attention_map, normed, text_bias
from .errors import refuse

Reduce = Callable[["Activation"], "Activation | None"]


@dataclass(frozen=True)
class Activation:
    """One tensor and where it was.

    Attributes:
        address: canonical name.
        tensor: (B, C, h, w) for image places, (B, N, C) for text tokens, (B, heads, Q, K) for attention maps.
        grid: (h, w) for image places, else None.
    """

    address: str
    tensor: torch.Tensor
    grid: tuple[int, int] | None = None


class _Seen(BaseException):
    """Ends a forward once every wanted place was seen. A BaseException, so that no model code swallows it."""


class _Hooks(AbstractContextManager):
    """Hook handles with a close that is idempotent and runs in reverse order of opening."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def close(self) -> None:
        """Remove all hooks; harmless twice."""
        while self._handles:
            self._handles.pop().remove()

    def __exit__(self, *error: object) -> None:
        self.close()


class _Surroundings:
    """What a hook must know of the running forward: latent size, number of text tokens, sizes inside each ViT."""

    def __init__(self, backbone: nn.Module, sites: Sequence[Site]) -> None:
        self.batch, self.text_tokens = 0, 0
        self.text_bias: torch.Tensor | None = None
        self.grids: dict[str, tuple[int, int]] = {}
        self._backbone, self._vits = backbone, sorted({s.grid for s in sites if s.grid})

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
            handles.append(_module(self._backbone, path).register_forward_pre_hook(vit(path), with_kwargs=True))
        return handles

    def _read_root(self, args: tuple, kwargs: dict) -> None:
        x = _first(args[0] if args else None, kwargs, ("hidden_states", "sample", "x"))
        text = _first(args[2] if len(args) > 2 else None, kwargs, ("encoder_hidden_states", "context"))
        self.batch = x.shape[0]
        self.text_bias = text_bias(kwargs.get("encoder_attention_mask"))
        self.text_tokens = text.shape[1] if isinstance(text, torch.Tensor) and text.ndim == 3 else 0
        if x.ndim == 4:
            self.grids[""] = (x.shape[-2], x.shape[-1])
        elif kwargs.get("img_ids") is not None:  # diffusers' Flux gets packed tokens and their positions
            ids = kwargs["img_ids"].reshape(-1, 3)
            rows, columns = int(ids[:, 1].max()) + 1, int(ids[:, 2].max()) + 1
            self.grids[""] = (2 * rows, 2 * columns)

    def grid(self, site: Site) -> tuple[int, int]:
        """Token grid (h, w) of a site; latent sides are rounded up to whole patches, as the models pad."""
        h, w = self.grids[site.grid or ""]
        patch = site.patch if site.grid == "" else 1
        return -(-h // patch), -(-w // patch)


def _first(value: Any, kwargs: dict, names: tuple[str, ...]) -> Any:
    return next((kwargs[n] for n in names if kwargs.get(n) is not None), value)


def _module(backbone: nn.Module, path: str) -> nn.Module:
    return backbone.get_submodule(path)


# --- reading and writing one site ---------------------------------------------------------------------------------
def _pick(site: Site, output: Any, around: _Surroundings) -> tuple[torch.Tensor, bool]:
    """The tensor a site means inside a module's output, and whether it still starts with the text tokens."""
    if isinstance(output, torch.Tensor):
        return output, site.skip_text
    if isinstance(output, (tuple, list)):
        return output[site.element or 0], False  # streams that come apart need no cutting
    return output[0], False  # diffusers' ModelOutput


def _view(site: Site, tensor: torch.Tensor, cut: bool, around: _Surroundings) -> torch.Tensor:
    """A view (B, N, C) or (B, C, h, w) of exactly the site's numbers; writing to it writes to the module's tensor."""
    if site.flat_batch and tensor.ndim == 3 and tensor.shape[0] != around.batch:
        tensor = tensor.reshape(around.batch, -1, tensor.shape[-1])
    if site.columns is not None:
        i, n = site.columns
        width = site.width or tensor.shape[-1] // n
        tensor = tensor[..., i * width : (i + 1) * width]
    return tensor[:, around.text_tokens :] if cut else tensor


def _read(site: Site, output: Any, around: _Surroundings) -> Activation:
    view = _view(site, *_pick(site, output, around), around)
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


def _write(site: Site, output: Any, around: _Surroundings, change: Callable, rows: torch.Tensor | None) -> Any:
    """A new output in which the site holds ``change(old)``, in the rows wanted; the old output is not touched."""
    old, cut = _pick(site, output, around)
    new = old.clone()
    view = _view(site, new, cut, around)
    changed = change(view.clone())
    if rows is not None:
        mask = rows.to(view.device).view(-1, *[1] * (view.ndim - 1))
        changed = torch.where(mask, changed, view)
    view.copy_(changed)
    if isinstance(output, torch.Tensor):
        return new
    if isinstance(output, (tuple, list)):
        parts = list(output)
        parts[site.element or 0] = new
        return type(output)(parts)
    output = type(output)(output)
    output[next(iter(output))] = new
    return output


# --- capture ------------------------------------------------------------------------------------------------------
class Capture(_Hooks):
    """An open capture; made by :func:`capture`.

    Attributes:
        activations: address -> Activation of the last forward that reached it.
        enabled: set to False to let forwards pass unseen; the hooks then cost one attribute look-up.
    """

    def __init__(self, backbone: nn.Module, sites: Sequence[Site], early_exit: bool, reduce: Reduce | None) -> None:
        super().__init__()
        self.activations: dict[str, Activation] = {}
        self.enabled = True
        self._backbone, self._sites, self._early_exit, self._reduce = backbone, list(sites), early_exit, reduce
        self._around = _Surroundings(backbone, self._sites)
        self._queries: dict[str, torch.Tensor] = {}
        self._places = self._group()
        self._left: set[tuple[str, bool]] = set()
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Capture:
        return self

    def run(self, call: Callable, *args: Any, **kwargs: Any) -> Any:
        """``call(*args, **kwargs)``; None when the early exit ended it."""
        try:
            return call(*args, **kwargs)
        except _Seen:
            return None

    def __getitem__(self, address: str) -> Activation:
        if address not in self.activations:
            raise refuse("activation", address, sorted(self.activations), "it was not reached: run a forward first")
        return self.activations[address]

    def _group(self) -> dict[tuple[str, bool], list[Site]]:
        places: dict[tuple[str, bool], list[Site]] = {}
        for site in self._sites:
            if site.kind == "map":  # a map is complete when its keys are
                places.setdefault((site.key, False), []).append(site)
            else:
                places.setdefault((site.path, site.before), []).append(site)
        return places

    def _open(self) -> None:
        self._handles += self._around.watch(self._start)
        for site in self._sites:
            if site.kind == "map":
                self._handles.append(_module(self._backbone, site.query).register_forward_hook(self._keep_query(site)))
        for (path, before), sites in self._places.items():
            module = _module(self._backbone, path)
            if before:
                self._handles.append(module.register_forward_pre_hook(self._on_input(sites)))
            else:
                self._handles.append(module.register_forward_hook(self._on_output((path, before), sites)))

    def _start(self) -> None:
        self._left = set(self._places)
        self._queries.clear()

    def _keep_query(self, site: Site) -> Callable:
        def hook(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
            if self.enabled:
                self._queries[site.address] = output.detach()

        return hook

    def _on_input(self, sites: list[Site]) -> Callable:
        def hook(module: nn.Module, args: tuple) -> None:
            self._see((sites[0].path, True), sites, args[0])

        return hook

    def _on_output(self, place: tuple[str, bool], sites: list[Site]) -> Callable:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            self._see(place, sites, output)

        return hook

    def _see(self, place: tuple[str, bool], sites: list[Site], output: Any) -> None:
        if not self.enabled:
            return
        for site in sites:
            found = self._map(site, output) if site.kind == "map" else _read(site, output, self._around)
            kept = self._reduce(found) if self._reduce else found
            if kept is not None:
                self.activations[site.address] = kept
        self._left.discard(place)
        # All places seen, whatever order this library runs them in: nothing after this can matter.
        if self._early_exit and not self._left:
            raise _Seen

    def _map(self, site: Site, key: torch.Tensor) -> Activation:
        attention = _module(self._backbone, site.path)
        query = _view(replace(site, flat_batch=False), self._queries.pop(site.address), False, self._around)
        key = _view(replace(site, columns=site.key_columns), key.detach(), False, self._around)
        query = normed(attention, "norm_q", query, site.heads)
        key = normed(attention, "norm_k", key, site.heads)
        bias = self._around.text_bias if site.text_keys else None
        return Activation(site.address, attention_map(query, key, site.heads, bias))


def capture(
    backbone: nn.Module,
    sites: Sequence[Site] | str | Sequence[str],
    *,
    early_exit: bool = False,
    reduce: Reduce | None = None,
) -> Capture:
    """Record activations while the block is open.

    Args:
        sites: what :func:`resolve` gives, or addresses and globs.
        early_exit: stop each forward once all wanted places were seen; call through :meth:`Capture.run`.
        reduce: called inside the hook with each Activation; what it returns is kept, None keeps nothing. The place to
            resize, cast, average or stream.

    Example:
        >>> with capture(unet, "up-level1-*-cross-q", early_exit=True) as taps:
        ...     taps.run(unet, x, t, encoder_hidden_states=text)
        >>> taps.activations
    """
    return Capture(backbone, _sites(backbone, sites), early_exit, reduce)


def _sites(backbone: nn.Module, sites: Any) -> list[Site]:
    if isinstance(sites, Site):
        return [sites]
    if not isinstance(sites, str) and all(isinstance(s, Site) for s in sites):
        return list(sites)
    return resolve(backbone, sites)


# --- edit ---------------------------------------------------------------------------------------------------------
class Edit(_Hooks):
    """An open edit; made by :func:`edit`."""

    def __init__(self, backbone: nn.Module, changes: list[tuple[Site, Callable]], rows: torch.Tensor | None) -> None:
        super().__init__()
        around = _Surroundings(backbone, [site for site, _ in changes])
        try:
            self._handles += around.watch(lambda: None)
            for site, change in changes:
                module = _module(backbone, site.path)
                if site.before:
                    self._handles.append(module.register_forward_pre_hook(_edit_input(site, change, around, rows)))
                else:
                    self._handles.append(module.register_forward_hook(_edit_output(site, change, around, rows)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Edit:
        return self


def _edit_input(site: Site, change: Callable, around: _Surroundings, rows: torch.Tensor | None) -> Callable:
    def hook(module: nn.Module, args: tuple) -> tuple:
        return (_write(site, args[0], around, change, rows), *args[1:])

    return hook


def _edit_output(site: Site, change: Callable, around: _Surroundings, rows: torch.Tensor | None) -> Callable:
    def hook(module: nn.Module, args: tuple, output: Any) -> Any:
        return _write(site, output, around, change, rows)

    return hook


def edit(
    backbone: nn.Module,
    changes: Mapping[str | Site, Callable[[torch.Tensor], torch.Tensor]],
    *,
    rows: torch.Tensor | None = None,
) -> Edit:
    """Replace activations while the block is open.

    Args:
        changes: address, glob or Site -> function of the tensor in the module's own layout ((B, C, h, w) or (B, N, C)),
            which returns one of the same shape. Several edits of one place apply in the order given.
        rows: (B,) bool; only these rows of the batch change, so that many different edits run as one batch.

    Raises:
        VitrineError: an unknown address, or an attention map (edit its q, k or v instead).
    """
    pairs = [(site, fn) for what, fn in changes.items() for site in _sites(backbone, _listed(what))]
    for site, _ in pairs:
        if site.kind == "map":
            raise refuse("edit", site.address, "places that are a module's output", "edit the q, k or v of this block")
    return Edit(backbone, pairs, rows)


def _listed(what: str | Site) -> Iterable:
    return [what] if isinstance(what, Site) else what
