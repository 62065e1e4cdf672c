"""One mechanism for every job that resumes: who owns it, what it was begun with, and its state on disk.

A job's numbers depend on its inputs alone: on all of them, by content. So a place on disk belongs to the inputs that it
was begun with, and any other are refused. What was saved is whole, and a run that was killed goes on from it to the
same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from typing_extensions import Self

from ..errors import VitrineError, refuse
from ..io.files import named, parse_table, read_safetensors, save_safetensors, write_json
from ..io.ownership import FILES, LOCK, sole_owner
from ..io.temporary_files import sweep
from ..runtime.processes import ALONE, Workers
from ..runtime.progress import Progress
from .digests import described, digest, version_of

STATE = "state.safetensors"
NOTE = ".run"
"""In a run's folder: its job and inputs, as JSON. Without an ending, so that no list of files takes it for a result."""
FORMAT = 1
"""Raised when the meaning of a saved state changes: earlier ones are refused then."""
_KEY = "run"
Tensors = Mapping[str, torch.Tensor]


class RunState(NamedTuple):
    """A saved run: groups of named tensors (``weight``, ``average`` ...) and facts that JSON can hold."""

    tensors: dict[str, dict[str, torch.Tensor]]
    facts: dict[str, Any]


class Run:
    """A job that resumes: the same inputs go on where it stopped, others are refused by name.

    ::

        inputs = {"network": unet, "pictures": files, "prompts": texts, "settings": config}
        with Run(folder, "training", inputs) as run:
            state = run.load({"adam": adam})  # None in a run that begins
            ...
            run.save({"weight": weights}, {"adam": adam}, {"done": 20})

    While the block is open the process owns the place: a second one is refused, and an owner that died is succeeded.
    Temporary files of killed processes are deleted. The place can be read before the block is entered.

    Args:
        place: a folder, or one file by its ending (.safetensors, .json), which then is the state; None keeps nothing,
            and all methods do nothing.
        job: what is done, so that no two jobs take each other's state.
        inputs: name -> value, everything that the numbers depend on, as :func:`~.digests.digest` understands it. They
            are read only if there is a place. PyTorch's version is added, as kernels round differently; networks bring
            that of their library.
        begun: patterns of the files that mean there is work to lose. Without any, other inputs simply begin.
        workers: processes that share the job and its place; the first owns it for all.

    Raises:
        VitrineError: On entering, loading or saving: the place belongs to other inputs, to an earlier version of
            Vitrine, or to another process, or a file is damaged.
    """

    def __init__(
        self, place: str | Path | None, job: str, inputs: Mapping[str, object], begun: tuple[str, ...] = (STATE,),
        workers: Workers = ALONE,
    ) -> None:  # fmt: skip
        self.place = None if place is None else Path(place)
        self._job, self._inputs, self._begun, self._workers = job, dict(inputs), begun, workers
        self._open = ExitStack()
        self._loaded: tuple[int, int] | None = None
        self._read = False

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Job and inputs as they are written down: short plain values, and digests of all others."""
        versions = {"format": FORMAT, "library": version_of("torch")}
        table = {"job": self._job, **versions, "inputs": described(self._inputs)}
        return parse_table(json.dumps(table))

    def known(self) -> Self:
        """The run with its inputs read now, before the job changes them: a training its network."""
        if self.place is not None:
            _ = self.identity
        return self

    @property
    def mark(self) -> str:
        """16 digits for this job with these inputs, for a folder's name."""
        return digest(self.identity)[:16]

    def below(self, name: str) -> Self:
        """The run in a folder of its own below its place, ``name-mark``: other inputs have another."""
        if self.place is not None:
            self.place = self.place / f"{name}-{self.mark}"
        return self

    # --- owner ----------------------------------------------------------------------------------------------------
    def __enter__(self) -> Self:
        if self.place is None:
            return self
        try:
            if not self._workers.index:
                self._open.enter_context(sole_owner(self.place))
                self._refuse_others()
                self._refuse_moved_on()
                if self._is_file:
                    sweep(self.place.parent, self.place.name)
                else:
                    sweep(self.place, below=True)
            self._workers.meet()
            self._refuse_others()
            if not self._is_file:  # processes that cannot meet may be here before the first
                write_json(self.place / NOTE, self.identity)
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    @property
    def _is_file(self) -> bool:
        return self.place is not None and self.place.suffix in FILES

    @property
    def _state(self) -> Path:
        assert self.place is not None
        return self.place if self._is_file else self.place / STATE

    # --- identity -------------------------------------------------------------------------------------------------
    def _refuse_others(self) -> None:
        """Refuses a place where other inputs have left work."""
        place = self.place
        if place is None or not place.exists():
            return
        if not self._is_file and not _begun_in(place, self._begun):
            return
        known = self._known()
        if known is None:
            shown = f"{place.name}, begun by an earlier version of Vitrine"
            raise refuse("run", shown, "a run of this version", f"start again: choose another file, or {self._clear}")
        if changes := differences(known, self.identity):
            raise other_inputs(place, changes)

    def _reading(self, file: Path) -> named:
        return named(file, "run", "a whole state", f"start again: {self._clear}")

    @property
    def _clear(self) -> str:
        assert self.place is not None
        return _cleared(self.place)

    def _known(self) -> dict[str, Any] | None:
        """What the place was begun with; None where an earlier version did not write it down."""
        assert self.place is not None
        if self._is_file:
            return self._known_of_file(self.place)
        note = self.place / NOTE
        if note.is_file():
            with self._reading(note):
                return parse_table(note.read_text(encoding="utf-8"))
        return self._known_of_file(self._state) if self._state.is_file() else None  # saved, but never entered

    def _known_of_file(self, file: Path) -> dict[str, Any] | None:
        with self._reading(file):
            if file.suffix == ".json":
                table = parse_table(file.read_text(encoding="utf-8"))
                return table[_KEY] if isinstance(table.get(_KEY), dict) else None
            from safetensors import safe_open

            with safe_open(str(file), "pt") as opened:
                text = (opened.metadata() or {}).get(_KEY)
            return None if text is None else parse_table(text)

    def _refuse_moved_on(self) -> None:
        """Refuses to write over what another process has saved since this one read the state."""
        if self._read and _seen(self._state) != self._loaded:
            shown = f"{self._state.parent.name}, which another process has gone on with"
            raise refuse("run", shown, "a state that is still the one that was read", "run the same call again")

    # --- state ----------------------------------------------------------------------------------------------------
    def save(
        self, tensors: Mapping[str, Tensors], optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Writes the state, whole or not at all.

        Args:
            tensors: group -> name -> tensor; a group's name has no slash.
            optimizers: by name; their slots are saved.
            facts: step counters and the like: anything JSON can hold.
        """
        if self.place is None:
            return
        flat = {f"{group}/{name}": value for group, entries in tensors.items() for name, value in entries.items()}
        for name, optimizer in (optimizers or {}).items():
            for number, slots in optimizer.state_dict()["state"].items():
                flat |= {f"optimizer/{name}/{number}/{key}": torch.as_tensor(value) for key, value in slots.items()}
        header = {"facts": json.dumps(facts or {}), _KEY: json.dumps(self.identity)}
        save_safetensors(self._state, flat, header)
        self._read, self._loaded = True, _seen(self._state)

    def load(
        self, optimizers: Mapping[str, torch.optim.Optimizer] | None = None, device: str = "cpu"
    ) -> RunState | None:
        """What :meth:`save` wrote, after restoring each optimiser's slots; None if nothing was saved."""
        if self.place is None:
            return None
        self._refuse_others()
        self._read, self._loaded = True, _seen(self._state)
        if not self._state.is_file():
            return None
        with self._reading(self._state):
            kind = torch.device(device).type  # safetensors knows no "cpu:0", as torchrun's processes have it
            flat, metadata = read_safetensors(self._state, "cpu" if kind == "cpu" else device)
            facts = parse_table(metadata["facts"])
            return RunState(_restored(flat, optimizers or {}), facts)

    def save_table(self, table: Mapping[str, Any]) -> None:
        """Writes a state that is one JSON file."""
        if self.place is not None:
            write_json(self.place, {_KEY: self.identity, **table})

    def load_table(self) -> dict[str, Any]:
        """What :meth:`save_table` wrote; {} if nothing was."""
        if self.place is None or not self.place.is_file():
            return {}
        self._refuse_others()
        with self._reading(self.place):
            return {k: v for k, v in parse_table(self.place.read_text(encoding="utf-8")).items() if k != _KEY}


def other_inputs(place: Path, changes: Sequence[str]) -> VitrineError:
    """The refusal of a place that was begun with other inputs, which are named."""
    shown = f"{place.name}, begun with {'; '.join(changes)}"
    return refuse(
        "run", shown, "the inputs that it was begun with",
        f"give those, or start again: choose another file, or {_cleared(place)}",
    )  # fmt: skip


def _cleared(place: Path) -> str:
    return f"{'delete' if place.suffix in FILES else 'empty'} {place.name}"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two identities, by name: ``other pictures``, ``steps 100 (now 200)``."""
    first, second = _flat(before), _flat(now)
    changes = []
    for name in sorted(first.keys() | second.keys()):
        old, new = first.get(name), second.get(name)
        if old == new and (name in first) == (name in second):
            continue
        shown = name.removeprefix("inputs.").removesuffix(".weights").removeprefix("settings.")
        hidden = any(isinstance(value, str) and value.startswith("sha256:") for value in (old, new))
        plain = not hidden and name in first and name in second and not name.endswith(".weights")
        changes.append(f"{shown} {old} (now {new})" if plain else f"other {shown}")
    return changes


def _flat(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return flat


def _begun_in(folder: Path, patterns: Sequence[str]) -> bool:
    """Whether a folder holds a file of a job, hidden ones left out."""
    return any(not file.name.startswith(".") for pattern in patterns for file in folder.glob(pattern))


def forget(file: str | Path) -> None:
    """Deletes a state that is one file, once its job is finished."""
    file = Path(file)
    for path in (file, file.with_name(f".{file.name}{LOCK}")):
        path.unlink(missing_ok=True)


def _restored(
    flat: Mapping[str, torch.Tensor], optimizers: Mapping[str, torch.optim.Optimizer]
) -> dict[str, dict[str, torch.Tensor]]:
    """Groups of tensors; those of optimisers are put back into them."""
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    slots: dict[str, dict[int, dict[str, torch.Tensor]]] = {name: {} for name in optimizers}
    for key, value in flat.items():
        group, _, name = key.partition("/")
        if group != "optimizer":
            tensors.setdefault(group, {})[name] = value
            continue
        optimizer_name, number, slot = name.rsplit("/", 2)
        slots[optimizer_name].setdefault(int(number), {})[slot] = value
    for name, optimizer in optimizers.items():
        optimizer.load_state_dict(optimizer.state_dict() | {"state": slots[name]})
    return tensors


def _seen(file: Path) -> tuple[int, int] | None:
    """When and as which file it was written; None where there is none."""
    if not file.is_file():
        return None
    entry = file.stat()
    return entry.st_mtime_ns, entry.st_ino


def state_facts(folder: str | Path) -> dict[str, Any]:
    """The facts of a saved run, without its tensors."""
    from safetensors import safe_open

    with safe_open(str(Path(folder) / STATE), "pt") as file:
        return parse_table(file.metadata()["facts"])


def run_steps(
    step: Callable[[], Any], done: Callable[[], int], total: int,
    *, until: int | None = None, save: Callable[[], None], save_every: int, progress: Progress,
    preview: Callable[[], torch.Tensor | None] = lambda: None,
) -> None:  # fmt: skip
    """Steps until ``total`` are done, saving every ``save_every`` steps, at the end, and when interrupted.

    Args:
        until: stop once so many are done in all; 0 takes none, None all.
    """
    last = total if until is None else min(until, total)
    while done() < last:
        step()
        if done() % save_every == 0:
            save()
        try:
            progress(done(), total, preview())
        except BaseException:  # interrupted between two steps, where the state is consistent
            save()
            raise
    save()
