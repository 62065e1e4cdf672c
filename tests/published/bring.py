"""Brings weights that strangers published under MIT or Apache-2.0 onto this machine, outside the repository.

    python tests/published/bring.py             # from the public repositories, one commit each
    python tests/published/bring.py FOLDER      # from copies in FOLDER/OWNER+NAME/ where there are any

``files.json`` has repository, commit, path, size and digest of each file. They go to ``~/.cache/vitrine-published``, or
to ``$VITRINE_PUBLISHED_CACHE``; a file of another size or digest is not kept. ``$VITRINE_PUBLISHED`` is the default of
FOLDER, unless it is 1: ``VITRINE_PUBLISHED=1 pytest tests/published`` brings what is missing and tests it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HOSTS = "https://github.com"
Entry = dict[str, Any]


class NotBroughtError(Exception):
    """Why a file could not be brought."""


def table(name: str = "files.json") -> list[Entry]:
    """The files, in the order of the page."""
    entries: list[Entry] = json.loads((HERE / name).read_text(encoding="utf-8"))
    return entries


def cache() -> Path:
    """Where the files lie."""
    chosen = os.environ.get("VITRINE_PUBLISHED_CACHE")
    return Path(chosen) if chosen else Path("~/.cache/vitrine-published").expanduser()


def copies() -> Path | None:
    """A folder with copies, by ``$VITRINE_PUBLISHED``; None: only the public repositories have the files."""
    local = os.environ.get("VITRINE_PUBLISHED", "")
    return None if local in ("", "1") else Path(local)


def place(entry: Entry, into: Path) -> Path:
    """Of one file: every repository has its folder, in which paths are the author's."""
    return into / str(entry["repository"]).replace("/", "+") / entry["path"]


def right(entry: Entry, data: bytes) -> bool:
    """Whether these are the published bytes."""
    return len(data) == entry["bytes"] and hashlib.sha256(data).hexdigest() == entry["sha256"]


def bring(entry: Entry, into: Path, folder: Path | None = None, hosts: str = HOSTS) -> str:
    """Bring one file, whole or not at all; says where it came from.

    Raises:
        NotBroughtError: If it is nowhere, or not the published one.
    """
    if into.resolve() == ROOT or ROOT in into.resolve().parents:
        raise NotBroughtError(f"{into} is in the repository, where nothing of others belongs")
    target = place(entry, into)
    if target.is_file() and right(entry, target.read_bytes()):
        return "there"
    data, source = copied(entry, folder), "copied"
    if data is None:
        data, source = _fetched(entry, hosts), "fetched"
    if not right(entry, data):
        raise NotBroughtError(f"{len(data)} bytes with another digest than the published file's {entry['bytes']}")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(target.name + ".part")
    scratch.write_bytes(data)
    scratch.replace(target)
    return source


def copied(entry: Entry, folder: Path | None) -> bytes | None:
    """From a folder, by its path or its bare name; files of another digest do not count."""
    if folder is None:
        return None
    own = place(entry, folder)
    candidates = [own, folder / str(entry["repository"]).replace("/", "+") / own.name]
    contents = (path.read_bytes() for path in candidates if path.is_file())
    return next((data for data in contents if right(entry, data)), None)


def _fetched(entry: Entry, hosts: str) -> bytes:
    """From the public repository: one commit of it, in a folder that goes afterwards."""
    with tempfile.TemporaryDirectory() as scratch:
        git = ["git", "-C", scratch]
        address = f"{hosts}/{entry['repository']}"
        _run(["git", "init", "-q", scratch])
        _run([*git, "fetch", "-q", "--depth", "1", address, entry["commit"]])
        return _run([*git, "show", f"{entry['commit']}:{entry['path']}"])


def _run(command: list[str]) -> bytes:
    environ = os.environ | {"GIT_TERMINAL_PROMPT": "0"}
    ended = subprocess.run(command, capture_output=True, env=environ)
    if ended.returncode:
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        raise NotBroughtError(lines[-1] if lines else f"{command[0]} ended with {ended.returncode}")
    return ended.stdout


def main(arguments: list[str]) -> int:
    """Exit status: 0 if every file is there."""
    local = Path(arguments[0]) if arguments else copies()
    missing = 0
    for entry in table():
        try:
            said = bring(entry, cache(), local)
        except (NotBroughtError, OSError) as error:
            said, missing = f"not brought: {error}", missing + 1
        print(f"{entry['repository']}/{entry['path']}: {said}", flush=True)
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
