"""A pretend accelerator, for machines that have none: finds mixed devices, waits for the device, uploads and float64.

A tensor "on the device" is a wrapper that says ``device="lazy"`` (a type of device that torch knows by name and never
starts) around an ordinary CPU tensor. While :class:`Accelerator` is open, a dispatch mode sees every operation and runs
it on what is inside. So real modules, autograd, ``pipe.to("lazy")``, accelerate's and diffusers' offloading work as on
a GPU, and what a GPU would refuse or be slowed by is seen:

* a CPU tensor among device tensors raises :class:`MixedDevices` (a GPU lets CPU scalars and CPU index tensors through);
* a *sync* is noted where the host must wait for the device: ``.item()``, ``float()``, ``bool()``, ``.cpu()``,
  ``nonzero``, an index by a mask;
* an *upload* is noted where data goes from the host to the device, index tensors included;
* *float64* that Vitrine makes on the device is noted, and refused where asked: Apple's MPS has none.

Each note names the line of Vitrine that asked for it. Not pretended: kernels, streams, memory, autocast.

::

    with Accelerator() as device:
        pipe.to(device.name)
        with device.counting() as seen:
            pipe("a prompt")
    assert seen.syncs == 0, seen
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import vitrine
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from vitrine.engine.runtime import stored_weights

NAME = "lazy"
DEVICE = torch.device(NAME, 0)
SYNC, UPLOAD, FLOAT64 = "sync", "upload", "float64"

_aten = torch.ops.aten
_INDEXING = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
}
# The answer, or its size, depends on the numbers: the host must wait for them.
_WAITS = {
    _aten._local_scalar_dense.default,
    _aten.equal.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.unique_consecutive.default,
    _aten.unique_dim.default,
    _aten.repeat_interleave.Tensor,
    _aten.bincount.default,
}
_PLAIN = {_aten._local_scalar_dense.default, _aten.equal.default}  # these answer with a Python number
_SAME = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default}
_PRODUCT = str(Path(vitrine.__file__).parent)
_HERE = __file__


class MixedDevices(RuntimeError):
    """A CPU tensor among tensors of the device."""


class NoFloat64(TypeError):
    """float64 on a device that is to have none; a TypeError, as on MPS."""


class Note(NamedTuple):
    """One event: its kind, the operation, the tensor's shape, and the line that asked."""

    kind: str
    operation: str
    shape: tuple[int, ...]
    line: str


class Counts:
    """The notes made while a block was open."""

    def __init__(self) -> None:
        self.notes: list[Note] = []

    def __str__(self) -> str:
        lines = Counter((n.kind, n.operation, n.line) for n in self.notes)
        rows = [f"{count:5d} {kind:7s} {op:28s} {line}" for (kind, op, line), count in lines.most_common()]
        return "\n".join(["", *rows])

    def count(self, kind: str) -> int:
        """How many events of one kind."""
        return sum(n.kind == kind for n in self.notes)

    @property
    def syncs(self) -> int:
        """Waits of the host for the device."""
        return self.count(SYNC)

    @property
    def uploads(self) -> int:
        """Transfers from the host to the device."""
        return self.count(UPLOAD)


