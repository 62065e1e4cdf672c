"""How figures are measured: the papers' settings, and what a file next to the data says instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...engine.errors import refuse
from ...engine.io.files import named, parse_table
from ...engine.settings.config import Config
from ...engine.settings.nemo_options import PAPER_TAU, ProbeConfig, SearchConfig
from ...engine.w2w import InvertConfig

FILE = "settings.json"


@dataclass(frozen=True)
class InversionSettings(Config):
    """How models are made from single photos and judged (weights2weights, section 3.4 and Appendix C).

    Attributes:
        invert: the published notebook's: 10,000 components, 400 steps, the picture encoded anew at each.
        prompt: of inversion and samples.
        pictures: samples of each model, seeds 0, 1, ...
        photos: at most; as many as the paper took.
        steps, guidance: of the samples.
    """

    invert: InvertConfig = InvertConfig(10_000, 400, 0.1, weight_decay=1e-10, posterior="sample")
    prompt: str = "sks person"
    pictures: int = 4
    photos: int = 100
    steps: int = 50
    guidance: float = 2.5

    def __post_init__(self) -> None:
        if self.pictures < 1 or self.photos < 2 or self.steps < 1:
            shown = (self.pictures, self.photos, self.steps)
            raise refuse("inversion: pictures, photos, steps", shown, "1, 2 and 1 or more", "4, 100 and 50 are usual")


@dataclass(frozen=True)
class VerifySettings(Config):
    """Settings of all checks; the defaults are the papers', for SD1.4 and SD1.5.

    Attributes:
        detect: how prompts are scored.
        probe: how neurons are searched.
        search: for neurons; without a tau it is calibrated on a fifth of the ordinary captions.
        seeds, first_seed: samples of each prompt, and the seed of the first.
        usual: samples of ordinary captions, which say how far apart pictures usually are; where pixels judge.
        steps, guidance: of sampling.
        size: side of the pictures in pixels; 0 takes the model's own.
        call: further arguments of the pipeline's call.
        scheduler: of the samples of a UNet; "" keeps the pipeline's own.
        places, timestep, discard: for SPair-71k instead of the published selection; "" and 0 take that.
        split: of SPair-71k: test, or trn or val, on which layers are chosen.
        inversion: of photos into a space of models.
    """

    detect: ProbeConfig = ProbeConfig(range_of_batch=True)
    probe: ProbeConfig = ProbeConfig(range_of_batch=True)
    search: SearchConfig = SearchConfig(tau=PAPER_TAU, mode="parity", protocol="nemo")
    seeds: int = 10
    first_seed: int = 2
    usual: int = 16
    steps: int = 50
    guidance: float = 7.0
    size: int = 0
    call: Mapping[str, Any] = field(default_factory=dict)
    scheduler: str = "DDIMScheduler"
    places: str = ""
    timestep: float = 0.0
    discard: tuple[int, ...] = ()
    split: str = "test"
    inversion: InversionSettings = InversionSettings()

    def __post_init__(self) -> None:
        if self.seeds < 2 or self.usual < 2 or self.steps < 1:
            shown = (self.seeds, self.usual, self.steps)
            raise refuse("seeds, usual, steps", shown, "2, 2 and 1 or more", "10, 16 and 50 are the usual ones")

    def changed(self, *relevant: str) -> list[str]:
        """What is not as published, one sentence each, of the ``relevant`` settings or of all."""
        mine, theirs = _leaves(self.to_dict()), _leaves(VerifySettings().to_dict())
        names = sorted(name for name in mine | theirs if mine.get(name) != theirs.get(name))
        names = [name for name in names if not relevant or name.split(".")[0] in relevant]
        return [f"{FILE}: {name} is {mine.get(name)!r}, by default {theirs.get(name)!r}" for name in names]


def _leaves(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """A nested table with its names joined by dots."""
    leaves: dict[str, Any] = {}
    for name, value in table.items():
        leaves |= _leaves(value, f"{before}{name}.") if isinstance(value, Mapping) else {before + name: value}
    return leaves


def read_settings(path: Path | None) -> VerifySettings:
    """Settings from a JSON file; the papers' where there is none, and for all that it leaves out."""
    if path is None:
        return VerifySettings()
    with named(path, "settings", "a JSON object with settings of vitrine verify", "correct or remove it"):
        table = parse_table(path.read_text(encoding="utf-8"))
        return VerifySettings.from_dict(_over(VerifySettings().to_dict(), table))


def _over(defaults: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """A table with what it leaves out, also in the tables inside it, from the defaults."""
    merged = dict(defaults)
    for name, value in table.items():
        inner = defaults.get(name)
        merged[name] = _over(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged
