"""Chosen sites on faces from elsewhere: ``vitrine reproduce 'gdf.*.avataaars' --avataaars FOLDER``.

Filter, search and settings are the portraits'. The first identities of each range are in ``world``: sites are chosen on
``CHOOSING``, probes fitted on ``LABELLED``, and ``TESTING`` is measured.
"""

from __future__ import annotations

from ...engine.activations.presets import PRESETS
from ...engine.activations.segmentation import ProbeSettings
from ...engine.runtime.progress import Progress, silent
from ..portraits.avataaars import avataaars_folder, open_model
from ..registry import ClaimResult, claim
from .matching_claims import (
    HELD_OUT,
    QUICK_HELD_OUT,
    QUICK_PIXELS,
    QUICK_TEST,
    TEST,
    Extra,
    choose_sites,
    measure_parts,
    measure_points,
    score_parts,
    score_points,
)
from .tapped_pictures import PAPER

TRANSFERRED: tuple[Extra, ...] = (("chosen on the portraits", PRESETS["portraits"].addresses, {}),)
"""The shipped preset, for comparison."""


@claim(
    "gdf.correspondence.avataaars",
    paper=PAPER,
    figure="gdf.correspondence on faces of DiceBear's Avataaars: keypoints of 200 misaligned faces",
    target="PCK@0.1 of the chosen layers above copied coordinates and above the same search over inter-module layers, "
    "outside the 95 % bootstrap interval of each difference",
    minutes=0.8,
    quick_minutes=0.4,
)
def correspondence(
    model: str | None = None, progress: Progress = silent, quick: bool = False, avataaars: str | None = None
) -> ClaimResult:
    """As gdf.correspondence; the preset chosen on the portraits is an arm, too."""
    faces = open_model(avataaars_folder(model, avataaars))
    held_out, tested = (QUICK_HELD_OUT, QUICK_TEST) if quick else (HELD_OUT, TEST)
    choice = choose_sites(faces, held_out, score_points, 8, progress)
    return measure_points(faces, choice, tested, progress, TRANSFERRED)


@claim(
    "gdf.segmentation.avataaars",
    paper=PAPER,
    figure="gdf.segmentation on faces of DiceBear's Avataaars: parts of 200 misaligned faces, 20 labelled",
    target="mIoU of the chosen layers above Fourier coordinates and above the same search over inter-module layers, "
    "outside the 95 % bootstrap interval of each difference",
    minutes=1.5,
    quick_minutes=1,
)
def segmentation(
    model: str | None = None, progress: Progress = silent, quick: bool = False, avataaars: str | None = None
) -> ClaimResult:
    """As gdf.segmentation; the preset chosen on the portraits is an arm, too."""
    faces = open_model(avataaars_folder(model, avataaars))
    held_out, tested = (QUICK_HELD_OUT, QUICK_TEST) if quick else (HELD_OUT, TEST)
    settings = ProbeSettings(pixels=QUICK_PIXELS) if quick else None
    choice = choose_sites(faces, held_out, lambda p, a: score_parts(p, a, settings), 6, progress)
    return measure_parts(faces, choice, tested, progress, TRANSFERRED)
