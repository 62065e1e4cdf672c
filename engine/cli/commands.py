"""``vitrine demo | reproduce | addresses | card``. Heavy imports wait for ``run``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from ..pipelines.loading import LoadConfig
from .options import Load


@dataclass(frozen=True)
class Demo:
    """Render, sample and tap the portraits model, and write a self-contained report."""

    out: Path = Path("report.html")
    """The HTML file to write."""

    def run(self) -> int:
        """0 on success."""
        from ...evidence.demo import write_report

        print(f"report: {write_report(self.out)}")
        return 0


@dataclass(frozen=True)
class Reproduce:
    """Measure the named claims and print a table; the exit status is 1 if one does not hold."""

    claims: Positional[tuple[str, ...]] = ()
    """Names or globs, e.g. portraits.quality or 'portraits.*'; none means all."""
    quick: bool = False
    """Fewer samples and wider intervals: minutes instead of hours."""
    json: Path | None = None
    """Also write the results to this file."""
    model: str | None = None
    """A model folder to measure instead of the shipped one."""
    workers: int = 1
    """So many claims side by side, each in a process of one thread: 2 on two cores."""

    def run(self) -> int:
        """0 if every claim holds, else 1."""
        from ...evidence.reproduce import reproduce

        return reproduce(list(self.claims), self.json, self.model, self.quick, self.workers)


@dataclass(frozen=True)
class Addresses:
    """List the addresses of a diffusers model, with kind and module path."""

    model: Positional[str] = "portraits"
    """A pipeline folder or hub id; 'portraits' is the shipped model."""
    pattern: Positional[str] = "*"
    """Address or glob."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 on success."""
        from ..addresses import resolve
        from ..pipelines.loading import load_backbone

        for site in resolve(load_backbone(self.model, self.load), self.pattern):
            print(f"{site.address:<48} {site.kind:<8} {site.path}")
        return 0


@dataclass(frozen=True)
class Card:
    """Measure a portraits model and write its model card (README.md) beside the weights."""

    folder: Positional[Path | None] = None
    """Model folder; default the shipped one."""
    device: str = "cpu"
    """Where to sample."""

    def run(self) -> int:
        """0 on success."""
        from ...evidence.portraits.card import write_card
        from ..progress import TqdmProgress

        print(f"card: {write_card(self.folder, TqdmProgress('measuring'), device=self.device)}")
        return 0
