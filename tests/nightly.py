"""The nightly lane: what takes too long for plain ``pytest``, in pieces that can be stopped and resumed.

    python tests/nightly.py                 # every piece that has not passed at this commit
    python tests/nightly.py --missing       # every piece that has not passed at any commit
    python tests/nightly.py 'full size*'    # the pieces whose names match
    python tests/nightly.py --check         # run nothing; status 1 if a piece has never passed

A piece is a test file with cases marked ``nightly``, or one of :data:`LONG`. Its result is written to
``tests/nightly.json`` when it ends: what ran, when, at which commit, for how many seconds, with which result.
Interrupted, it keeps the finished pieces; started again, it goes on with the others.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "nightly.json"
MARKED = re.compile(
    r"^\s*(@|pytestmark = )pytest\.mark\.nightly\b|marks=pytest\.mark\.nightly\b|nightly_but\(|page_modes\(", re.M
)
"""What marks a case in a test file: the mark itself, or ``tests/lanes.py``."""
INTERRUPTED = 2
"""pytest's exit status after Ctrl-C."""


@dataclass(frozen=True)
class Piece:
    """One pytest run.

    Attributes:
        name: its key in the record.
        arguments: of pytest.
        environ: variables that the run needs, beside the caller's.
        alone: it needs the whole machine, for its figures or its memory; nothing runs next to it.
    """

    name: str
    arguments: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)
    alone: bool = False


AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
EVERY = ("-m", "nightly or not nightly")
PAGES = ("page", "page_console", "page_keys", "people_panel", "points", "neuron_browser", "choices")
"""Tests of ComfyUI's page whose everyday cases run on its newest version too: one for each widget of ours."""
BENCHMARKS = ("tap_cost", "nemo_cost", "w2w_cost", "node_cost")
"""Files of tests/benchmarks, each of which holds a bound."""
LONG = (
    Piece("rounding, as AVX2", ("tests", "-m", "rounding"), AVX2),
    *(Piece(f"newest page, test_{name}.py", (f"tests/comfy/test_{name}.py",), {"VITRINE_PAGE": "newest"})
      for name in PAGES),
    *(Piece(f"full size, {family}, {path.name}", (f"tests/full_size/{path.name}",), {"VITRINE_FULL_SIZE": family},
            alone=family == "sdxl")
      for family in ("sd15", "sdxl") for path in sorted((ROOT / "tests" / "full_size").glob("test_*.py"))
      if path.name != "test_page.py"),
    *(Piece(f"benchmarks, test_{name}.py", (f"tests/benchmarks/test_{name}.py",),
            {"VITRINE_BENCH": "1", "VITRINE_BENCH_PROMPTS": "8"}, alone=True) for name in BENCHMARKS),
    Piece("published weights", ("tests/published",), {"VITRINE_PUBLISHED": "1"}),
    Piece("published VAE", ("tests/comfy/test_taef2.py",), {"VITRINE_PUBLISHED": "1"}),
    Piece("hostile headers", ("tests/attacks/test_headers.py",), {"VITRINE_HEADERS": "100"}),
    Piece("large jobs", ("tests/engine/jobs/test_large_jobs.py", *EVERY), {"VITRINE_LARGE": "1"}),
)  # fmt: skip
"""Runs that an environment variable makes larger. Those that take hours come last. A GPU's tests skip without one."""


def pieces() -> list[Piece]:
    """Every piece: the files with cases marked ``nightly``, then the long ones."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    names = [str(p.relative_to(ROOT)) for p in files if MARKED.search(p.read_text(encoding="utf-8"))]
    return [*(Piece(name, (name, "-m", "nightly")) for name in names), *LONG]


def run(piece: Piece) -> dict[str, Any] | None:
    """Run one piece and return its entry of the record, or None when it was interrupted."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *piece.arguments, f"--junitxml={report}", "-p", "no:cacheprovider"]
        environ = {**({} if piece.alone else {"OMP_NUM_THREADS": "1"}), **os.environ, **piece.environ}
        start = time.monotonic()
        ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
        seconds = round(time.monotonic() - start)
        counts = _counts(report) if report.is_file() else {}
    if ended.returncode == INTERRUPTED:
        return None
    passed = ended.returncode == 0 and counts.get("passed", 0) > 0
    entry = {
        "command": " ".join(
            [*(f"{k}={v}" for k, v in piece.environ.items()), "pytest", *map(_quoted, piece.arguments)]
        ),
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "seconds": seconds,
        "result": "passed" if passed else "failed",
        **counts,
    }
    if not passed:
        print((ended.stdout + ended.stderr)[-4000:], flush=True)  # names folders of this machine: not for the record
    return entry


