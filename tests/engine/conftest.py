"""What several files of W2W's tests share: a network small enough for gradients, and a space of its LoRAs."""

import pytest
import torch
from vitrine.engine.w2w import (
    LoraLayer,
    Manifest,
    PCAConfig,
    WeightSpace,
    direction,
    initial_lora,
    principal_components,
    with_directions,
)
from vitrine.engine.w2w.space.principal_components import Matrix
from vitrine_tests import models

N = 60


@pytest.fixture(scope="module")
def unet():
    """Files that want another network have a fixture of that name themselves."""
    return models.unet(sample_size=8, cross_attention_dim=12, norm_num_groups=4).requires_grad_(False)


@pytest.fixture(scope="module")
def loras(unet):
    """LoRAs from one start, as many as wanted."""
    start = initial_lora(unet, rank=1, alpha=27.0)

    def make(count=N, strength=0.08):
        out = []
        for i in range(count):
            g = torch.Generator().manual_seed(i)
            out.append(
                {
                    p: LoraLayer(
                        v.down + strength * torch.randn(v.down.shape, generator=g),
                        strength * torch.randn(v.up.shape, generator=g),
                        27.0,
                    )
                    for p, v in start.items()
                }
            )
        return out

    return make


@pytest.fixture(scope="module")
def space(loras):
    """60 models, labels odd, big and tall."""
    made = loras()
    manifest = Manifest.of(made[0])
    rows = torch.stack([manifest.flatten(x) for x in made])
    found = principal_components(Matrix(rows), PCAConfig())
    names = tuple(f"m{i:02d}" for i in range(N))
    parts = (found.mean, found.scale, found.basis, found.singular_values, found.coefficients, N)
    made = WeightSpace(manifest, *parts, names, {}, found.total_variance)
    y = torch.arange(N) % 2
    p = made.coefficients
    halves = {"odd": y.float(), "big": (p[:, 1] > 0).float(), "tall": (p[:, 2] > 0.1).float()}
    return with_directions(made, {k: direction(made, v) for k, v in halves.items()})
