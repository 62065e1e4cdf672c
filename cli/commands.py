"""`vitrine demo | reproduce | addresses | verify`. Heavy imports are in `run`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from os import environ
from pathlib import Path
from typing import Annotated, NamedTuple

from tyro.conf import Positional, arg

from ..engine.pipelines.loading import LoadConfig
from ..engine.settings.setting_checks import Count, OutFile, OutFolder
from .options import Load

TABLES = Path(__file__).parents[1] / "engine" / "portraits" / "weights" / "addresses.json"
"""Site names of the shipped models, so that listing them needs neither torch nor diffusers."""


@dataclass(frozen=True)
class Demo:
    """Render, sample and tap the portraits model, and write a self-contained report."""

    out: OutFile = Path("report.html")
    """The HTML file to write."""

    def run(self) -> int:
        """0 on success."""
        from ..evidence.demo import write_report

        print(f"report: {write_report(self.out)}")
        return 0


@dataclass(frozen=True)
class Reproduce:
    """Measure the named claims and print a table; the exit status is 1 if one fails."""

    claims: Positional[Annotated[tuple[str, ...], arg(metavar="[CLAIMS ...]")]] = ()
    """Names or globs, e.g. portraits.quality or 'portraits.*'; none means all."""
    quick: bool = False
    """Fewer samples and wider intervals: minutes instead of hours."""
    out: OutFolder | None = None
    """Folder for CLAIM.json, one per claim: results or results/quick; with your own model, none by default."""
    model: str | None = None
    """A model folder to measure instead of the shipped one."""
    workers: Count | None = None
    """Number of claims measured in parallel, each in a process of one thread; none: one per core, at most four."""
    plants: str | None = None
    """For nemo.held_out: a list of memorized pictures, JSON next to its LoRA (format: evidence/nemo/plant_files.py)."""
    state: OutFolder | None = None
    """For nemo.held_out: a folder for what is measured so far; the same command goes on after it was ended."""
    photographs: str | None = None
    """For claims about photographs: their folder; by default that of Debian's tuxpaint-stamps-default."""
    avataaars: str | None = None
    """For claims on faces of npm's @dicebear/avataaars: the model folder of the recipe `avataaars`."""

    def run(self) -> int:
        """0 if every claim holds, else 1."""
        from ..evidence.reproduce import reproduce

        names = ("plants", "state", "photographs", "avataaars")
        files = {name: value and str(value) for name in names for value in [getattr(self, name)]}
        return reproduce(list(self.claims), self.out, self.model, self.quick, self.workers, files)


class AddressTable(NamedTuple):
    """The site names of one network.

    Attributes:
        default: the site that `auto` selects.
        rows: (site name, kind, module path) in execution order.
    """

    default: str
    rows: list[tuple[str, str, str]]


def shipped_addresses(model: str) -> AddressTable | None:
    """The table of a shipped model by its name in commands; None for other models."""
    entry = json.loads(TABLES.read_text(encoding="utf-8")).get(model)
    return None if entry is None else AddressTable(entry["default"], [(a, k, p) for a, k, p in entry["rows"]])


@dataclass(frozen=True)
class Addresses:
    """List the site names of a diffusers model, with kind and module path."""

    model: Positional[Annotated[str, arg(metavar="[MODEL]")]] = "portraits"
    """A pipeline folder or hub id; 'portraits' is the shipped model."""
    pattern: Positional[Annotated[str, arg(metavar="[PATTERN]")]] = "*"
    """Site name or glob."""
    load: Load = LoadConfig()

    @property
    def slow(self) -> bool:
        """Whether a model is loaded: the sites of shipped models are in a file."""
        return self._table() is None

    def run(self) -> int:
        """0 on success."""
        for address, kind, path in self._rows():
            print(f"{address:<48} {kind:<8} {path}")
        return 0

    def _rows(self) -> list[tuple[str, str, str]]:
        """(site name, kind, module path) of each; those of shipped models are in a file, which needs no torch."""
        from ..engine.tracing.address_patterns import matching

        table = self._table()
        if table is not None:
            wanted = set(matching([row[0] for row in table.rows], table.default, self.pattern))
            return [row for row in table.rows if row[0] in wanted]
        from ..engine.pipelines.loading import load_backbone
        from ..engine.tracing.addresses import resolve

        sites = resolve(load_backbone(self.model, self.load), self.pattern)
        return [(site.address, site.kind, site.path) for site in sites]

    def _table(self) -> AddressTable | None:
        return shipped_addresses(self.model) if self.load == LoadConfig() else None


@dataclass(frozen=True)
class Verify:
    """Measure published figures on your own checkpoint, from local files only; nothing is downloaded.

    It first prints the required files, time and memory; the same command resumes.
    Writes plan.json, verify.json and verify.html: published, measured with intervals, and what differs.
    """

    model: str
    """Pipeline folder or .safetensors file on this machine; 'portraits' and 'flow' are the shipped models instead, with
    their own data."""
    claim: tuple[str, ...] = ()
    """Names or globs, e.g. nemo.detection or 'nemo.*'; none: all that the model and the data allow."""
    data: Path | None = None
    """Folder with the authors' files; the plan (--dry) lists them."""
    sscd: Path | None = None
    """SSCD's TorchScript file. It is code, which this option runs; without it copies are judged by pixels."""
    clip: Path | None = None
    """Folder of a CLIPModel with its processor (transformers): prompt alignment."""
    face: Path | None = None
    """A face recogniser's TorchScript file (made with torch.jit.trace). It is executable code, which this option
    runs; without it identities are not compared."""
    subset: Count | None = None
    """Most prompts or pairs of each kind, always the same ones."""
    memory: str = "4GB"
    """Memory in addition to the weights."""
    out: OutFolder = Path("verify")
    """Folder for the results."""
    dry: bool = False
    """Stop after the plan."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 if the named claims were measured, or any without names; 1 if data is missing."""
        environ["HF_HUB_OFFLINE"] = "1"  # before any library reads it
        from ..evidence.verify.context import Asked
        from ..evidence.verify.run import verify

        asked = Asked(
            self.model, self.data, self.sscd, self.clip, self.subset, self.memory, self.out, self.load, face=self.face
        )
        return verify(asked, self.claim, self.dry)
