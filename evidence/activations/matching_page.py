"""The demo's section on matching: keypoints in other portraits, parts learned from twenty of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...engine.activations.correspondence import draw_matches, find_correspondence
from ...engine.activations.presets import PRESETS
from ...engine.activations.segmentation import fit_probe, mean_iou
from ...engine.io.html_page import Report
from ...engine.runtime.progress import Progress, silent
from .measures import correspondence_score
from .page import to_pil
from .tapped_pictures import LABELLED, SHOTS, TESTING, Pictures, tap_pictures

if TYPE_CHECKING:
    from ...engine.portraits import Portraits

POINTS = "up-level0-repeat0-res-out"
"""Best single layer for keypoints on held-out portraits, among early up-stage layers without increments."""

_COLOURS = (
    (0.93, 0.92, 0.90),
    (0.96, 0.78, 0.62),
    (0.35, 0.25, 0.20),
    (0.60, 0.42, 0.25),
    (0.16, 0.47, 0.71),
    (0.20, 0.20, 0.20),
    (0.89, 0.55, 0.42),
    (0.84, 0.19, 0.25),
    (0.50, 0.36, 0.65),
    (0.17, 0.63, 0.45),
    (0.98, 0.80, 0.10),
)

_SHOWN = 4
_MEASURED = 24
_SCALE = 3


def section(report: Report, progress: Progress = silent, model: Portraits | None = None) -> None:
    """Two tables with images, on misaligned portraits that are not in the training data."""
    from ...engine.portraits import load_portraits

    model = model or load_portraits()
    prior, ours = PRESETS["portraits-legacy"].addresses, PRESETS["portraits"].addresses
    sites = [*dict.fromkeys((POINTS, *prior, *ours))]
    labelled = tap_pictures(model, LABELLED, SHOTS, sites, progress, misaligned=True)
    test = tap_pictures(model, TESTING, _MEASURED, sites, progress, misaligned=True)
    _points(report, test, prior)
    _parts(report, labelled, test, {"portraits-legacy": prior, "portraits": ours})


def _points(report: Report, test: Pictures, prior: tuple[str, ...]) -> None:
    report.add_subheading("Find Same Points")
    report.add_paragraph(
        "Keypoints of the first portrait are looked for in the others by nearest activations. A hollow dot is "
        "doubtful: the way back leads elsewhere. On aligned portraits copying the coordinates would do, so each is "
        f"cropped, shifted, rotated, scaled and mirrored. Share within a tenth of the side, {_MEASURED} portraits."
    )
    ways: dict[str, torch.Tensor | None] = {
        POINTS: test.features((POINTS,)),
        "portraits-legacy (earlier work's layers)": test.features(prior),
        "raw pixels": test.features(("pixels",)),
        "copied coordinates": None,
    }
    scores = {name: correspondence_score(test, features)[0] for name, features in ways.items()}
    report.add_table([("features", "PCK@0.1"), *((name, f"{score:.3f}") for name, score in scores.items())])
    for name, features in list(ways.items())[:2]:
        assert features is not None
        report.add_images([(to_pil(pair), name) for pair in match_pictures(test, features)], width=220)


def match_pictures(pictures: Pictures, features: torch.Tensor) -> list[torch.Tensor]:
    """The first portrait's keypoints found in each of the next ones: (3, H, 2 W) in [0, 1] each."""
    points = pictures.keypoints[0]
    points = points[~torch.isnan(points).any(1)]
    large = torch.nn.functional.interpolate(pictures.images, scale_factor=_SCALE).permute(0, 2, 3, 1)
    matches = [find_correspondence(features[0], f, points, temperature=0.02) for f in features[1:_SHOWN]]
    pairs = [draw_matches(large[0], large[i + 1], points, match) for i, match in enumerate(matches)]
    return [pair.permute(2, 0, 1) for pair in pairs]


def _parts(report: Report, labelled: Pictures, test: Pictures, choices: dict[str, tuple[str, ...]]) -> None:
    from ...engine.portraits import PARTS

    report.add_subheading("Segment Like This: twenty masks are enough")
    report.add_paragraph(
        f"A linear probe on {SHOTS} labelled portraits paints the {len(PARTS)} parts of others. Above: the "
        f"renderer's own parts, one colour each. Mean IoU over {_MEASURED} misaligned portraits."
    )
    legend = [(to_pil(colour_parts(torch.full((8, 8), i))), name) for i, name in enumerate(PARTS)]
    report.add_images(legend, width=72)
    report.add_images([(to_pil(colour_parts(p)), "truth") for p in test.parts[:_SHOWN]], width=128)
    table: list[tuple[object, ...]] = [("features", "channels", "mIoU")]
    for name, addresses in (choices | {"raw pixels": ("pixels",), "Fourier coordinates": ("coordinates",)}).items():
        probe = fit_probe(labelled.features(addresses), labelled.parts, len(PARTS))
        features = test.features(addresses)
        predicted = probe.predict(features, (test.parts.shape[-2], test.parts.shape[-1]))
        table.append((name, features.shape[1], f"{mean_iou(predicted, test.parts, len(PARTS))[0]:.3f}"))
        if name in choices:
            report.add_images([(to_pil(colour_parts(p)), name) for p in predicted[:_SHOWN]], width=128)
    report.add_table(table)


def colour_parts(parts: torch.Tensor) -> torch.Tensor:
    """(3, H, W) in [0, 1]: one colour per part index of (H, W)."""
    return torch.tensor(_COLOURS)[parts].permute(2, 0, 1)
