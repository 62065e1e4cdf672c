"""Resumable jobs: ownership, identity of the inputs, and state on disk.

A job's results depend on its inputs alone, all of them by content. A run folder therefore belongs to the inputs it was
started with, and others are refused. Saved states are whole, and a killed run resumes to the same bytes.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from typing_extensions import Self

from ..errors import VitrineError, refuse
from ..io.files import named, parse_table, read_safetensors, save_safetensors, write_json
from ..io.temporary_files import sweep
from ..runtime.processes import ALONE, Workers
from ..runtime.progress import Progress
from .digests import described, digest, version_of

STATE = "state.safetensors"
NOTE = ".run"
"""File of a run's folder with its job and inputs, as JSON. It has no suffix, so no listing takes it for a result."""
LOCK, _OWNER = ".owner.lock", ".owner.json"
_KEY = "run"
Tensors = Mapping[str, torch.Tensor]
Optimizers = Mapping[str, torch.optim.Optimizer]


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
        path: a folder, or one state file (.safetensors); None stores nothing, and all methods do nothing.
        job: kind of job, so that two jobs never use each other's state.
        inputs: name -> value, everything that results depend on, as :func:`~.digests.digest` accepts it; digested here,
            before a training changes its network, and only if there is a path. PyTorch's version is added, since
            kernels round differently, and networks add that of their library.
        begun: patterns of files that mean that there is work to lose. Without a match, other inputs start a new run.
        workers: processes that share the job and its folder; the first owns it for all.

    Attributes:
        identity: name -> short plain value or digest: the job and its inputs, as stored.
    """

    def __init__(
        self,
        path: str | Path | None,
        job: str,
        inputs: Mapping[str, object],
        begun: tuple[str, ...] = (STATE,),
        workers: Workers = ALONE,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.identity: dict[str, Any] = {}
        if self.path is not None:
            self.identity = {"job": job, "library": version_of("torch"), **_flat(described(inputs))}
        self._begun, self._workers, self._open = begun, workers, ExitStack()
        self._read: list[tuple[int, int] | None] = []
        """Which state this process has read or written last, once it has."""

    @property
    def mark(self) -> str:
        """16 digits that identify this job with these inputs, for a folder name."""
        return digest(self.identity)[:16]

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
                if is_file(self.path):
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
    def _state(self) -> Path:
        assert self.path is not None
        return self.path if is_file(self.path) else self.path / STATE

    def _sign(self) -> None:
        """Writes a folder's identity; a state file has it inside."""
        if self.path is not None and not is_file(self.path):
            write_json(self.path / NOTE, self.identity)

    def _refuse_others(self) -> None:
        """Refuses a folder or file with work of other inputs."""
        path = self.path
        if path is None:
            return
        work = [path] if is_file(path) else [file for pattern in self._begun for file in path.glob(pattern)]
        if not any(file.exists() and not file.name.startswith(".") for file in work):
            return
        note = path if is_file(path) else path / NOTE
        with self._reading(note):
            text = _header(note).get(_KEY) if is_file(path) else note.read_text("utf-8") if note.is_file() else None
            begun_with = None if text is None else parse_table(text)
        if begun_with is None:
            shown = f"{path.name}, which does not say what it was begun with"
            raise refuse("run", shown, "a run's folder or file", _start_again(path))
        if changes := differences(begun_with, self.identity):
            raise other_inputs(path, changes)

    def _reading(self, file: Path) -> named:
        assert self.path is not None
        return named(file, "run", "a whole state", f"start again: {_cleared(self.path)}")

    def save(
        self,
        tensors: Mapping[str, Tensors],
        optimizers: Optimizers | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
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

    def load(self, optimizers: Optimizers | None = None, device: str = "cpu") -> RunState | None:
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


def other_inputs(path: Path, changes: Sequence[str]) -> VitrineError:
    """The error for a folder that was started with other inputs, which it names."""
    shown = f"{path.name}, begun with {'; '.join(changes)}"
    return refuse("run", shown, "the inputs that it was begun with", f"give those, or {_start_again(path)}")


def _start_again(path: Path) -> str:
    return f"start again: choose another file, or {_cleared(path)}"


def _cleared(path: Path) -> str:
    return f"{'delete' if is_file(path) else 'empty'} {path.name}"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two identities, by name: ``other pictures``, ``steps 100 (now 200)``."""
    changes = []
    for name in sorted(before.keys() | now.keys()):
        values = [identity.get(name, "sha256:") for identity in (before, now)]  # absent is shown as a digest is
        if values[0] != values[1]:
            shown, hidden = name.removeprefix("settings."), any(str(v).startswith("sha256:") for v in values)
            changes.append(f"other {shown}" if hidden else f"{shown} {values[0]} (now {values[1]})")
    return changes


def _flat(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """{"a": {"": 0, "b": 1}} -> {"a": 0, "a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{before}.{key}".strip(".")
        flat |= _flat(value, name) if isinstance(value, Mapping) else {name: value}
    return flat


def is_file(path: Path) -> bool:
    """Whether a path stands for a state that is one file; any other is a folder."""
    return path.suffix == ".safetensors"


@contextmanager
def sole_owner(path: str | Path) -> Iterator[None]:
    """Owns ``path`` while the block is open: a folder, created if missing, or a state file.

    The lock is the operating system's (``filelock``, which torch installs), so it ends with its process, even a killed
    one. On a shared disk it works if the file system supports such locks.
    """
    from filelock import FileLock, Timeout

    path = Path(path)
    folder = path.parent if is_file(path) else path
    folder.mkdir(parents=True, exist_ok=True)
    before = f".{path.name}" if is_file(path) else ""
    lock, note = FileLock(str(folder / f"{before}{LOCK}")), folder / f"{before}{_OWNER}"
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        shown = f"{path.name}, in use by {_owner(note)}"
        raise refuse(
            "work folder", shown, "a folder that no other process uses", "wait for that process, or stop it"
        ) from error
    try:
        write_json(note, {"process": os.getpid(), "machine": platform.node()})
        yield
    finally:
        note.unlink(missing_ok=True)
        lock.release()


def _owner(note: Path) -> str:
    try:
        owner = parse_table(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # about to be written, or just removed
        return "another process"
    return f"process {owner.get('process')} on {owner.get('machine')}"


def forget(file: str | Path) -> None:
    """Deletes a state that is one file, once its job is finished."""
    file = Path(file)
    for path in (file, file.with_name(f".{file.name}{LOCK}")):
        path.unlink(missing_ok=True)


def _restored(flat: Tensors, optimizers: Optimizers) -> dict[str, dict[str, torch.Tensor]]:
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
    step: Callable[[], Any],
    done: Callable[[], int],
    total: int,
    *,
    until: int | None = None,
    save: Callable[[], None],
    save_every: int,
    progress: Progress,
    preview: Callable[[], torch.Tensor | None] = lambda: None,
) -> None:
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
