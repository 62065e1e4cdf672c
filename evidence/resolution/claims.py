"""Claims about resolution transfer on the portraits transformer: ``vitrine reproduce resolution.*``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...engine.errors import refuse
from ...engine.portraits.shipped import TRANSFORMERS
from ...engine.progress import Progress, silent
from ..control.controlled_transformer import ControlledTransformer
from ..registry import ClaimResult, claim
from .curves import Curves, mean_curve, read_curves, steps_to_reach
from .world import PAPER, TARGET, Judge, TransferConfig

CURVES = TRANSFORMERS / "transfer.json"
"""What ``vitrine resolution transfer`` measured of the shipped models."""
SHIPPED = f"power-cosine-{TARGET}"
QUICK_SAMPLES = 60
BEST, STRETCHED, PLAIN = "grid-rescaled", "extrapolated-rescaled", "grid-plain"


@claim(
    "resolution.transfer", paper=PAPER, figure="Fig. 8: positions resampled and schedule rescaled, 64 to 128 px",
    target="both together end lowest; they reach the FID at which the worst arm ends in at most half of its steps",
    minutes=1, quick_minutes=0.3,
)  # fmt: skip
def transfer(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Curves of FID by fine-tuning step, three arms, all seeds; ``model`` may be the folder of another run.

    The shipped 128-pixel model, if there is one, is drawn from and measured again; ``quick`` draws fewer pictures,
    whose distance is larger for that alone.
    """
    other_run = model is not None and (Path(model) / "curves.json").is_file()
    result = judged(read_curves(Path(str(model)) if other_run else CURVES if CURVES.is_file() else TRANSFORMERS))
    if not other_run and (TRANSFORMERS / SHIPPED).is_dir():
        config = TransferConfig(samples=QUICK_SAMPLES) if quick else TransferConfig()
        title = f"{SHIPPED}, measured again" + (f" on {config.samples} captions" if quick else "")
        result.details[title] = {"FID": Judge(config)(ControlledTransformer.open(SHIPPED))}
    progress(1, 1, None)
    return result


def judged(curves: Curves) -> ClaimResult:
    """The claim from curves; the value is the share of steps that resampling and rescaling together need.

    Raises:
        VitrineError: If an arm is missing.
    """
    if not {BEST, STRETCHED, PLAIN} <= set(curves):
        raise refuse("curves", sorted(curves), [BEST, STRETCHED, PLAIN], "run the missing arms")
    means = {arm: mean_curve(seeds) for arm, seeds in curves.items()}
    last = min(max(c) for c in means.values())
    ends = {arm: c[last] for arm, c in means.items()}
    level = max(ends.values())
    reached = {arm: steps_to_reach(c, level) for arm, c in means.items()}
    details: dict[str, Any] = {
        arm: {f"FID at {s}": round(v, 2) for s, v in means[arm].items()}
        | {f"steps to {level:.2f}": None if reached[arm] is None else round(float(reached[arm] or 0.0), 1)}
        | {"ends by seed": [c[last] for c in seeds.values()]}
        for arm, seeds in curves.items()
    }
    share = (last if reached[BEST] is None else float(reached[BEST] or 0.0)) / last
    holds = min(ends, key=lambda arm: ends[arm]) == BEST and share <= 0.5
    return ClaimResult(round(share, 3), None, holds, details)
