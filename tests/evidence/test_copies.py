"""Figures of copies, with pixels as descriptor."""

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.evidence.metrics import copy_figures


def test_figures_of_copies_and_of_others():
    g = torch.Generator().manual_seed(0)
    original = torch.rand(1, 3, 8, 8, generator=g) - 0.5
    copies = original.repeat(4, 1, 1, 1)
    others = torch.rand(4, 3, 8, 8, generator=g) - 0.5

    def flat(images):
        return images.flatten(1)

    same = copy_figures(copies, flat, untouched=copies, original=original)
    assert all(abs(v - 1) < 1e-5 for v in same.values()) and set(same) == {
        "diversity",
        "similarity_orig",
        "similarity_gen",
    }
    away = copy_figures(others, flat, untouched=copies, original=original)
    assert max(away.values()) < 0.4
    cosines = [float(torch.cosine_similarity(a.flatten(), original.flatten(), 0)) for a in others]
    assert abs(away["similarity_orig"] - sorted(cosines)[1]) < 1e-6
    with pytest.raises(VitrineError, match="two or more"):
        copy_figures(others[:1], flat)
