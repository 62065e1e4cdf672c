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
        path: a folder, or one state file by its suffix (.safetensors, .json); None stores nothing, and all methods do
            nothing.
        job: kind of job, so that two jobs never use each other's state.
        inputs: name -> value, everything that results depend on, as :func:`~.digests.digest` accepts it; only read if
            there is a path. PyTorch's version is added, since kernels round differently, and networks add that of
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
        self._read: list[tuple[int, int] | None] = []
        """Which state this process has read or written last, once it has."""

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Job and inputs as stored: short plain values, and digests of all others."""
        table = {"job": self._job, "library": version_of("torch"), "inputs": described(self._inputs)}
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

    def __enter__(self) -> Self:
        if self.path is None:
            return self
        with ExitStack() as entered:
            if not self._workers.index:
                entered.enter_context(sole_owner(self.path))
                self._refuse_others()
                if self._read and self._read[-1] != _seen(self._state):
                    shown = f"{self._state.parent.name}, which another process has continued"
                    accepted = "a state that has not changed since it was read"
                    raise refuse("run", shown, accepted, "run the same call again")
                if self._is_file:
                    sweep(self.path.parent, self.path.name)
                else:
                    sweep(self.path, below=True)
            self._workers.meet()
            self._refuse_others()
            self._sign()  # processes without a group may arrive before the first
            self._open = entered.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    @property
    def _is_file(self) -> bool:
        return self.path is not None and self.path.suffix in FILES

    @property
    def _state(self) -> Path:
        assert self.path is not None
        return self.path if self._is_file else self.path / STATE

    def _sign(self) -> None:
        """Writes a folder's identity; a state file has it inside."""
        if self.path is not None and not self._is_file:
            write_json(self.path / NOTE, {_KEY: self.identity})

    def _refuse_others(self) -> None:
        """Refuses a folder with work of other inputs."""
        path = self.path
        if path is None or not path.exists():
            return
        work = (file for pattern in self._begun for file in path.glob(pattern))
        if not self._is_file and all(file.name.startswith(".") for file in work):
            return
        begun_with = self._identity_in(path if self._is_file else path / NOTE)
        if begun_with is None:
            shown, remedy = f"{path.name}, which does not say what it was begun with", _start_again(path)
            raise refuse("run", shown, "a run's folder or file", remedy)
        if changes := differences(begun_with, self.identity):
            raise other_inputs(path, changes)

    def _identity_in(self, file: Path) -> dict[str, Any] | None:
        if not file.is_file():
            return None
        with self._reading(file):
            if file.suffix != ".safetensors":
                begun_with = parse_table(file.read_text(encoding="utf-8")).get(_KEY)
                return begun_with if isinstance(begun_with, dict) else None
            text = _header(file).get(_KEY)
            return None if text is None else parse_table(text)

    def _reading(self, file: Path) -> named:
        assert self.path is not None
        return named(file, "run", "a whole state", f"start again: {_cleared(self.path)}")

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
        self._sign()
        save_safetensors(self._state, flat, {"facts": json.dumps(facts or {}), _KEY: json.dumps(self.identity)})
        self._read.append(_seen(self._state))

    def load(
        self, optimizers: Mapping[str, torch.optim.Optimizer] | None = None, device: str = "cpu"
    ) -> RunState | None:
        """The saved state, after restoring each optimiser; None if nothing was saved."""
        if self.path is None:
            return None
        self._refuse_others()
        self._read.append(_seen(self._state))
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
    return refuse("run", shown, "the inputs that it was begun with", f"give those, or {_start_again(path)}")


def _start_again(path: Path) -> str:
    return f"start again: choose another file, or {_cleared(path)}"


def _cleared(path: Path) -> str:
    return f"{'delete' if path.suffix in FILES else 'empty'} {path.name}"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two identities, by name: ``other pictures``, ``steps 100 (now 200)``."""
    first, second = _flat(before), _flat(now)
    changes = []
    for name in sorted(first.keys() | second.keys()):
        if name in first and name in second and first[name] == second[name]:
            continue
        shown = name.removeprefix("inputs.").removesuffix(".weights").removeprefix("settings.")
        values = (first.get(name), second.get(name))
        hidden = name.endswith(".weights") or any(str(value).startswith("sha256:") for value in values)
        plain = name in first and name in second and not hidden
        changes.append(f"{shown} {values[0]} (now {values[1]})" if plain else f"other {shown}")
    return changes


def _flat(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return flat


def forget(file: str | Path) -> None:
    """Deletes a state that is one file, once its job is finished."""
    file = Path(file)
    for path in (file, file.with_name(f".{file.name}{LOCK}")):
        path.unlink(missing_ok=True)


def _restored(flat: Tensors, optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, dict[str, torch.Tensor]]:
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
    return (file.stat().st_mtime_ns, file.stat().st_ino) if file.is_file() else None


def _header(file: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(str(file), "pt") as opened:
        return opened.metadata() or {}


def state_facts(folder: str | Path) -> dict[str, Any]:
    """The facts of a saved run, without its tensors."""
    return parse_table(_header(Path(folder) / STATE)["facts"])


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
