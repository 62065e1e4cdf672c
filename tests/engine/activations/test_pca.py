"""PCA pictures: agreement with an independent PCA, shared bases, degenerate inputs."""

from __future__ import annotations

import pytest
import torch
from vitrine.engine.activations import PCABasis, pca_rgb
from vitrine.engine.errors import VitrineError
from vitrine.engine.tracing.hooks import Activation

pytestmark = pytest.mark.rounding


def maps(*shape: int, seed: int = 0) -> torch.Tensor:
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return noise * torch.linspace(3, 0.1, shape[1])[:, None, None]


@pytest.mark.parametrize(("channels", "side"), [(6, 8), (40, 5)])
def test_equals_sklearn_up_to_sign(channels: int, side: int) -> None:
    decomposition = pytest.importorskip("sklearn.decomposition")
    x = maps(1, channels, side, side)
    flat = x.permute(0, 2, 3, 1).reshape(-1, channels).double().numpy()
    theirs = torch.from_numpy(decomposition.PCA(3, svd_solver="full").fit_transform(flat))
    ours = PCABasis.fit(x).project(x)[0].flatten(1).T
    signs = (theirs * ours).sum(0).sign()
    assert torch.allclose(theirs * signs, ours, atol=1e-9)


def test_range_shape_and_nearest_enlargement() -> None:
    small = pca_rgb(Activation("a", maps(2, 9, 4, 6), (4, 6)))
    assert small.shape == (2, 3, 4, 6) and small.amin() == 0 and small.amax() == 1
    large = pca_rgb(maps(2, 9, 4, 6), size=(8, 12))
    assert torch.equal(large[..., ::2, ::2], small)
    assert pca_rgb(maps(1, 9, 4, 4), size=16).shape == (1, 3, 16, 16)


def test_without_basis_each_image_stands_alone() -> None:
    x = maps(3, 9, 5, 5)
    assert torch.equal(pca_rgb(x)[1:2], pca_rgb(x[1:2]))


def test_a_shared_basis_gives_equal_features_equal_colours() -> None:
    x = maps(2, 9, 5, 5)
    x[1, :, 0, 0] = x[0, :, 3, 3]
    basis = PCABasis.fit(x)
    rgb = pca_rgb(x, basis)
    assert torch.allclose(rgb[1, :, 0, 0], rgb[0, :, 3, 3], atol=1e-6)
    assert torch.allclose(rgb[:1], pca_rgb(x[:1], basis), atol=1e-6)
    lists = PCABasis.fit([x[:1], x[1:]])
    assert torch.allclose(lists.components, basis.components)


def test_signs_do_not_depend_on_the_order_of_positions() -> None:
    x = maps(1, 9, 6, 6)
    assert torch.allclose(PCABasis.fit(x).components, PCABasis.fit(x.flip(-1)).components, atol=1e-9)


def test_many_positions_are_thinned() -> None:
    x = maps(4, 8, 32, 32)
    thinned = PCABasis.fit(x, max_samples=2048)
    assert torch.allclose(PCABasis.fit(x).components.abs(), thinned.components.abs(), atol=0.25)


@pytest.mark.parametrize("shape", [(1, 8, 4, 4), (1, 1, 4, 4), (1, 2, 4, 4), (1, 8, 1, 1)])
def test_constant_maps_are_grey(shape: tuple[int, ...]) -> None:
    assert torch.equal(pca_rgb(torch.full(shape, 7.3)), torch.full((1, 3, *shape[2:]), 0.5))


@pytest.mark.parametrize("channels", [1, 2])
def test_few_channels_leave_grey_components(channels: int) -> None:
    rgb = pca_rgb(maps(1, channels, 4, 4))
    assert torch.equal(rgb[:, channels:], torch.full((1, 3 - channels, 4, 4), 0.5))
    assert rgb[:, :channels].amin() == 0 and rgb[:, :channels].amax() == 1


def test_rank_one_maps_have_one_colour() -> None:
    rgb = pca_rgb(torch.randn(1, 1, 5, 5) * torch.randn(1, 8, 1, 1))
    assert (rgb[:, 1:] == 0.5).all()


def test_half_precision_is_accepted() -> None:
    assert pca_rgb(maps(1, 8, 4, 4).half()).dtype == torch.float32


@pytest.mark.parametrize(
    "bad",
    [
        Activation("cross-k", torch.zeros(1, 7, 4), None),
        Activation("self-map", torch.zeros(1, 2, 4, 4), None),
        torch.zeros(3, 4, 4),
        torch.full((1, 3, 2, 2), float("nan")),
    ],
)
def test_refuses_what_has_no_picture(bad: object) -> None:
    with pytest.raises(VitrineError):
        pca_rgb(bad)


def test_refuses_a_basis_of_another_place() -> None:
    with pytest.raises(VitrineError, match="channels"):
        pca_rgb(maps(1, 8, 4, 4), PCABasis.fit(maps(1, 9, 4, 4)))