def _quoted(argument: str) -> str:
    return f"'{argument}'" if " " in argument else argument


def _counts(report: Path) -> dict[str, Any]:
    """Of a JUnit report: how many cases passed, failed and were skipped, and the ids of those that failed."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None]
    counts: dict[str, Any] = {"passed": len(cases) - len(failed) - len(skipped), "skipped": len(skipped)}
    if failed:
        counts["failures"] = [f"{c.get('classname')}::{c.get('name')}" for c in failed]
    return counts


def commit() -> str:
    """The checked-out commit, with ``+`` where tracked files differ from it (the record itself aside)."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        return "unknown"
    changed = subprocess.run(
        [*git, "status", "--porcelain", "-uno", "--", ".", ":!tests/nightly.json"], capture_output=True, text=True
    )
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


class Record:
    """``tests/nightly.json``: piece -> its last result. Written whole after each piece."""

    def __init__(self, path: Path):
        self.path, self._lock = path, threading.Lock()
        self.entries = self._read()

    def _read(self) -> dict[str, Any]:
        return json.loads(self.path.read_text(encoding="utf-8")) if self.path.is_file() else {}

    def passed(self, piece: Piece, at: str | None = None) -> bool:
        """Whether a piece passed; with ``at``, at that commit."""
        entry = self.entries.get(piece.name, {})
        return entry.get("result") == "passed" and at in (None, entry.get("commit"))

    def keep(self, piece: Piece, entry: dict[str, Any], known: list[str]) -> None:
        """Add a result to what is in the file by now; entries of pieces that no longer exist go."""
        with self._lock:
            self.entries = {k: v for k, v in {**self._read(), piece.name: entry}.items() if k in known}
            beside = self.path.with_suffix(".part")
            beside.write_text(json.dumps(dict(sorted(self.entries.items())), indent=1) + "\n", encoding="utf-8")
            beside.replace(self.path)


def lane(chosen: list[Piece], known: list[str], record: Record, workers: int) -> int:
    """Run pieces, ``workers`` at a time and those that need the machine alone after them. The number that failed."""
    failed = []

    def one(piece: Piece) -> None:
        entry = run(piece)
        if entry is None:
            return
        record.keep(piece, entry, known)
        print(f"{entry['result']:7} {entry['seconds']:6} s  {piece.name}", flush=True)
        if entry["result"] != "passed":
            failed.append(piece.name)
            print("\n".join(entry.get("failures", [])), flush=True)

    with ThreadPoolExecutor(workers) as pool:
        try:
            list(pool.map(one, [p for p in chosen if not p.alone]))
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    for piece in (p for p in chosen if p.alone):
        one(piece)
    return len(failed)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 if every chosen piece passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["*"], help="globs of piece names")
    parser.add_argument("--missing", action="store_true", help="accept a pass at an earlier commit")
    parser.add_argument("--check", action="store_true", help="run nothing, report pieces that have never passed")
    parser.add_argument("--list", action="store_true", help="print the names of the pieces that would run")
    parser.add_argument("--workers", type=int, default=2, help="pieces at a time, one thread each")
    options = parser.parse_args(arguments)
    record, every = Record(RECORD), pieces()
    accepted = None if options.missing or options.check else commit()
    chosen = [p for p in every if any(fnmatch.fnmatch(p.name, glob) for glob in options.names)]
    chosen = [p for p in chosen if not record.passed(p, accepted)]
    if options.check or options.list:
        print("\n".join(p.name for p in chosen))
        return int(options.check and bool(chosen))
    try:
        return int(bool(lane(chosen, [p.name for p in every], record, options.workers)))
    except KeyboardInterrupt:
        return 130  # what has ended is kept


if __name__ == "__main__":
    sys.exit(main())
