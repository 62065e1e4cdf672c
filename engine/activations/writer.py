"""Activations of data sets larger than memory, in shards on disk: resumable, with atomic writes.

Each shard is one safetensors file whose header lists its items, and appears by rename. The folder itself is the
source of truth; ``index.json`` only saves opening every header, and is repaired from the shards after a crash.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import refuse
from ..io.files import named, open_artefact, parse_json, save_artefact, write_json
from ..io.temporary_files import sweep
from ..jobs.run import other_inputs
from .container import Activations
from .tap_config import TapConfig

SHARD_KIND = "vitrine.activations.shard"
INDEX_KIND = "vitrine.activations.index"
VERSION = 1
_INDEX = "index.json"
_INDEX_EVERY_SECONDS = 5.0


class ActivationWriter:
    """Streams items to ``folder``. After an interruption, open it again and skip existing items.

    ::

        with ActivationWriter("taps", config) as writer:
            for name, picture in pictures:
                if name not in writer:
                    writer.add(name, tap(picture))

    Args:
        folder: created if missing.
        config: stored in the index; a folder started with another config is refused, so shards never mix settings.
        shard_bytes: flush when this many bytes are buffered, which bounds memory.

    An item counts as finished when its shard is on disk, so an interruption loses at most one buffer. Several
    processes may write different items to one folder: shard names never collide.
    """

    def __init__(self, folder: str | Path, config: TapConfig | None = None, shard_bytes: int = 256 * 2**20) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.config = None if config is None else config.to_dict()
        self.shard_bytes = shard_bytes
        self._shards = _read_folder(self.folder, self.config)
        self._done = {key for keys in self._shards.values() for key in keys}
        self._buffer: dict[str, Activations] = {}
        self._made_of: dict[str, str] = {}
        self._buffered, self._indexed_at = 0, 0.0
        sweep(self.folder)

    def __contains__(self, key: str) -> bool:
        return key in self._done or key in self._buffer

    def __len__(self) -> int:
        return len(self._done) + len(self._buffer)

    def __enter__(self) -> ActivationWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()  # buffered items are complete, so they are written also after an interruption

    def holds(self, key: str, made_of: str) -> bool:
        """Whether an item is stored; ``made_of`` is the digest of its image and prompt."""
        if key in self and self._made_of.get(key, self._earlier.get(key, made_of)) != made_of:
            raise other_inputs(self.folder, [f"another picture or prompt for {key}"])
        return key in self

    @cached_property
    def _earlier(self) -> dict[str, str]:
        """Key -> digest of the items that existed when the folder was opened."""
        digests = {}
        for name in list(self._shards):
            for item in open_artefact(self.folder / name, SHARD_KIND, VERSION)[1]["items"]:
                if "made_of" in item:
                    digests[item["key"]] = item["made_of"]
        return digests

    def add(self, key: str, activations: Activations, made_of: str = "") -> None:
        """Store one item under a unique key.

        Args:
            made_of: a digest of its inputs, for :meth:`holds`.
        """
        if not isinstance(key, str) or not key or key in self:
            raise refuse("key", key, "a new, non-empty string", "test `key in writer` first to resume")
        self._buffer[key] = activations.to("cpu")
        if made_of:
            self._made_of[key] = made_of
        self._buffered += sum(t.numel() * t.element_size() for t in activations.tensors().values())
        if self._buffered >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write the buffer as one shard."""
        if not self._buffer:
            return
        name = f"shard-{len(self._shards):06d}-{secrets.token_hex(4)}.safetensors"
        tensors, items = {}, []
        for i, (key, value) in enumerate(self._buffer.items()):
            tensors.update(value.tensors(f"{i}/"))
            made_of = {"made_of": self._made_of[key]} if key in self._made_of else {}
            items.append({"key": key, **made_of, **value.header()})

        def check(tensors: dict[str, Any], header: dict[str, Any]) -> None:
            for i, item in enumerate(header["items"]):
                Activations.from_tensors(tensors.__getitem__, item, f"{i}/", name)

        save_artefact(self.folder / name, tensors, SHARD_KIND, VERSION, {"config": self.config, "items": items}, check)
        self._shards[name] = list(self._buffer)
        self._done.update(self._buffer)
        self._buffer, self._buffered = {}, 0
        if time.monotonic() - self._indexed_at > _INDEX_EVERY_SECONDS:  # rewriting it per shard would be quadratic
            self._write_index()

    def close(self) -> None:
        """Flush and write the index; idempotent."""
        self.flush()
        self._write_index()

    def _write_index(self) -> None:
        index = {"kind": INDEX_KIND, "version": VERSION, "config": self.config, "shards": self._shards}
        write_json(self.folder / _INDEX, index)
        self._indexed_at = time.monotonic()


