"""Capture and edit activations: context managers over torch's own forward hooks.

Only torch hook handles are used. diffusers' HookRegistry loses forwards when hooks are removed out of order, and
replaced ``forward`` methods do not survive offloading. Leaving a block removes every hook, also after an exception,
and leaves the module as it was, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..errors import refuse
from ..network.attention import WHOLE, MapReduction, attention_map, normed
from ..network.site import MapSite, ModuleSite, Site
from ..runtime.compat_torch import module_at, move_hooks_last
from ..runtime.compiled import eager_runs, uncompiled
from ..runtime.forward_hooks import OneBlock, Reached, hook_after, hook_before
from ..runtime.placement import put_back
from .addresses import resolve
from .joint_maps import Rope, streams_map
from .reading import Activation, ForwardContext, columns_of, read_site, unfolded, write_site

Reduce = Callable[["Activation"], "Activation | None"]


class _Seen(BaseException):
    """Ends a forward once a capture has all its sites. A BaseException, so that no model code swallows it."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self.capture = capture


class _Hooks(OneBlock):
    """Hook handles with a close that is idempotent and runs in reverse order of opening."""

    def __init__(self, what: str) -> None:
        self._handles: list[Any] = []
        self._reached = Reached(what)

    def close(self) -> None:
        """Removes all hooks; idempotent."""
        self._reached.close()
        while self._handles:
            self._handles.pop().remove()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self.close()
        if error is None:
            self._reached.check()
        return None


