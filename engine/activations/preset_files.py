"""Feature presets as files: places chosen for one model, with what they scored, for others to load."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import printable, refuse
from ..io.files import named, parse_table, write_json
from ..tracing.addresses import sites_of
from ..tracing.fingerprint import fingerprint_of, same_weights, short
from .presets import Preset

FORMAT, VERSION = "vitrine-feature-preset", 1


@dataclass(frozen=True)
class FeaturePreset:
    """A :class:`Preset` and the model it was chosen on.

    Attributes:
        preset: addresses, timestep, seeds, scores.
        fingerprint: of the model; an empty one is not checked.
        info: how it was chosen: rule, budget, what was dropped and why.
    """

    preset: Preset
    fingerprint: str = ""
    info: dict[str, Any] = field(default_factory=dict)

    def check(self, backbone: nn.Module, fingerprint: str = "") -> None:
        """Refuse a model on which the places were not chosen.

        Args:
            fingerprint: of the model; needed while its modules carry patches.

        Raises:
            VitrineError: If the fingerprint differs, or the model lacks one of the addresses.
        """
        sites = sites_of(backbone)
        missing = [a for a in self.preset.addresses if a not in sites]
        actual = fingerprint or fingerprint_of(backbone)
        if missing or (self.fingerprint and not same_weights(self.fingerprint, actual)):
            shown = f"{self.preset.name!r} for model {short(self.fingerprint) or self.preset.model}"
            shown += f", whose places {missing[:3]} are not here" if missing else ""
            raise refuse(
                "feature preset", shown, f"one of this model, {short(actual)}", "rank the layers of this model"
            )

    def save(self, path: str | Path) -> Path:
        """Write JSON, whole or not at all."""
        table = {"format": FORMAT, "version": VERSION, "fingerprint": self.fingerprint, "info": self.info}
        return write_json(path, table | {"preset": self.preset.to_dict()})

    @classmethod
    def load(cls, path: str | Path) -> FeaturePreset:
        """Read such a file.

        Raises:
            VitrineError: If the file is missing, no JSON, of another kind, or has settings that no preset has.
        """
        accepted = f"a JSON file of {FORMAT} version {VERSION}"
        with named(path, "feature preset", accepted, "save it again, or download it again"):
            table = parse_table(Path(path).read_text(encoding="utf-8"))
            if table["format"] != FORMAT or table["version"] != VERSION:
                raise ValueError(f"format {table['format']!r} version {table['version']!r}")
            settings = {name: value for name, value in table["preset"].items() if name in Preset.__dataclass_fields__}
            if not isinstance(settings["addresses"], list) or not isinstance(settings["name"], str):
                raise ValueError("a preset has a name and a list of addresses")
            settings |= {"addresses": [*map(str, settings["addresses"])], "seeds": [*map(int, settings["seeds"])]}
            preset = Preset.from_dict(settings)
            _check(preset)
            preset.config()  # refuses values that no tap would take
            return cls(preset, str(table["fingerprint"]), dict(table["info"]))


_MOST_SEEDS, _MOST_PLACES, _LARGEST = 1000, 10_000, 1 << 20


def _check(preset: Preset) -> None:
    """Refuse numbers that no search chose: each seed is a forward, each address is looked up."""
    texts = (preset.name, preset.model, preset.source, preset.note, *preset.addresses)
    if not all(isinstance(text, str) and len(text) <= 10_000 and printable(text) == text for text in texts):
        raise ValueError("names with characters that are no text")
    if not 0 < len(preset.addresses) <= _MOST_PLACES or not 0 < len(preset.seeds) <= _MOST_SEEDS:
        raise ValueError(f"{len(preset.addresses)} addresses, {len(preset.seeds)} seeds")
    if not all(0 <= seed < 1 << 64 for seed in preset.seeds) or not 0 <= preset.timestep <= 10_000:
        raise ValueError(f"timestep {preset.timestep}, seeds from {min(preset.seeds)} to {max(preset.seeds)}")
    counts = (preset.size, preset.channels, *preset.discard)
    if not all(0 <= count <= _LARGEST for count in counts):
        raise ValueError(f"size {preset.size}, {preset.channels} channels, discard {preset.discard[:5]}")
