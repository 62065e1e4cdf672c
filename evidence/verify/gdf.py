"""Correspondence on SPair-71k: GDF's layers of UNets, DiTF's layer of Flux, by nearest features without training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...engine.activations.correspondence import find_correspondence
from ...engine.activations.presets import preset
from ..intervals import ratio_interval
from .context import SETTINGS, Context
from .estimate import ENCODING, timed
from .protocol import check
from .records import Estimate, Figure, Measured, Need, Published
from .spair import GRID, SPairPair, SPairScore, TappedPictures, read_spair, spair_scores

SPAIR = Need(
    "SPair-71k",
    "1,800 pictures with keypoints, 12,234 test pairs",
    "cvlab.postech.ac.kr/research/SPair-71k",
    "see its page",
)
TEST_PAIRS, PICTURES = 12_234, 1_800
"""Of SPair-71k: its test pairs, and all its pictures, of which the test needs some."""
PRESETS = {"SD": "Ours-v1.5", "SDXL": "Ours-XL", "Flux": "DiTF-Flux"}
DATA = "SPair-71k test"
_PLAIN = (
    "The plain figure is of one feature of SD1.5, which the paper does not name. The published selection of layers is "
    "measured; its figures with a trained head (a 3x3 convolution, 10,000 training pairs) are below it."
)
_TRAINED = "with a head trained on SPair-71k; features are compared as they are here, so there is no figure"
PLAIN = (
    Published("gdf.bbox", "PCK@0.1 by box, nearest neighbour", 51.66, None, "SD1.5", DATA, "arXiv 2410.06719", _PLAIN),
    Published("gdf.img", "PCK@0.1 by image, nearest neighbour", 61.15, None, "SD1.5", DATA, "arXiv 2410.06719", _PLAIN),
    Published("gdf.trained.v15", "PCK@0.1 by box, trained head, Ours-v1.5", 69.83, None, "SD1.5", DATA, "GDF, Table 1"),
    Published("gdf.trained.xl", "PCK@0.1 by box, trained head, Ours-XL", 75.18, None, "SDXL", DATA, "GDF, Table 1"),
)
_OPEN = "Whether the paper counts points or pictures is not said; points are counted here."
STEPS: dict[str, tuple[str, float, dict[str, Any]]] = {
    "raw": ("plain block input", 29.9, {"modulate": False, "discard": ()}),
    "modulated": ("modulated by its block's adaLN", 65.3, {"modulate": True, "discard": ()}),
    "discarded": ("modulated, massive channels discarded", 67.1, {"modulate": True}),
}
DITF = tuple(
    Published(f"ditf.bbox.{key}", f"PCK@0.1 by box, {words}", value, None, "Flux.1-dev", DATA, "DiTF's README", _OPEN)
    for key, (words, value, _) in STEPS.items()
)


def _pairs(context: Context) -> tuple[list[SPairPair], int]:
    """The subset of the test pairs, and the number of all."""
    folder = context.path(SPAIR)
    assert folder is not None  # a check does not run without what it needs
    pairs = read_spair(folder, context.settings.split)
    return [pairs[i] for i in context.chosen(len(pairs))], len(pairs)


def _preparing(taps: int) -> Callable[[Context], Estimate]:
    """An estimate for ``taps`` ways of tapping each picture."""

    def prepare(context: Context) -> Estimate:
        if context.path(SPAIR) is None:
            pairs = len(context.chosen(TEST_PAIRS))
            pictures = min(PICTURES, 2 * pairs)
        else:
            chosen = _pairs(context)[0]
            pairs, pictures = len(chosen), len({file for p in chosen for file in (p.source, p.target)})
        channels = preset(PRESETS[context.kind]).channels if not context.settings.places else 320
        each, held = _matching(context, channels)
        seeds = len(_run(context, {}).tap.get("seeds", (0,)))
        rows = taps * pictures * (seeds + ENCODING)
        why = f"{taps} x {pictures} pictures, {pairs} pairs of {each:.2g} s matched"
        seconds = rows * context.pace.seconds + taps * pairs * each
        return Estimate(rows, seconds, max(held, min(context.budget, context.pace.row * 16)), why)

    return prepare


def _matching(context: Context, channels: int) -> tuple[float, int]:
    """Seconds and bytes of comparing two pictures with ``channels`` channels, on the network's device."""
    g, shape = torch.Generator().manual_seed(0), (channels, GRID, GRID)
    both = [torch.randn(shape, generator=g).to(context.network.device) for _ in range(2)]
    points = torch.rand(10, 2, generator=g).to(both[0])
    return timed(lambda: find_correspondence(both[0], both[1], points)), 4 * sum(m.nbytes for m in both)