# --- capture ------------------------------------------------------------------------------------------------------
class Capture(_Hooks):
    """An open capture, made by :func:`capture`.

    Attributes:
        activations: site name -> Activation of the last forward that reached it.
        enabled: set it to False to ignore forwards; each hook then costs one attribute look-up.
    """

    def __init__(
        self,
        backbone: nn.Module,
        sites: Sequence[Site],
        early_exit: bool,
        reduce: Reduce | None,
        maps: MapReduction = WHOLE,
        latent_size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__("tap")
        self.activations: dict[str, Activation] = {}
        self.enabled = True
        compiled, backbone = backbone, uncompiled(backbone)
        self._backbone, self._sites, self._early_exit, self._reduce = backbone, list(sites), early_exit, reduce
        self._maps = maps
        self._around = ForwardContext(backbone, self._sites, latent_size)
        self._queries: dict[str, torch.Tensor] = {}
        self._outputs: dict[str, torch.Tensor] = {}
        self._rope: Rope | None = None
        self._grouped = self._group()
        self._left: set[tuple[str, bool]] = set()
        for site in self._sites:
            self._reached.expect(site.address)
        self._handles += eager_runs(compiled)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool | None:
        """Closes. Swallows this capture's own early exit; another capture's passes on to its own block."""
        super().__exit__(kind, error, trace)
        if not isinstance(error, _Seen) or error.capture is not self:
            return False
        put_back(self._backbone)
        return True

    def __getitem__(self, address: str) -> Activation:
        if address not in self.activations:
            raise refuse("activation", address, sorted(self.activations), "it was not reached: run a forward first")
        return self.activations[address]

    def _group(self) -> dict[tuple[str, bool], list[Site]]:
        sites: dict[tuple[str, bool], list[Site]] = {}
        for site in self._sites:
            if isinstance(site, MapSite):  # a map is complete when its keys are
                sites.setdefault((site.key, False), []).append(site)
            else:
                sites.setdefault((site.path, site.before), []).append(site)
        return sites

    def _open(self) -> None:
        self._handles += self._around.watch(self._start)
        self._handles.append(hook_after(self._backbone, self._end))
        for site in self._sites:
            if isinstance(site, MapSite) and site.streams:
                self._open_joint(site)
            elif isinstance(site, MapSite):
                query = module_at(self._backbone, site.query)
                self._handles.append(hook_after(query, _reading(self._keep_query(site))))
        for (path, before), sites in self._grouped.items():
            module = module_at(self._backbone, path)
            if before:
                self._handles.append(hook_before(module, _reading(self._on_input(sites))))
            else:
                self._handles.append(hook_after(module, _reading(self._on_output((path, before), sites))))

    def _open_joint(self, site: MapSite) -> None:
        """Hooks that keep the outputs of all but the last projection of a map, and its rotary embedding."""
        wanted = {path for s in site.streams for path in (s.query, s.key)} - {site.key}
        for path in sorted(wanted):
            keep = _reading(self._keep_output(path))
            self._handles.append(hook_after(module_at(self._backbone, path), keep))
        if site.rope:

            def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
                if self.enabled and site.rotary is not None:
                    self._rope = site.rotary(args, kwargs)

            self._handles.append(hook_before(module_at(self._backbone, site.rope), hook, with_kwargs=True))

    def _keep_output(self, path: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
            if self.enabled:
                self._outputs[path] = output.detach()

        return hook

    def _end(self, *_: Any) -> None:
        if self.enabled:
            self._reached.forwards += 1

    def _start(self) -> None:
        self._left = set(self._grouped)
        self._queries.clear()
        self._outputs.clear()
        self._rope = None

    def _keep_query(self, site: Site) -> Callable:
        def hook(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
            if self.enabled:
                self._queries[site.address] = output.detach()

        return hook

    def _on_input(self, sites: list[Site]) -> Callable:
        def hook(module: nn.Module, args: tuple) -> None:
            self._see((sites[0].path, True), sites, args[0])

        return hook

    def _on_output(self, read_at: tuple[str, bool], sites: list[Site]) -> Callable:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            self._see(read_at, sites, output)

        return hook

    def _see(self, read_at: tuple[str, bool], sites: list[Site], output: Any) -> None:
        if not self.enabled:
            return
        for site in sites:
            self._reached.note(site.address)
            activation = self._map(site, output) if isinstance(site, MapSite) else read_site(site, output, self._around)
            reduced = self._reduce(activation) if self._reduce else activation
            if reduced is not None:
                self.activations[site.address] = reduced
        self._left.discard(read_at)
        # All sites have been read, in whatever order this library runs them: skip the rest of the forward.
        if self._early_exit and not self._left:
            raise _Seen(self)

    def _map(self, site: MapSite, key: torch.Tensor) -> Activation:
        if site.streams:
            outputs = {**self._outputs, site.key: key.detach()}
            rope = self._rope if site.rope else None
            probabilities = streams_map(self._backbone, site, outputs, rope, self._around, self._maps)
            for path in {s.query for s in site.streams} | {s.key for s in site.streams}:
                self._outputs.pop(path, None)
            return Activation(site.address, probabilities)
        attention = module_at(self._backbone, site.path)
        query = columns_of(self._queries.pop(site.address), site.columns)
        key = columns_of(unfolded(key.detach(), site, self._around), site.key_columns)
        for read in (query, key):
            self._around.check_rows(site.address, read)
        query = normed(attention, "norm_q", query, site.heads)
        key = normed(attention, "norm_k", key, site.heads)
        bias = self._around.tokens.bias if site.text_keys else None
        return Activation(site.address, attention_map(query, key, site.heads, bias, self._maps))


def capture(
    backbone: nn.Module,
    sites: Sequence[Site] | str | Sequence[str],
    *,
    early_exit: bool = False,
    reduce: Reduce | None = None,
    maps: MapReduction = WHOLE,
    latent_size: tuple[int, int] | None = None,
) -> Capture:
    """Records activations while the block is open.

    Args:
        sites: what :func:`resolve` returns, or names and globs.
        early_exit: stop the forward once all sites have been read. This leaves the block, so the forward must be
            its last statement.
        reduce: called inside the hook with each Activation; its result is kept, None keeps nothing. Resize, cast,
            average or stream here.
        maps: what to keep of attention maps; a whole map is never in memory unless it is kept.
        latent_size: (h, w), if the caller knows it; Flux's packed latents do not have it, and reading it from their
            positions synchronises with the device.

    Example:
        >>> with capture(unet, "up-level1-*-cross-q", early_exit=True) as taps:
        ...     unet(x, t, encoder_hidden_states=text)
        >>> taps.activations
    """
    return Capture(backbone, _sites(backbone, sites), early_exit, reduce, maps, latent_size)


def _sites(backbone: nn.Module, sites: Any) -> list[Site]:
    if isinstance(sites, (ModuleSite, MapSite)):
        return [sites]
    if not isinstance(sites, str) and all(isinstance(s, (ModuleSite, MapSite)) for s in sites):
        return list(sites)
    return resolve(backbone, sites)


def _reading(hook: Callable) -> Callable:
    """Marks a hook as read-only."""
    hook.reads = True  # type: ignore[attr-defined]
    return hook


def _readers_last(module: nn.Module) -> None:
    """Moves reading hooks last, so that captures see the edited tensor even if they were opened before the edit."""
    move_hooks_last(module, "reads")


# --- edit ---------------------------------------------------------------------------------------------------------
class Edit(_Hooks):
    """An open edit, made by :func:`edit`.

    Leaving the block raises if a whole forward never reached the edit, for example because projections were fused in
    the meantime.
    """

    def __init__(
        self, backbone: nn.Module, changes: list[tuple[ModuleSite, Callable]], rows: torch.Tensor | None
    ) -> None:
        super().__init__("edit")
        self._handles += eager_runs(backbone)
        backbone = uncompiled(backbone)
        around = ForwardContext(backbone, [site for site, _ in changes])
        try:
            self._handles += around.watch(lambda: None)
            for site, change in changes:
                module, reached = module_at(backbone, site.path), self._reached.noting(site.address, change)
                if site.before:
                    self._handles.append(hook_before(module, _edit_input(site, reached, around, rows)))
                else:
                    self._handles.append(hook_after(module, _edit_output(site, reached, around, rows)))
                _readers_last(module)
            self._reached.watch(backbone)
        except BaseException:
            self.close()
            raise


def _edit_input(site: ModuleSite, change: Callable, around: ForwardContext, rows: torch.Tensor | None) -> Callable:
    def hook(module: nn.Module, args: tuple) -> tuple:
        return (write_site(site, args[0], around, change, rows), *args[1:])

    return hook


def _edit_output(site: ModuleSite, change: Callable, around: ForwardContext, rows: torch.Tensor | None) -> Callable:
    def hook(module: nn.Module, args: tuple, output: Any) -> Any:
        return write_site(site, output, around, change, rows)

    return hook


def edit(
    backbone: nn.Module,
    changes: Mapping[str | Site, Callable[[torch.Tensor], torch.Tensor]],
    *,
    rows: torch.Tensor | None = None,
) -> Edit:
    """Replaces activations while the block is open.

    Args:
        changes: site name, glob or Site -> function of the tensor in the module's own layout ((B, C, h, w) or (B, N,
            C)), which returns one of the same shape. Several edits of one site apply in the given order.
        rows: (B,) bool: the batch rows to change, so that different edits can run as one batch.
    """
    pairs = [(site, fn) for what, fn in changes.items() for site in _sites(backbone, _listed(what))]
    for site, _ in pairs:
        if isinstance(site, MapSite):
            raise refuse("edit", site.address, "layers that are a module's output", "edit the q, k or v of this block")
    return Edit(backbone, [(site, fn) for site, fn in pairs if isinstance(site, ModuleSite)], rows)


def _listed(what: str | Site) -> Iterable:
    return [what] if isinstance(what, (ModuleSite, MapSite)) else what
