"""`vitrine demo | reproduce | addresses | card`. Heavy imports are in `run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from ..engine.pipelines.loading import LoadConfig
from ..engine.settings.setting_checks import Count, OutFile, OutFolder, Writes
from .options import Load


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
    photographs: str | None = None
    """For claims about photographs: their folder; by default that of Debian's tuxpaint-stamps-default."""
    face_model: str | None = None
    """For claims with an independent face recognition model: the folder model of npm's @vladmandic/face-api."""
    avataaars: str | None = None
    """For claims on faces of npm's @dicebear/avataaars: the model folder that `vitrine train avataaars` made."""
    inception: str | None = None
    """For claims with independent image features: the folder dist/models/inception_v3 of npm's nsfwjs."""

    def run(self) -> int:
        """0 if every claim holds, else 1."""
        from ..evidence.reproduce import reproduce

        names = ("plants", "photographs", "face_model", "inception", "avataaars")
        files = {name: getattr(self, name) for name in names}
        return reproduce(list(self.claims), self.out, self.model, self.quick, self.workers, files)


@dataclass(frozen=True)
class Addresses:
    """List the site names of a diffusers model, with kind and module path."""

    model: Positional[Annotated[str, arg(metavar="[MODEL]")]] = "portraits"
    """A pipeline folder or hub id; 'portraits' is the shipped model."""
    pattern: Positional[Annotated[str, arg(metavar="[PATTERN]")]] = "*"
    """Site name or glob."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 on success."""
        for address, kind, path in self._rows():
            print(f"{address:<48} {kind:<8} {path}")
        return 0

    def _rows(self) -> list[tuple[str, str, str]]:
        """(site name, kind, module path) of each; those of shipped models are in a file, which needs no torch."""
        from ..engine.tracing.address_patterns import matching
        from .address_tables import shipped_addresses

        table = shipped_addresses(self.model) if self.load == LoadConfig() else None
        if table is not None:
            wanted = set(matching([row[0] for row in table.rows], table.default, self.pattern))
            return [row for row in table.rows if row[0] in wanted]
        from ..engine.pipelines.loading import load_backbone
        from ..engine.tracing.addresses import resolve

        sites = resolve(load_backbone(self.model, self.load), self.pattern)
        return [(site.address, site.kind, site.path) for site in sites]


@dataclass(frozen=True)
class Card:
    """Measure a portraits model and write its model card (README.md) next to the weights."""

    folder: Positional[Annotated[Path, Writes("folder"), arg(metavar="FOLDER")]]
    """Model folder to write the card into; measuring takes minutes."""
    device: str = "cpu"
    """Where to sample."""

    def run(self) -> int:
        """0 on success."""
        from ..engine.runtime.progress import TqdmProgress
        from ..evidence.portraits.card import write_card

        print(f"card: {write_card(self.folder, TqdmProgress('measuring'), device=self.device)}")
        return 0
