"""Feature preset files: sites chosen for one model, with their scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import printable, refuse
from ..io.files import named, parse_table, save_table
from ..io.number_checks import integer
from ..tracing.addresses import sites_of
from ..tracing.fingerprint import fingerprint_of, same_weights, short
from .presets import Preset

FORMAT, VERSION = "vitrine-feature-preset", 1


@dataclass(frozen=True)
class FeaturePreset:
    """A :class:`Preset` and the model it was chosen on.

    Attributes:
        preset: site names, timestep, seeds, scores.
        fingerprint: of the model; empty: not checked.
        info: how it was chosen: rule, budget, what was dropped and why.
    """

    preset: Preset
    fingerprint: str = ""
    info: dict[str, Any] = field(default_factory=dict)

    def check(self, backbone: nn.Module, fingerprint: str = "") -> None:
        """Refuses another model than the one for which the sites were chosen.

        Args:
            fingerprint: of the model; needed while its modules are patched.
        """
        sites = sites_of(backbone)
        missing = [a for a in self.preset.addresses if a not in sites]
        actual = fingerprint or fingerprint_of(backbone)
        if missing or (self.fingerprint and not same_weights(self.fingerprint, actual)):
            shown = f"{self.preset.name!r} for model {short(self.fingerprint) or self.preset.model}"
            shown += f", whose layers {missing[:3]} are not here" if missing else ""
            raise refuse(
                "feature preset", shown, f"one of this model, {short(actual)}", "rank the layers of this model"
            )

    def save(self, path: str | Path) -> Path:
        """Writes JSON atomically."""
        table = {"format": FORMAT, "version": VERSION, "fingerprint": self.fingerprint, "info": self.info}
        return save_table(path, table | {"preset": self.preset.to_dict()}, self._of_table)

    @classmethod
    def load(cls, path: str | Path) -> FeaturePreset:
        """Reads a preset file."""
        accepted = f"a JSON file of {FORMAT} version {VERSION}"
        with named(path, "feature preset", accepted, "save it again, or download it again"):
            return cls._of_table(parse_table(Path(path).read_text(encoding="utf-8")))

    @classmethod
    def _of_table(cls, table: dict[str, Any]) -> FeaturePreset:
        if table["format"] != FORMAT or table["version"] != VERSION:
            raise ValueError(f"format {table['format']!r} version {table['version']!r}")
        settings = {name: value for name, value in table["preset"].items() if name in Preset.__dataclass_fields__}
        if not isinstance(settings["addresses"], list) or not isinstance(settings["name"], str):
            raise ValueError("a preset has a name and a list of addresses")
        seeds = [integer(seed, "seed", 0, (1 << 64) - 1) for seed in settings["seeds"]]
        settings |= {"addresses": [*map(str, settings["addresses"])], "seeds": seeds}
        preset = Preset.from_dict(settings)
        _check(preset)
        preset.config()  # refuses invalid values
        return cls(preset, str(table["fingerprint"]), dict(table["info"]))


_MOST_SEEDS, _MOST_SITES, _LARGEST = 1000, 10_000, 1 << 20


def _check(preset: Preset) -> None:
    """Raises for implausible sizes: each seed costs a forward, each site a look-up."""
    texts = (preset.name, preset.model, preset.source, preset.note, *preset.addresses)
    if not all(isinstance(text, str) and len(text) <= 10_000 and printable(text) == text for text in texts):
        raise ValueError("names with unprintable characters")
    if not 0 < len(preset.addresses) <= _MOST_SITES or not 0 < len(preset.seeds) <= _MOST_SEEDS:
        raise ValueError(f"{len(preset.addresses)} addresses, {len(preset.seeds)} seeds")
    if not 0 <= preset.timestep <= 10_000:
        raise ValueError(f"timestep {preset.timestep}")
    for count in (preset.size, preset.channels, *preset.discard):
        integer(count, "size, channels and discarded channels", 0, _LARGEST)