class DeviceTensor(torch.Tensor):
    """A CPU tensor, ``inner``, that says it is on the device."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> DeviceTensor:
        if isinstance(inner, DeviceTensor) or inner.is_meta:
            # accelerate makes a parameter by calling the class of the one before it
            return torch.nn.Parameter(inner, requires_grad)  # type: ignore[return-value]
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=DEVICE,
            requires_grad=requires_grad,
        )
        made.inner = inner.detach()
        return made

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.inner!r})"

    def tolist(self) -> list:
        """As numbers, by way of the host; torch has it for plain tensors only."""
        return self.detach().cpu().tolist()

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            made = self.detach().clone()
        made = torch.nn.Parameter(made, self.requires_grad) if isinstance(self, torch.nn.Parameter) else made
        memo[id(self)] = made.requires_grad_(self.requires_grad)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("a file or another process wants a device tensor: move it to the CPU first")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Accelerator.current is None:
            raise RuntimeError("a device tensor outlived its Accelerator")
        return Accelerator.current.run(func, args, kwargs or {})


stored_weights._PLAIN = (*stored_weights._PLAIN, DeviceTensor)  # its numbers are what they are


class Accelerator(TorchDispatchMode):
    """The device, there while the block is open.

    Args:
        float64: False refuses float64 on the device, as MPS does.

    Raises:
        MixedDevices, NoFloat64: from the operation at fault; the message names the line.
    """

    name = NAME
    current: Accelerator | None = None

    def __init__(self, float64: bool = True) -> None:
        super().__init__()
        self.float64 = float64
        self._counting: list[Counts] = []
        self._exit = ExitStack()

    def __enter__(self) -> Accelerator:
        for switch, read, write in _SWITCHES:
            self._exit.callback(write, read())
            write(switch)
        # accelerate's offloading and torch's checkpointing look for a module of the device's name
        had = vars(torch).get(NAME)
        self._exit.callback(setattr, torch, NAME, had) if had else self._exit.callback(delattr, torch, NAME)
        setattr(torch, NAME, torch.cpu)
        torch.Tensor.data = _DATA  # type: ignore[assignment]
        self._exit.callback(delattr, torch.Tensor, "data")
        self._exit.callback(setattr, Accelerator, "current", Accelerator.current)
        Accelerator.current = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._exit.close()

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        """Notes what happens in the block; blocks may lie inside each other."""
        counts = Counts()
        self._counting.append(counts)
        try:
            yield counts
        finally:
            self._counting.remove(counts)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """One operation: checked, run on what is inside, and wrapped again."""
        flat, spec = tree_flatten((args, kwargs))
        wanted = kwargs.get("device")
        onto = wanted is not None and _on_device(torch.device(wanted))
        if not onto and not any(isinstance(v, DeviceTensor) for v in flat):
            return func(*args, **kwargs)
        self._check(func, args, flat, onto)
        if func is _aten._fused_sdp_choice.default:
            return 0  # attention as plain products
        owners = {id(v.inner): v for v in flat if isinstance(v, DeviceTensor)}
        inner_args, inner_kwargs = tree_unflatten([_inside(v) for v in flat], spec)
        inner_kwargs.pop("pin_memory", None)
        out = func(*inner_args, **inner_kwargs)
        if func in _PLAIN or (wanted is not None and not onto):
            return out
        if func is _aten.copy_.default and not isinstance(args[0], DeviceTensor):
            return args[0]
        return tree_map(lambda value: self._wrapped(value, func, owners), out)

    def _wrapped(self, value: Any, func: Any, owners: dict[int, DeviceTensor]) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in owners:  # in-place operations answer with the tensor they were given
            return owners[id(value)]
        if value.dtype == torch.float64 and func not in _SAME:
            self._note(FLOAT64, func, value)
            if not self.float64 and _ours():
                raise NoFloat64(f"{func} makes float64 on the device, at {_line()}")
        return DeviceTensor(value)

    # --- what a device would refuse or wait for ----------------------------------------------------------------------
    def _check(self, func: Any, args: tuple, flat: list, onto: bool) -> None:
        if func is _aten._to_copy.default:
            stays = not any(isinstance(v, torch.device) for v in flat)  # a cast
            return self._transfer(func, args[0], isinstance(args[0], DeviceTensor) if stays else onto)
        if func is _aten.copy_.default:
            return self._transfer(func, args[1], isinstance(args[0], DeviceTensor))
        if func in _WAITS:
            self._note(SYNC, func, next(v for v in flat if isinstance(v, DeviceTensor)))
        tensors = [v for v in flat if isinstance(v, torch.Tensor)]
        if func in _INDEXING:
            tensors = self._indexing(func, args)
        strangers = [v for v in tensors if not isinstance(v, DeviceTensor) and v.ndim]
        if strangers and len(strangers) < len(tensors) and any(isinstance(v, DeviceTensor) for v in tensors):
            shapes = [tuple(v.shape) for v in strangers]
            raise MixedDevices(f"{func}: CPU tensors {shapes} among those of the device, at {_line()}")

    def _transfer(self, func: Any, source: torch.Tensor, onto: bool) -> None:
        if isinstance(source, DeviceTensor) and not onto:
            self._note(SYNC, func, source)
        elif onto and not isinstance(source, DeviceTensor):
            self._note(UPLOAD, func, source)

    def _indexing(self, func: Any, args: tuple) -> list[torch.Tensor]:
        """The tensors that must lie on one device: all but index tensors on the CPU."""
        table, indices = args[0], [i for i in args[1] if isinstance(i, torch.Tensor)]
        must = [table, *(v for v in args[2:3] if isinstance(v, torch.Tensor))]
        for index in indices:
            if isinstance(index, DeviceTensor):
                must.append(index)
                if index.dtype in (torch.bool, torch.uint8):
                    self._note(SYNC, func, index)
            elif isinstance(table, DeviceTensor) and index.ndim:
                self._note(UPLOAD, func, index)
        return must

    def _note(self, kind: str, func: Any, tensor: torch.Tensor) -> None:
        if self._counting:
            note = Note(kind, str(func).removeprefix("aten."), tuple(tensor.shape), _line())
            for counts in self._counting:
                counts.notes.append(note)


_SWITCHES = (
    # parameters are replaced by wrappers, and torch.tensor(..., device=...) goes through the dispatcher
    (
        True,
        torch.__future__.get_overwrite_module_params_on_conversion,
        torch.__future__.set_overwrite_module_params_on_conversion,
    ),
    (True, torch._C._only_lift_cpu_tensors, torch._C._set_only_lift_cpu_tensors),
)


def _data_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if isinstance(tensor, DeviceTensor) else torch._C.TensorBase.data.__get__(tensor)


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """``tensor.data = value`` also where one of them is on the device: diffusers' group offloading moves weights so."""
    if not isinstance(tensor, DeviceTensor) and not isinstance(value, DeviceTensor):
        return torch._C.TensorBase.data.__set__(tensor, value)
    if isinstance(tensor, torch.nn.Parameter):
        value = torch.nn.Parameter(value, tensor.requires_grad)
    torch.utils.swap_tensors(tensor, value)


_DATA = property(_data_of, _set_data)


def _on_device(device: torch.device) -> bool:
    return device.type == DEVICE.type


def _inside(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.inner
    return torch.device("cpu") if isinstance(value, torch.device) and _on_device(value) else value


def _ours() -> bool:
    """Whether Vitrine asked, not a library: diffusers' rotary embeddings avoid float64 on MPS alone."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == _HERE or "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    return _of_vitrine(frame.f_code.co_filename)


def _of_vitrine(name: str) -> bool:
    return name.startswith(_PRODUCT) and not name.startswith(f"{_PRODUCT}/tests/")


def _line() -> str:
    """``file:line`` of the innermost frame of Vitrine, of the innermost outside torch where there is none."""
    frame, outside = sys._getframe(1), None
    while frame is not None:
        name = frame.f_code.co_filename
        if name != _HERE and "/torch/" not in name:
            outside = outside or frame
            if _of_vitrine(name):
                return f"{name[len(_PRODUCT) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    assert outside is not None
    return f"{outside.f_code.co_filename.split('site-packages/')[-1]}:{outside.f_lineno}"
