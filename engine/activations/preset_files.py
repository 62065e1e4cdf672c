"""Feature presets as files: places chosen for one model, with what they scored, for others to load."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import nn

from ..addresses import sites_of
from ..errors import refuse
from ..files import named, parse_table, write_json
from ..fingerprint import fingerprint_of
from .presets import Preset

FORMAT, VERSION = "vitrine-feature-preset", 1


@dataclass(frozen=True)
class FeaturePreset:
    """A :class:`Preset` and the model it was chosen on.

    Attributes:
        preset: addresses, timestep, seeds, scores.
        fingerprint: of the model; empty is not checked.
        info: how it was chosen: rule, budget, what was dropped and why.
    """

    preset: Preset
    fingerprint: str = ""
    info: dict[str, Any] = field(default_factory=dict)

    def check(self, backbone: nn.Module, fingerprint: str = "") -> None:
        """Refuse a model the places were not chosen on.

        Args:
            fingerprint: of the model, where its modules carry patches at the moment.

        Raises:
            VitrineError: another fingerprint, or an address this model does not have.
        """
        table = sites_of(backbone)
        missing = [a for a in self.preset.addresses if a not in table]
        own = fingerprint or fingerprint_of(backbone)
        if missing or (self.fingerprint and self.fingerprint != own):
            given = f"{self.preset.name!r} for model {self.fingerprint or self.preset.model}"
            given += f", whose places {missing[:3]} are not here" if missing else ""
            raise refuse("feature preset", given, f"one of this model, {own}", "rank the places of this model")

    def save(self, path: str | Path) -> Path:
        """Write JSON, whole or not at all."""
        table = {"format": FORMAT, "version": VERSION, "fingerprint": self.fingerprint, "info": self.info}
        return write_json(path, table | {"preset": asdict(self.preset)})

    @classmethod
    def load(cls, path: str | Path) -> FeaturePreset:
        """Read such a file.

        Raises:
            VitrineError: missing, no JSON, of another kind, or with settings that are not a preset's.
        """
        accepted = f"a JSON file of {FORMAT} version {VERSION}"
        with named(path, "feature preset", accepted, "save it again, or download it again"):
            table = parse_table(Path(path).read_text(encoding="utf-8"))
            if table["format"] != FORMAT or table["version"] != VERSION:
                raise ValueError(f"format {table['format']!r} version {table['version']!r}")
            told = {f.name: table["preset"][f.name] for f in fields(Preset) if f.name in table["preset"]}
            if not isinstance(told["addresses"], list) or not isinstance(told["name"], str):
                raise ValueError("a preset has a name and a list of addresses")
            told |= {"addresses": tuple(map(str, told["addresses"])), "seeds": tuple(map(int, told["seeds"]))}
            preset = Preset(**told)
            preset.config()  # refuses values that no tap would take
            return cls(preset, str(table["fingerprint"]), dict(table["info"]))
