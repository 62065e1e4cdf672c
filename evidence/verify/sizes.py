"""Size conditioning weighted over the noise level, without training: is the picture the same at every size?

The paper (Berrada et al., Table 2a) trains one model for each weight. A published SDXL has seen sizes with a constant
weight alone; what is measured is the training-free blend on it, and the published figures are listed next to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import interpolate

from ...engine.control import GammaConfig, GuidanceConfig, SizeCondition
from ...engine.io.table_on_disk import RowFile
from ..intervals import mean_interval, ratio_interval
from ..metrics import fine_detail
from ..metrics.cross_size import cross_size_consistency, rms_distance
from .context import SETTINGS, Context
from .judge import lpips_distance
from .protocol import check
from .records import Estimate, Figure, Measured, Need, Published

PAPER = "On improved Conditioning Mechanisms (Berrada et al., NeurIPS 2024)"
PROMPTS = Need(
    "size_prompts.csv", "prompts; the paper took captions of COCO's validation set", "cocodataset.org",
    "annotations CC BY 4.0", ("captions.csv", "ordinary_prompts.csv", "unmemorized_laion_prompts.csv"),
)  # fmt: skip
LPIPS = Need(
    "lpips.torchscript.pt", "LPIPS, which the published distances are", "github.com/richzhang/PerceptualSimilarity, "
    "traced by you", "BSD 2-Clause", optional=True, option="lpips",
)  # fmt: skip
_BASE, _DATA = "a DiT trained anew under this weight on ImageNet at 256 px", "sizes 64 to 1024, equal noise and class"
_NOTE = (
    "The paper trains a model for each weight and has no training-free experiment; none is published. A weight of 0 "
    "would make all pictures equal and lose the condition. So the report also says how much of the finest detail still "
    "follows the size."
)
ARMS = {"constant": "constant weight, the model as it is", "weighted": "weight falling with the noise"}
PUBLISHED = tuple(
    Published(f"sizes.lpips.{arm}", f"LPIPS across sizes, {words}", value, None, _BASE, _DATA,
              "Berrada et al., Table 2a", _NOTE)
    for (arm, words), value in zip(ARMS.items(), (0.33, 0.04), strict=True)
)  # fmt: skip
Distance = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
COARSE = 16
"""Side in pixels at which pictures of every size condition are as sharp as the smallest's: what differs is content."""


def fits(context: Context) -> str:
    """Why this model takes no size conditions; empty where it can."""
    if context.asked.world:
        return ""
    if context.kind == "SDXL":
        pipe, unet = context.pipe, context.network
        sizes = unet.add_embedding.linear_1.in_features - pipe.text_encoder_2.config.projection_dim
        numbers = sizes // unet.config.addition_time_embed_dim
        return "" if numbers == 6 else f"it takes {numbers} numbers, not SDXL's six: the base model is meant"
    conditions = getattr(context.network.config, "use_additional_conditions", False)
    return "" if conditions else "this PixArt was trained without size conditions"


def prepare(context: Context) -> Estimate:
    """Pictures of each prompt at each size under two weights, and two more of other noise."""
    settings = context.settings.sizes
    prompts = len(_prompts(context)[0]) if context.path(PROMPTS) else len(context.chosen(settings.prompts))
    pictures = prompts * len(ARMS) * (len(settings.sides) + 1)
    why = f"{prompts} prompts, {len(settings.sides)} sizes and another noise, {len(ARMS)} weights"
    return context.pace.sampling(0, pictures, settings.steps, context.budget, why)


