"""Precision and recall where the answer is known."""

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.evidence.metrics import precision_recall


def test_a_dropped_mode_costs_recall_and_an_invented_one_precision():
    g = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(200, 4, generator=g) * 0.1 + centre for centre in (0.0, 5.0, 10.0))
    real = torch.cat([a, b])
    fresh = torch.cat([torch.randn(100, 4, generator=g) * 0.1, torch.randn(100, 4, generator=g) * 0.1 + 5])
    both = precision_recall(real, fresh)
    one = precision_recall(real, fresh[:100])
    invented = precision_recall(real, torch.cat([fresh[:100], c[:100]]))
    assert min(both) > 0.8 and one[0] > 0.8 and 0.35 < one[1] < 0.55 and 0.4 < invented[0] < 0.55
    assert precision_recall(real, real) == (1.0, 1.0)


def test_it_equals_the_definition_written_out():
    g = torch.Generator().manual_seed(1)
    real, made = torch.randn(20, 3, generator=g).double(), torch.randn(15, 3, generator=g).double() * 1.5

    def inside(points, manifold, k=3):
        hits = 0
        for p in points:
            near = False
            for i, m in enumerate(manifold):
                others = sorted(float((m - o).norm()) for j, o in enumerate(manifold) if j != i)
                near = near or float((p - m).norm()) <= others[k - 1]
            hits += near
        return hits / len(points)

    assert precision_recall(real, made) == (inside(made, real), inside(real, made))


def test_too_few_samples_are_refused():
    with pytest.raises(VitrineError, match="more samples"):
        precision_recall(torch.randn(3, 2), torch.randn(9, 2))