class ActivationReader(Mapping[str, Activations]):
    """Key -> :class:`Activations`, read lazily through memory maps, in the order written."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise refuse("folder", str(folder), "a folder that ActivationWriter wrote", "check the path")
        shards = _read_folder(self.folder, None)
        self._place = {key: name for name, keys in reversed(shards.items()) for key in keys}
        self._order = list(dict.fromkeys(key for keys in shards.values() for key in keys))
        self._open: tuple[str, Any, dict[str, tuple[int, Any]]] | None = None

    @property
    def config(self) -> TapConfig | None:
        """The config that the folder was written with, or None."""
        data, source = _stored_config(self.folder)
        with named(source, "file", "a valid tap config", "write the folder again"):
            return None if data is None else TapConfig.from_dict(data)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)

    def __getitem__(self, key: str) -> Activations:
        return self.read(key)

    def read(self, key: str, addresses: Sequence[str] | None = None) -> Activations:
        """One item, or only some of its sites.

        Raises:
            KeyError: If there is no such item.
            VitrineError: If its shard is damaged, or lacks a site.
        """
        name = self._place[key]
        with named(name, "file", "a shard with this key", "write the folder again"):
            if self._open is None or self._open[0] != name:
                handle, header = open_artefact(self.folder / name, SHARD_KIND, VERSION)
                self._open = (name, handle, {item["key"]: (i, item) for i, item in enumerate(header["items"])})
            number, item = self._open[2][key]
            path = str(self.folder / name)
            return Activations.from_tensors(self._open[1].get_tensor, item, f"{number}/", path, addresses)


def _read_folder(folder: Path, config: dict[str, Any] | None) -> dict[str, list[str]]:
    """Shard name -> keys, from the index if it is current, else from shard headers."""
    index = _read_index(folder)
    indexed = index.get("shards", {})
    indexed = indexed if isinstance(indexed, dict) else {}
    shards: dict[str, list[str]] = {}
    for path in sorted(folder.glob("shard-*.safetensors")):
        keys = indexed.get(path.name)
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            header = open_artefact(path, SHARD_KIND, VERSION)[1]
            with named(path, "file", "a shard with its keys", "delete it; its items are written again"):
                keys = [str(item["key"]) for item in header["items"]]
        shards[path.name] = keys
    stored = _stored_config(folder)[0] if shards else None
    if config is not None and stored is not None:
        stored = {**TapConfig(("*",)).to_dict(), **stored}  # settings added by a later version
    if config is not None and stored is not None and stored != config:
        changed = {k: v for k, v in config.items() if stored.get(k) != v}
        raise refuse("config", changed, {k: stored.get(k) for k in changed}, "use a new folder for other settings")
    return shards


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / _INDEX
    try:
        index = parse_json(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        index = {}  # repaired from the shards
    if not isinstance(index, dict) or index.get("kind", INDEX_KIND) != INDEX_KIND:
        raise refuse(
            "folder", str(folder), "an empty folder or one of Vitrine's", "index.json was written by another program"
        )
    if index and index.get("version") != VERSION:
        shown = f"{index.get('version')!r} in {path}"
        raise refuse("format version", shown, VERSION, "update Vitrine, or use a new folder")
    return index


def _stored_config(folder: Path) -> tuple[dict[str, Any] | None, Path]:
    """The config and the file that has it."""
    index = _read_index(folder)
    first = next(iter(sorted(folder.glob("shard-*.safetensors"))), None)
    header, source = index, folder / _INDEX
    if "config" not in index and first is not None:
        header, source = open_artefact(first, SHARD_KIND, VERSION)[1], first
    config = header.get("config")
    if config is not None and not isinstance(config, dict):
        raise refuse("config", f"{config!r} in {source}", "a table of settings", "write the folder again")
    return config, source