@check(
    "control.sizes", paper=PAPER, families=("SDXL", "PixArt"), needs=(PROMPTS, LPIPS, SETTINGS), published=PUBLISHED,
    prepare=prepare, fits=fits,
)  # fmt: skip
def sizes(context: Context) -> Measured:
    """Distances across sizes under both weights, by pixels, coarse pixels, and LPIPS where the user has it."""
    measures = _measures(context)
    prompts, whole = _prompts(context)
    weights = {"constant": GammaConfig("constant"), "weighted": context.settings.sizes.gamma}
    settings, own, tables = context.settings.sizes, context.own_side, {}
    sides = list(settings.sides)
    asked = sides if own in sides else [*sides, own]
    for arm, gamma in weights.items():
        # for each prompt: distances across sizes, distances between two noises, detail under the smallest and own size
        facts = [arm, gamma.to_dict(), settings.to_dict(), list(measures), context.data_sums_of("lpips"), prompts]
        bar, width = context.bar(f"sizes, {arm}"), 2 * len(measures) + 2
        with RowFile(context.state(f"sizes-{arm}", facts), (len(prompts), width)) as stored:
            for i, prompt in enumerate(prompts):
                if not stored.done[i]:
                    seeds = [i] * len(asked) + [i + 500_000]
                    pictures = drawn(context, prompt, [*asked, own], seeds, gamma)
                    by_size = {(s, s): picture[None] for s, picture in zip(asked, pictures, strict=False)}
                    every, distances = [(s, s) for s in sides], [distance for _, distance in measures.values()]
                    across = [float(cross_size_consistency(by_size.__getitem__, every, d).mean) for d in distances]
                    noise = [float(d(by_size[own, own], pictures[-1:])) for d in distances]
                    detail = [float(fine_detail(by_size[s, s])) for s in (sides[0], own)]
                    stored.write(i, torch.tensor([[*across, *noise, *detail]]))
                bar(i + 1, len(prompts), None)
            tables[arm] = stored.rows(range(len(prompts)))
    figures: dict[str, Figure] = {}
    for number, (key, (what, _)) in enumerate(measures.items()):
        columns = {arm: table[:, number] for arm, table in tables.items()}
        for arm, values in columns.items():
            figures[f"sizes.{key}.{arm}"] = _figure(f"{what} across sizes, {ARMS[arm]}", values)
        both = (columns["weighted"], columns["constant"])
        figures[f"sizes.{key}.share"] = _ratio(f"{what}, the second over the first", *both)
        apart = tables["constant"][:, len(measures) + number]
        figures[f"sizes.{key}.noise"] = _figure(f"{what} of two noises at the model's own size, for comparison", apart)
    for arm, measured in tables.items():
        finest, whole_detail = measured[:, -2], measured[:, -1]
        what = f"finest detail at size {settings.sides[0]}, over that at the model's own size, {ARMS[arm]}"
        figures[f"sizes.detail.{arm}"] = _ratio(what, finest, whole_detail)
    missing = {p.key: f"needs {LPIPS.short}" for p in PUBLISHED if p.key not in figures}
    return Measured(figures, tuple(_notes(context, len(prompts), whole)), missing)


def _notes(context: Context, count: int, whole: int) -> list[str]:
    gamma = context.settings.sizes.gamma
    return [
        *context.subset_note(count, whole, "prompts"),
        f"training-free: the published weights as they are, their size embedding blended by {gamma.form}, exponent "
        f"{gamma.alpha:g}; the paper prints no exponent",
        "one noise for each prompt, the paper took ten",
        *context.usual_notes("sizes", autocast=False),
    ]


def _prompts(context: Context) -> tuple[list[str], int]:
    """The subset of the prompts, and how many there are."""
    prompts = context.prompts(PROMPTS)[0]
    return [prompts[i] for i in context.chosen(len(prompts))][: context.settings.sizes.prompts], len(prompts)


def _measures(context: Context) -> dict[str, tuple[str, Distance]]:
    """Key -> name and distance of two batches (B, 3, H, W) in [0, 1]."""
    measures: dict[str, tuple[str, Distance]] = {}
    if (path := context.path(LPIPS)) is not None:
        measures["lpips"] = ("LPIPS", lpips_distance(path))
    if context.asked.world:
        from ..control.claims import content_distance
        from ..control.prompts import reader

        measures["readout"] = ("distance of the classifier's features", content_distance(reader()))
    measures["pixels"] = ("pixel RMS", rms_distance)
    return measures | {"coarse": (f"pixel RMS at {COARSE} px", coarse_distance)}


def coarse_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of pictures area-averaged to 16 px."""
    return rms_distance(*(interpolate(v, (COARSE, COARSE), mode="area") for v in (a, b)))


def drawn(
    context: Context, prompt: str, sides: Sequence[int], seeds: Sequence[int], gamma: GammaConfig
) -> torch.Tensor:
    """(B, 3, H, W) in [0, 1]: one prompt under size conditions and seeds, as many together as the budget allows."""
    settings, images = context.settings.sizes, []
    together = context.pace.pictures_within(context.budget, len(sides))
    # both halves have the same size condition, as diffusers does, so that a constant weight is the stock model
    guidance = GuidanceConfig(settings.guidance, negative="positive")
    for start in range(0, len(sides), together):
        part = slice(start, start + together)
        sizes = [SizeCondition(original=(s, s)) for s in sides[part]]
        call: dict[str, Any] = {"num_inference_steps": settings.steps, "output_type": "pt"}
        made = context.controlled(
            [prompt] * len(sizes), size_condition=sizes, gamma=gamma, guidance=guidance, seeds=list(seeds[part]), **call
        )
        images.append(made.images.float().cpu().clamp(0, 1))
    return torch.cat(images)


def _figure(what: str, values: torch.Tensor) -> Figure:
    return Figure(what, round(float(values.mean()), 4), mean_interval(values), len(values))


def _ratio(what: str, parts: torch.Tensor, wholes: torch.Tensor) -> Figure:
    value = float(parts.sum() / wholes.sum().clamp_min(1e-12))
    return Figure(what, round(value, 4), ratio_interval(parts, wholes.clamp_min(1e-12)), len(parts))