def _run(context: Context, changes: dict[str, Any]) -> TappedPictures:
    """The published selection, or the layers from the settings."""
    settings, chosen = context.settings, preset(PRESETS[context.kind])
    tap: dict[str, Any] = {"seeds": chosen.seeds, "modulate": chosen.modulate, "discard": chosen.discard}
    places = settings.places.split() or list(chosen.addresses)
    if settings.places:
        tap = {"discard": settings.discard}
    tap |= {"timestep": settings.timestep or chosen.timestep, **changes}
    return TappedPictures(places, settings.size or None, context.budget, tap)


def _measured(context: Context, changes: dict[str, Any], label: str) -> tuple[SPairScore, int]:
    """PCK@0.1 of the subset, and the number of all pairs."""
    from ...engine.pipelines import CorrespondencePipeline

    pairs, whole = _pairs(context)
    run = _run(context, changes)
    sums = context.data_sums([SPAIR])
    cache = context.state("spair", run.addresses, run.size, sorted(run.tap.items()), [p.name for p in pairs], sums)
    pipe = CorrespondencePipeline.from_pipe(context.pipe)
    bars = (context.bar(f"pictures, {label}"), context.bar(f"pairs, {label}"))
    return spair_scores(pipe, pairs, cache, run, *bars), whole


def _figure(what: str, each: torch.Tensor, points: Sequence[int]) -> Figure:
    """Percentage of correct points; the interval is a bootstrap over pairs."""
    weights = torch.tensor([float(n) for n in points])
    good = ~each.isnan()
    hits, counts = (each * weights)[good], weights[good]
    low, high = ratio_interval(hits, counts)
    value = 100 * float(hits.sum() / counts.sum())
    return Figure(what, round(value, 2), (round(100 * low, 2), round(100 * high, 2)), len(counts))


def _notes(context: Context, count: int, whole: int) -> list[str]:
    squeezed = "every picture squeezed to the model's square, as GDF does"
    return [
        *context.subset_note(count, whole, "test pairs"),
        squeezed,
        *context.usual_notes("places", "timestep", "discard", "size", "split", autocast=False),
    ]


@check(
    "gdf.spair",
    paper="GDF (arXiv 2410.03558) and 2410.06719, by the same authors",
    families=("SD", "SDXL"),
    needs=(SPAIR, SETTINGS),
    published=PLAIN,
    prepare=_preparing(1),
)
def spair(context: Context) -> Measured:
    """Nearest features of the published layers; no head is trained."""
    pairs, _ = _pairs(context)
    points = [len(p.source_points) for p in pairs]
    score, whole = _measured(context, {}, "published places")
    how = "PCK@0.1 by {}, nearest neighbour, per point"
    figures = {
        "gdf.bbox": _figure(how.format("box"), score.each_bbox, points),
        "gdf.img": _figure(how.format("image"), score.each_img, points),
    }
    differs = _notes(context, len(pairs), whole)
    differs.append(f"layers {context.settings.places or PRESETS[context.kind]}, prompt 'a photo of a' and the category")
    missing = {p.key: _TRAINED for p in PLAIN if p.key not in figures}
    return Measured(figures, tuple(differs), missing, {"totals by box": _percent(score.totals(True))})


@check(
    "ditf.spair",
    paper="DiTF (arXiv 2505.18584)",
    families=("Flux",),
    needs=(SPAIR, SETTINGS),
    published=DITF,
    prepare=_preparing(len(STEPS)),
)
def ditf(context: Context) -> Measured:
    """The block's input: plain, modulated, and modulated without its massive channels."""
    pairs, _ = _pairs(context)
    points, whole = [len(p.source_points) for p in pairs], 0
    figures, missing, details = {}, {}, {}
    for key, (words, _value, changes) in STEPS.items():
        if key == "discarded" and not _run(context, {}).tap["discard"]:
            missing[f"ditf.bbox.{key}"] = "no massive channels are named for this model"
            continue
        score, whole = _measured(context, changes, words)
        figures[f"ditf.bbox.{key}"] = _figure(f"PCK@0.1 by box, {words}, per point", score.each_bbox, points)
        details[f"totals by box, {words}"] = _percent(score.totals(True))
    differs = _notes(context, len(pairs), whole)
    differs.append("prompt 'a photo of a' and the category, the authors caption every picture and keep its proportions")
    return Measured(figures, tuple(differs), missing, details)


def _percent(totals: dict[str, float]) -> dict[str, float]:
    return {name: round(100 * value, 2) for name, value in totals.items()}
