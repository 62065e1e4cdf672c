"""The threshold that ``vitrine nemo calibrate`` measured, as a file that knows its model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import refuse
from ..io.files import named, parse_table
from ..tracing.fingerprint import same_weights
from .search_config import ProbeConfig
from .sites import SCOPES

NAME = "threshold.json"
PUBLISHED = {"tau": 0.428, "mean": 0.358, "std": 0.070, "captions": 50_000}
"""Of SD 1.4 at 512 px (NeMo, Sec. 3.1): mean and deviation of the scores of ordinary captions, and their sum."""


@dataclass(frozen=True)
class Calibrated:
    """A threshold with what it was measured at.

    Attributes:
        tau: the memorization threshold, 0..1.
        probe: the settings of its scores; detection must use the same.
        scope: of the statistics in the same folder.
        fingerprint: of the model's weights; empty in files that do not say.
    """

    tau: float
    probe: ProbeConfig
    scope: str = "down+mid"
    fingerprint: str = ""

    @classmethod
    def load(cls, folder: str | Path) -> Calibrated:
        """From the folder that calibrate wrote."""
        path = Path(folder) / NAME
        with named(path, "threshold file", "what vitrine nemo calibrate wrote", "calibrate first"):
            facts = parse_table(path.read_text(encoding="utf-8"))
            probe = ProbeConfig.from_dict(dict(facts["probe"]))
            tau, scope = float(facts["tau"]), str(facts["scope"])
            if not abs(tau) <= 10 or scope not in SCOPES:
                raise ValueError(f"tau {tau}, scope {scope}")
            return cls(tau, probe, scope, str(facts.get("fingerprint", "")))

    def check(self, fingerprint: str) -> Calibrated:
        """Itself, if it is of the model with this fingerprint."""
        if self.fingerprint and not same_weights(self.fingerprint, fingerprint):
            shown, wanted = self.fingerprint[:20], fingerprint[:20]
            accepted = f"one measured on this model, {wanted}..."
            raise refuse("threshold", f"measured on {shown}...", accepted, "vitrine nemo calibrate with this --model")
        return self
