"""Claims about control conditioning on the portraits transformer: ``vitrine reproduce control.*``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...engine.control import GuidanceConfig
from ...engine.errors import refuse
from ...engine.portraits.models import Portraits
from ...engine.runtime.progress import Progress, silent
from ..intervals import bootstrap
from ..metrics import frechet_distance
from ..metrics.cross_size import CrossSizeResult, cross_size_consistency, rms_distance
from ..portraits.avataaars import avataaars_folder, open_model
from ..portraits.classifier import classifier_of
from ..registry import ClaimResult, Table, arms, claim
from .controlled_transformer import GUIDANCE, ControlledTransformer
from .fid_sets import by_set, mean_arms
from .guided import draw_guided
from .prompts import FIRST_SCENE, Reader, prompts_of, reader, renders
from .sized_training import PAPER

SIZES = (16, 32, 64, 128, 256)
RARE_SIZES = (192, 256, 384, 512)
"""Fractions of the training images: 4 %, 4 %, none and none."""
NAMES, FLIPS = ("constant", "power-cosine"), "power-cosine-flips"


class _Counts(NamedTuple):
    """Numbers of seeds per size, samples per Frechet distance, captions with sides, and sets."""

    pairs: int
    samples: int
    captions: int
    sets: int = 1


FULL, QUICK = _Counts(8, 64, 160, 3), _Counts(8, 160, 64)


def content_distance(reader: Reader) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """1 - cosine of the attribute classifier's features: a content distance like LPIPS."""

    def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return 1 - torch.nn.functional.cosine_similarity(reader(a).features, reader(b).features)

    return distance


def coarse_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Pixel distance at the smallest sharpness: a content distance without the requested blur."""
    return rms_distance(*(torch.nn.functional.interpolate(v, (16, 16), mode="area") for v in (a, b)))


def at_every_size(
    model: ControlledTransformer, prompts: list[str], seeds: list[int]
) -> dict[tuple[int, int], torch.Tensor]:
    """(size, size) -> images of a transformer under that size condition."""
    return {(s, s): model.draw(prompts, seeds, {"height": float(s), "width": float(s)}) for s in SIZES}


def distances_of(
    drawn: dict[tuple[int, int], torch.Tensor], reader: Reader
) -> tuple[CrossSizeResult, CrossSizeResult, CrossSizeResult]:
    """Distances across sizes: of classifier features, of pixels, of pixels at 16 x 16."""
    measures = (content_distance(reader), rms_distance, coarse_distance)
    features, pixels, coarse = (cross_size_consistency(drawn.__getitem__, list(drawn), d) for d in measures)
    return features, pixels, coarse


# --- intervals ----------------------------------------------------------------------------------------------------
def _ratio_interval(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """95 % bootstrap interval of mean(a) / mean(b), of the same seeds."""
    return bootstrap(lambda x, y: x.mean() / y.mean(), a, b, paired=True)


def _fid_gap(a: torch.Tensor, b: torch.Tensor, real: torch.Tensor, factor: float = 1.0) -> float:
    """Low end of the 95 % bootstrap interval of FID(a) - ``factor`` FID(b), of the same seeds."""

    def gap(x: torch.Tensor, y: torch.Tensor) -> float:
        return frechet_distance(x, real) - factor * frechet_distance(y, real)

    return bootstrap(gap, a, b, paired=True, draws=60)[0]


def _share_slack(share: float, count: int) -> float:
    """Half the 95 % binomial interval of a fraction."""
    return 1.96 * (share * (1 - share) / count) ** 0.5


# --- claims -------------------------------------------------------------------------------------------------------
@claim(
    "control.cross_size",
    paper=PAPER,
    figure="Table 2a: the same picture at every size condition",
    target="distance across sizes <= 1/3 of constant weight's in all of three sets, FID not 2 % above in all",
    minutes=2.5,
    quick_minutes=0.7,
)
def cross_size(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Same seeds and prompts at sizes 16 to 256 under both weights; distances of classifier features and of pixels.

    The prompts do not mention what correlates with size in the data (``evidence.portraits.transformer.LINK``).
    Without control the size has no effect, so that arm (controls dropped) has only an FID. There is one training
    per model: sets differ in prompts and noise. ``quick`` samples one small set, and tests whether the target is in its
    interval.
    """
    return measure_sizes({name: ControlledTransformer.open(name) for name in NAMES}, reader(), progress, quick)


