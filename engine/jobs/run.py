"""Resumable jobs: ownership, identity of the inputs, and state on disk.

A job's results depend on its inputs alone, all of them by content. A run folder therefore belongs to the inputs it was
started with, and others are refused. Saved states are whole, and a killed run resumes to the same bytes.
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
"""File of a run's folder with its job and inputs, as JSON. It has no suffix, so no listing takes it for a result."""
FORMAT = 1
"""Incremented when the meaning of a saved state changes, so that earlier states are refused."""
_KEY = "run"
Tensors = Mapping[str, torch.Tensor]


class RunState(NamedTuple):
    """A saved run: groups of named tensors (``weight``, ``average`` ...) and JSON-compatible facts."""

    tensors: dict[str, dict[str, torch.Tensor]]
    facts: dict[str, Any]


class Run:
    """A resumable job: with the same inputs it continues where it stopped; changed inputs are refused by name.

    ::

        inputs = {"network": unet, "pictures": files, "prompts": texts, "settings": config}
        with Run(folder, "training", inputs) as run:
            state = run.load({"adam": adam})  # None in a new run
            ...
            run.save({"weight": weights}, {"adam": adam}, {"done": 20})

    While the block is open the process owns the folder: a second process is refused, one that died is replaced.
    Temporary files of killed processes are deleted. The state can be read before the block is entered.

    Args:
        place: a folder, or one state file by its suffix (.safetensors, .json); None stores nothing, and all methods do
            nothing.
        job: kind of job, so that two jobs never use each other's state.
        inputs: name -> value, everything that results depend on, as :func:`~.digests.digest` accepts it; only read if
            there is a place. PyTorch's version is added, since kernels round differently, and networks add that of
            their library.
        begun: patterns of files that mean that there is work to lose. Without a match, other inputs start a new run.
        workers: processes that share the job and its folder; the first owns it for all.
    """

    def __init__(
        self, path: str | Path | None, job: str, inputs: Mapping[str, object], begun: tuple[str, ...] = (STATE,),
        workers: Workers = ALONE,
    ) -> None:  # fmt: skip
        self.path = None if path is None else Path(path)
        self._job, self._inputs, self._begun, self._workers = job, dict(inputs), begun, workers
        self._open = ExitStack()
        self._loaded: tuple[int, int] | None = None
        self._read = False

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Job and inputs as stored: short plain values, and digests of all others."""
        versions = {"format": FORMAT, "library": version_of("torch")}
        table = {"job": self._job, **versions, "inputs": described(self._inputs)}
        return parse_table(json.dumps(table))

    def known(self) -> Self:
        """The run with its inputs digested now, before the job changes them, as training changes its network."""
        if self.path is not None:
            _ = self.identity
        return self

    @property
    def mark(self) -> str:
        """16 digits that identify this job with these inputs, for a folder name."""
        return digest(self.identity)[:16]

    def below(self, name: str) -> Self:
        """The run in a subfolder ``name-mark``, which differs for other inputs."""
        if self.path is not None:
            self.path = self.path / f"{name}-{self.mark}"
        return self

    # --- owner ----------------------------------------------------------------------------------------------------
    def __enter__(self) -> Self:
        if self.path is None:
            return self
        try:
            if not self._workers.index:
                self._open.enter_context(sole_owner(self.path))
                self._refuse_others()
                self._refuse_moved_on()
                if self._is_file:
                    sweep(self.path.parent, self.path.name)
                else:
                    sweep(self.path, below=True)
            self._workers.meet()
            self._refuse_others()
            if not self._is_file:  # processes without a group may arrive before the first
                write_json(self.path / NOTE, self.identity)
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
        return self.path is not None and self.path.suffix in FILES

    @property
    def _state(self) -> Path:
        assert self.path is not None
        return self.path if self._is_file else self.path / STATE

    # --- identity -------------------------------------------------------------------------------------------------
    def _refuse_others(self) -> None:
        """Refuses a folder with work of other inputs."""
        path = self.path
        if path is None or not path.exists():
            return
        if not self._is_file and not _begun_in(path, self._begun):
            return
        known = self._known()
        if known is None:
            shown = f"{path.name}, begun by an earlier version of Vitrine"
            raise refuse("run", shown, "a run of this version", f"start again: choose another file, or {self._clear}")
        if changes := differences(known, self.identity):
            raise other_inputs(path, changes)

    def _reading(self, file: Path) -> named:
        return named(file, "run", "a whole state", f"start again: {self._clear}")

    @property
    def _clear(self) -> str:
        assert self.path is not None
        return _cleared(self.path)

    def _known(self) -> dict[str, Any] | None:
        """The stored identity; None if an earlier version did not write one."""
        assert self.path is not None
        if self._is_file:
            return self._known_of_file(self.path)
        note = self.path / NOTE
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
        """Refuses to overwrite a state that another process has saved since this one read it."""
        if self._read and _seen(self._state) != self._loaded:
            shown = f"{self._state.parent.name}, which another process has continued"
            raise refuse("run", shown, "a state that has not changed since it was read", "run the same call again")

    # --- state ----------------------------------------------------------------------------------------------------
    def save(
        self, tensors: Mapping[str, Tensors], optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Writes the state atomically.

        Args:
            tensors: group -> name -> tensor; a group's name has no slash.
            optimizers: by name; their state tensors are saved.
            facts: step counters and other JSON-compatible values.
        """
        if self.path is None:
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
        """The saved state, after restoring each optimiser; None if nothing was saved."""
        if self.path is None:
            return None
        self._refuse_others()
        self._read, self._loaded = True, _seen(self._state)
        if not self._state.is_file():
            return None
        with self._reading(self._state):
            kind = torch.device(device).type  # safetensors does not accept "cpu:0", which torchrun's processes use
            flat, metadata = read_safetensors(self._state, "cpu" if kind == "cpu" else device)
            facts = parse_table(metadata["facts"])
            return RunState(_restored(flat, optimizers or {}), facts)

    def save_table(self, table: Mapping[str, Any]) -> None:
        """Writes a state that is a single JSON file."""
        if self.path is not None:
            write_json(self.path, {_KEY: self.identity, **table})

    def load_table(self) -> dict[str, Any]:
        """The state of :meth:`save_table`; {} if nothing was saved."""
        if self.path is None or not self.path.is_file():
            return {}
        self._refuse_others()
        with self._reading(self.path):
            return {k: v for k, v in parse_table(self.path.read_text(encoding="utf-8")).items() if k != _KEY}


def other_inputs(path: Path, changes: Sequence[str]) -> VitrineError:
    """The error for a folder that was started with other inputs, which it names."""
    shown = f"{path.name}, begun with {'; '.join(changes)}"
    return refuse(
        "run", shown, "the inputs that it was begun with",
        f"give those, or start again: choose another file, or {_cleared(path)}",
    )  # fmt: skip


def _cleared(path: Path) -> str:
    return f"{'delete' if path.suffix in FILES else 'empty'} {path.name}"


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
    """Whether a folder has a file of a job, not counting hidden ones."""
    return any(not file.name.startswith(".") for pattern in patterns for file in folder.glob(pattern))


def forget(file: str | Path) -> None:
    """Deletes a state that is one file, once its job is finished."""
    file = Path(file)
    for path in (file, file.with_name(f".{file.name}{LOCK}")):
        path.unlink(missing_ok=True)


def _restored(
    flat: Mapping[str, torch.Tensor], optimizers: Mapping[str, torch.optim.Optimizer]
) -> dict[str, dict[str, torch.Tensor]]:
    """Groups of tensors; optimisers are restored from theirs."""
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
    """Modification time and inode; None if there is no such file."""
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
        until: stop once this many are done in total; 0 runs none, None all.
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
