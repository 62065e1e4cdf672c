"""Claims about resolution transfer on the portraits sibling: ``vitrine reproduce resolution.*``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...engine.portraits.shipped import TRANSFORMERS
from ...engine.progress import Progress, silent
from ..registry import ClaimResult, claim
from .world import PAPER, TARGET, Judge, Sibling, TransferConfig, mean_curve, read_curves, steps_to_reach

CURVES = TRANSFORMERS / "transfer.json"
"""What ``vitrine resolution transfer`` measured of the shipped models."""
SHIPPED = f"power-cosine-{TARGET}"
BEST, STRETCHED, PLAIN = "grid-rescaled", "extrapolated-rescaled", "grid-plain"


@claim(
    "resolution.transfer", paper=PAPER, figure="Fig. 8: positions resampled and schedule rescaled, 64 to 128 px",
    target="both together end lowest; they reach the FID at which the worst arm ends in at most half of its steps",
)  # fmt: skip
def transfer(model: str | None = None, progress: Progress = silent) -> ClaimResult:
    """Curves of FID by fine-tuning step, three arms, all seeds; ``model`` may be the folder of another run.

    The shipped 128-pixel model, if there is one, is drawn from and measured again.
    """
    own = model is not None and (Path(model) / "curves.json").is_file()
    result = judged(read_curves(Path(str(model)) if own else CURVES if CURVES.is_file() else TRANSFORMERS))
    if not own and (TRANSFORMERS / SHIPPED).is_dir():
        found = Judge(TransferConfig())(Sibling.open(SHIPPED))
        result.details[f"{SHIPPED}, measured again"] = {"FID": found}
    progress(1, 1, None)
    return result


def judged(curves: dict[str, dict[int, dict[int, float]]]) -> ClaimResult:
    """The claim from curves; the value is the share of steps that resampling and rescaling together need.

    Raises:
        VitrineError: arms missing.
    """
    from ...engine.errors import refuse

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