@claim(
    "control.cross_size.avataaars",
    paper=PAPER,
    figure="Table 2a on faces of DiceBear's Avataaars",
    target="distance across sizes <= 1/3 of constant weight's in all of three sets, FID not 2 % above in all",
    minutes=3,
    quick_minutes=0.6,
)
def cross_size_avataaars(
    model: str | None = None, progress: Progress = silent, quick: bool = False, avataaars: str | None = None
) -> ClaimResult:
    """As control.cross_size, with the transformers in the subfolder ``transformer`` of the model's folder."""
    folder = avataaars_folder(model, avataaars)
    opened = open_model(folder)
    assert isinstance(opened, Portraits)
    own = Path(folder) / "transformer"
    for name in NAMES:
        if not (own / name).is_dir():
            command = f"python -m vitrine.evidence.recipes sizes --weight {name} --model {folder} --out {own}"
            raise refuse("transformer", str(own / name), "a trained transformer", f"run `{command}`")
    transformers = {name: ControlledTransformer.open(str(own / name), opened) for name in NAMES}
    return measure_sizes(transformers, reader(classifier_of(opened)), progress, quick)


def measure_sizes(
    transformers: Mapping[str, ControlledTransformer], readings: Reader, progress: Progress, quick: bool
) -> ClaimResult:
    """The claim on the transformers of both weights, whose pictures ``readings`` reads."""
    counts, dataset = QUICK if quick else FULL, transformers[NAMES[0]].portraits.dataset
    real = readings(renders(2000 if not quick else 2 * counts.samples, dataset)).features
    across: dict[str, list[tuple[CrossSizeResult, ...]]] = {name: [] for name in NAMES}
    fids: dict[str, list[float]] = {}
    for number in range(counts.sets):
        first = FIRST_SCENE + 500_000 + 10_000 * number
        _, brief, _ = prompts_of(counts.pairs, first, True, dataset)
        _, prompts, _ = prompts_of(counts.samples, first + 5000, dataset=dataset)
        seeds = list(range(first, first + max(counts.pairs, counts.samples)))
        for name, transformer in transformers.items():
            across[name].append(distances_of(at_every_size(transformer, brief, seeds[: counts.pairs]), readings))
            for dropped in (False, True)[: 1 if quick else 2]:
                drawn = transformer.draw(prompts, seeds[: counts.samples], silent_controls=dropped)
                arm = f"{name}, controls dropped" if dropped else name
                fids.setdefault(arm, []).append(round(frechet_distance(readings(drawn).features, real), 2))
        progress(number + 1, counts.sets, None)
    return judged_sizes(across, fids, quick)


def judged_sizes(
    across: dict[str, list[tuple[CrossSizeResult, ...]]], fids: dict[str, list[float]], quick: bool = False
) -> ClaimResult:
    """The result from the distances of each weight's sets, and each arm's FIDs."""
    pooled = {name: torch.cat([features.each for features, _, _ in sets]) for name, sets in across.items()}
    paired = zip(across["power-cosine"], across["constant"], strict=True)
    ratios = [round(cosine[0].mean / constant[0].mean, 3) for cosine, constant in paired]
    interval = _ratio_interval(pooled["power-cosine"], pooled["constant"])
    worse = [a > 1.02 * b for a, b in zip(fids["power-cosine"], fids["constant"], strict=True)]
    details: dict[str, Any] = {"ratio by set": ratios, "FID by set": fids}
    details["FID more than 2 % above constant weight's, by set"] = worse
    for name, sets in across.items():
        details[name] = {
            measure: round(sum(results[k].mean for results in sets) / len(sets), 5)
            for k, measure in enumerate(("features, 1 - cosine", "pixels, RMS", "pixels reduced to 16 x 16, RMS"))
        }
    holds = interval[0] <= 1 / 3 if quick else max(ratios) <= 1 / 3 and not all(worse)
    ratio = float(pooled["power-cosine"].mean() / pooled["constant"].mean())
    return ClaimResult(
        round(ratio, 3),
        interval,
        holds,
        details,
        n=len(pooled["constant"]),
        seeds=len(ratios),
        arms=arms(
            {"ours": ratio, "constant weight": 1.0}, {"ours": "ours", "constant weight": "rival"}, {"ours": interval}
        ),
        tables=(by_set(fids),),
    )


