"""The demo's pictures of matching: keypoints carried to other portraits, parts learned from twenty of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...engine.activations.correspondence import find_correspondence
from ...engine.activations.points import draw_matches
from ...engine.activations.presets import PRESETS
from ...engine.activations.segmentation import fit_probe, mean_iou
from ...engine.io.html_page import Report
from ...engine.runtime.progress import Progress, silent
from .drawing import colour_parts, to_pil
from .measures import correspondence_score
from .world import LABELLED, SHOTS, TESTING, Pictures, tap_pictures

if TYPE_CHECKING:
    from ...engine.portraits import Portraits

POINTS = "up-level0-repeat0-res-out"
"""Best single place for keypoints on held-out portraits among those in the early up stage that are no increments."""

_SHOWN = 4
_MEASURED = 24
_SCALE = 3


def add_matching(report: Report, model: Portraits, progress: Progress = silent) -> None:
    """Two tables, each with rows of pictures, on portraits that training never saw; legacy places beside others."""
    legacy, ours = PRESETS["portraits-legacy"].addresses, PRESETS["portraits"].addresses
    places = [*dict.fromkeys((POINTS, *legacy, *ours))]
    labelled = tap_pictures(model, LABELLED, SHOTS, places, progress)
    test = tap_pictures(model, TESTING, _MEASURED, places, progress)
    _points(report, test, legacy)
    _parts(report, labelled, test, {"portraits-legacy": legacy, "portraits": ours})


def _points(report: Report, test: Pictures, legacy: tuple[str, ...]) -> None:
    choices = {POINTS: (POINTS,), "portraits-legacy": legacy}
    report.add_heading("Find Correspondence: the same point in another picture")
    report.add_paragraph(
        "Keypoints of the first portrait are looked for in the others by nearest activations. A hollow dot is "
        f"doubtful: the way back leads elsewhere. Share within a tenth of the picture, {_MEASURED} portraits."
    )
    scores = {name: correspondence_score(test, test.features(addresses))[0] for name, addresses in choices.items()}
    report.add_table([("places", "PCK@0.1"), *((name, f"{score:.3f}") for name, score in scores.items())])
    for name, addresses in choices.items():
        pairs = match_pictures(test, test.features(addresses))
        report.add_images([(to_pil(pair), name) for pair in pairs], width=220)


def match_pictures(pictures: Pictures, features: torch.Tensor) -> list[torch.Tensor]:
    """The first portrait's keypoints in each of the next ones: (3, H, 2 W) in [0, 1] each."""
    points = pictures.keypoints[0]
    points = points[~torch.isnan(points).any(1)]
    large = torch.nn.functional.interpolate(pictures.images, scale_factor=_SCALE).permute(0, 2, 3, 1)
    matches = [find_correspondence(features[0], f, points, temperature=0.02) for f in features[1:_SHOWN]]
    pairs = [draw_matches(large[0], large[i + 1], points, match) for i, match in enumerate(matches)]
    return [pair.permute(2, 0, 1) for pair in pairs]


def _parts(report: Report, labelled: Pictures, test: Pictures, choices: dict[str, tuple[str, ...]]) -> None:
    from ...engine.portraits import PARTS

    report.add_heading("Segment Like This: twenty masks are enough")
    report.add_paragraph(
        f"A linear probe on the activations of {SHOTS} labelled portraits paints the {len(PARTS)} parts of others. "
        f"First row: the renderer's own parts. Mean IoU over {_MEASURED} portraits; more channels alone help a probe."
    )
    report.add_images([(to_pil(colour_parts(p)), "truth") for p in test.parts[:_SHOWN]], width=128)
    table: list[tuple[object, ...]] = [("places", "channels", "mIoU")]
    painted = []
    for name, addresses in choices.items():
        probe = fit_probe(labelled.features(addresses), labelled.parts, len(PARTS))
        predicted = probe.predict(test.features(addresses), (test.parts.shape[-2], test.parts.shape[-1]))
        channels = sum(test.widths[a] for a in addresses)
        table.append((name, channels, f"{mean_iou(predicted, test.parts, len(PARTS))[0]:.3f}"))
        painted.append([(to_pil(colour_parts(p)), name) for p in predicted[:_SHOWN]])
    for row in painted:
        report.add_images(row, width=128)
    report.add_table(table)
