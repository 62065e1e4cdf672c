"""Copy metrics of NeMo's evaluation (section 4.1) with any image descriptor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import cosine_similarity, normalize

from ...engine.errors import refuse

Descriptor = Callable[[torch.Tensor], torch.Tensor]
"""(N, 3, H, W) in [0, 1] -> (N, D); the paper uses SSCD."""


def copy_figures(
    samples: torch.Tensor,
    describe: Descriptor,
    *,
    untouched: torch.Tensor | None = None,
    original: torch.Tensor | None = None,
) -> dict[str, float]:
    """The metrics of one prompt, medians over its N samples; all are cosines of descriptors.

    Args:
        samples: (N, 3, H, W) in [0, 1], blocked or not, with N >= 2.
        untouched: the same seeds without blocking, for ``similarity_gen``.
        original: (1, 3, H, W), the training image, for ``similarity_orig``.

    Returns:
        ``diversity`` (mean of all pairs; lower is more diverse) and, if their inputs are passed,
        ``similarity_orig`` and ``similarity_gen``.
    """
    if len(samples) < 2 or (untouched is not None and len(untouched) != len(samples)):
        shown = (len(samples), None if untouched is None else len(untouched))
        raise refuse("samples", shown, "two or more, as many untouched ones", "sample ten seeds, as the paper does")
    descriptors = normalize(describe(samples), dim=1)
    first, second = torch.triu_indices(len(descriptors), len(descriptors), 1)
    # NeMo, section 4.1: D_SSCD, SSCD_Orig, SSCD_Gen
    figures = {"diversity": float((descriptors @ descriptors.T)[first, second].mean())}
    if original is not None:
        figures["similarity_orig"] = float((descriptors @ normalize(describe(original), dim=1).T).median())
    if untouched is not None:
        figures["similarity_gen"] = float(cosine_similarity(descriptors, describe(untouched)).median())
    return figures