@claim(
    "control.sizes",
    paper=PAPER,
    figure="Table 2b: sizes seldom or never trained",
    target="FID at sizes of 192 to 512 below constant weight's in all of three sets",
    minutes=1,
    quick_minutes=0.6,
)
def sizes(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Images always have 64 px; the size condition is 192 (4 % of training), 256 (4 %), 384 and 512 (never).

    The value is the mean difference, and the interval its smallest and largest set. ``quick`` samples one small set and
    tests whether the difference may be below 0.
    """
    counts, readings = QUICK if quick else FULL, reader()
    real = readings(renders(2000 if not quick else 2 * counts.samples)).features
    features: dict[str, list[torch.Tensor]] = {name: [] for name in NAMES}
    for number in range(counts.sets):
        first = FIRST_SCENE + 600_000 + 10_000 * number
        _, prompts, _ = prompts_of(counts.samples, first)
        for name in NAMES:
            transformer, batches = ControlledTransformer.open(name), []
            for k, size in enumerate(RARE_SIZES):
                rows = range(k * counts.samples // len(RARE_SIZES), (k + 1) * counts.samples // len(RARE_SIZES))
                sides = {"height": float(size), "width": float(size)}
                images = transformer.draw([prompts[i] for i in rows], [first + i for i in rows], sides)
                batches.append(readings(images).features)
            features[name].append(torch.cat(batches))
        progress(number + 1, counts.sets, None)
    fids = {name: [round(frechet_distance(f, real), 2) for f in sets] for name, sets in features.items()}
    differences = [round(a - b, 2) for a, b in zip(fids["power-cosine"], fids["constant"], strict=True)]
    holds = all(difference < 0 for difference in differences)
    if quick:
        holds = _fid_gap(features["power-cosine"][0], features["constant"][0], real) < 0
    named = {"ours": fids["power-cosine"], "constant weight": fids["constant"]}
    return ClaimResult(
        round(sum(differences) / len(differences), 2),
        (min(differences), max(differences)),
        holds,
        {"FID by set": fids},
        n=counts.samples,
        arms=mean_arms(named, {"ours": "ours", "constant weight": "rival"}),
        seeds=counts.sets,
        tables=(by_set(fids),),
    )


@claim(
    "control.flip",
    paper=PAPER,
    figure="Table 2c and Fig. 6: a model with a flip condition knows left from right",
    target="left / right agreement with flip = 0 above that without the condition, for both attributes",
    minutes=1,
    quick_minutes=0.3,
)
def flip(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Half of the training images were mirrored under unchanged captions (``FlipLessons``); caps and moles have sides.

    The baseline without control is the same model with dropped controls, as in one of ten training
    rows. ``quick`` tests whether the agreement may be above.
    """
    from ...engine.portraits.scenes import ATTRIBUTE_NAMES, ATTRIBUTES
    from ..portraits.transformer import SIDED

    readings, captions = reader(), (QUICK if quick else FULL).captions
    scenes, prompts, seeds = prompts_of(captions, FIRST_SCENE + 50_000)
    transformer, details, ok, counts = ControlledTransformer.open(FLIPS), {}, [], []
    conditions = {"flip = 0": {}, "flip = 1": {"flip": 1.0}}
    logits = {name: readings(transformer.draw(prompts, seeds, c)).logits for name, c in conditions.items()}
    logits["no flip condition"] = readings(transformer.draw(prompts, seeds, silent_controls=True)).logits
    for attribute, values in SIDED.items():
        codes = [ATTRIBUTES[attribute].index(v) for v in values]
        wanted = torch.as_tensor(scenes.attributes[:, ATTRIBUTE_NAMES.index(attribute)])
        rows = torch.isin(wanted, torch.tensor(codes))
        right = wanted[rows] == codes[1]
        agreement = {k: _is_right(table[attribute][rows], codes) == right for k, table in logits.items()}
        fraction = {k: round(float(v.float().mean()), 3) for k, v in agreement.items()}
        counts.append(int(rows.sum()))
        details[f"{attribute}, {counts[-1]} captions with a side"] = fraction
        slack = _share_slack(fraction["flip = 0"], counts[-1]) if quick else 0.0
        ok.append(fraction["flip = 0"] + slack > max(fraction["no flip condition"], fraction["flip = 1"]))
    progress(1, 1, None)
    mean = sum(v["flip = 0"] for v in details.values()) / len(details)
    slack = _share_slack(mean, sum(counts))
    interval = (round(max(0.0, mean - slack), 3), round(min(1.0, mean + slack), 3))
    roles = {"flip = 0": "ours", "flip = 1": "reference", "no flip condition": "trivial"}
    fractions = {k: sum(v[k] for v in details.values()) / len(details) for k in roles}
    lines = tuple((name, *(fraction[k] for k in fractions)) for name, fraction in details.items())
    return ClaimResult(
        round(mean, 3),
        interval,
        all(ok),
        details,
        arms=arms(fractions, roles, {"flip = 0": interval}),
        n=sum(counts),
        tables=(Table("Agreement", ("attribute", *fractions), lines),),
    )


def _is_right(logits: torch.Tensor, codes: list[int]) -> torch.Tensor:
    """(B,) bool: more right than left."""
    return logits[:, codes[1]] > logits[:, codes[0]]


# --- sampling, without training -----------------------------------------------------------------------------------
BETAS, SETS = (1.0, 1.25, 1.375, 1.5, 2.0), 3
"""Strengths of Eq. 2; the paper's best FID is at 1.375. Sets of prompts and noise, each with different seeds."""


@claim(
    "control.guidance",
    paper=PAPER,
    figure="Fig. 7: Eq. 2's strength of the size condition, beta, compared with plain guidance",
    target="FID at beta 1.375 below beta 1 (no guidance by size) in all of three sets",
    minutes=8,
    quick_minutes=0.2,
)
def guidance(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """The model with the paper's curve at 64 px; FID of features against renders, three sets of prompts and noise.

    Nothing is tuned: the strengths are a grid around the paper's, the guidance scale is that of the other claims.
    ``quick`` samples two strengths on small sets and only tests that the two FIDs differ by less than a fifth.
    """
    betas, samples = ((1.0, 1.375), 12) if quick else (BETAS, 160)
    readings, transformer = reader(), ControlledTransformer.open("power-cosine")
    real = readings(renders(2000 if not quick else 400)).features
    fids: dict[float, list[float]] = {beta: [] for beta in betas}
    for number in range(SETS):
        first = FIRST_SCENE + 200_000 + 10_000 * number
        _, prompts, _ = prompts_of(samples, first)
        seeds = list(range(first, first + samples))
        for k, beta in enumerate(betas):
            images = draw_guided(transformer, prompts, seeds, GuidanceConfig(GUIDANCE, beta))
            fids[beta].append(round(frechet_distance(readings(images).features, real), 2))
            progress(number * len(betas) + k + 1, SETS * len(betas), None)
    differences = [wide - plain for wide, plain in zip(fids[1.375], fids[1.0], strict=True)]
    value = round(sum(differences) / SETS, 2)
    holds = all(difference < 0 for difference in differences)
    if quick:
        holds = abs(value) < sum(fids[1.0]) / SETS / 5
    details = {f"beta {beta:g}": {"FID by set": values} for beta, values in fids.items()}
    named = {f"beta {beta:g}": values for beta, values in fids.items()}
    roles = dict.fromkeys(named, "rival") | {"beta 1": "trivial", "beta 1.375": "ours"}
    return ClaimResult(
        value,
        (round(min(differences), 2), round(max(differences), 2)),
        holds,
        details,
        n=samples,
        seeds=SETS,
        arms=mean_arms(named, roles),
        tables=(by_set(named),),
    )
