"""A plan in one sentence, for users without technical background."""

from __future__ import annotations

from .rope import DYNAMIC


def sentence(
    ratio: float, schedule: str, positions: str, guidance: tuple[float, float] | None, spread: bool = False
) -> str:  # fmt: skip
    """What was changed, why, and what is unchanged.

    Args:
        ratio: r.
        schedule, positions: of the plan.
        guidance: before and after, if Eq. 4 changed it.
        spread: whether a UNet's inner convolutions are dilated.
    """
    changed = [*_schedule(ratio, schedule), *_positions(positions)]
    if spread:
        changed.append("the network sees as much of the picture as in training, so that it draws objects only once")
    if guidance and guidance[0] != guidance[1]:
        turn = "raised" if guidance[1] > guidance[0] else "lowered"
        changed.append(f"guidance is {turn} from {guidance[0]:g} to {guidance[1]:.4g}")
    kept = ["the weights", "your prompt"]
    kept += ["the noise schedule"] * (schedule == "none") + ["the positions"] * (positions == "keep")
    left = f"unchanged: {', '.join(kept)}"
    if not changed:
        why = "this is the trained area" if ratio == 1 else "no change was requested"
        return f"in short: {why}, so nothing is changed"
    area = "of the trained area" if ratio == 1 else f"with {ratio**2:.3g} times the trained area"
    return f"in short: for a picture {area}, {'; '.join(changed)}; {left}"


def _schedule(ratio: float, schedule: str) -> list[str]:
    if schedule == "none":
        return []
    more, why = ("more", "large shapes show through") if ratio > 1 else ("less", "small pictures drown in it sooner")
    if schedule == "relabel":
        return [f"each timestep means {more} noise, as these weights were trained, for {why}"]
    return [f"sampling spends its steps at {more} noise, for {why}"]


def _positions(positions: str) -> list[str]:
    mode = positions.removesuffix(DYNAMIC)
    text = {
        "grid": "token positions are fitted into the range that the model was trained on",
        "rope_pi": "token positions are fitted into the range that the model was trained on",
        "bicubic": "the position table is resized like a picture",
        "extrapolate": "token positions continue at the trained step, beyond the trained range",
        "rope_ntk": "low position frequencies are fitted into the trained range and high ones hardly change",
        "rope_yarn": "low position frequencies are fitted into the trained range and high ones stay",
    }.get(mode)
    if text is None:
        return []
    return [text + (", which fades as the noise falls, since layout settles first" if mode != positions else "")]
