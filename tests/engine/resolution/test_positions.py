"""Positions at another size against diffusers' own grids, tables and rotary angles."""

import math

import pytest
import torch
from diffusers.models.embeddings import PatchEmbed, get_2d_sincos_pos_embed
from diffusers.models.transformers.transformer_flux import FluxPosEmbed
from vitrine.engine.diffusion.schedule import NoiseSchedule
from vitrine.engine.errors import VitrineError
from vitrine.engine.network.rotary_embedding import doubled
from vitrine.engine.resolution import (
    ModelFacts,
    Positions,
    ResolutionTransferConfig,
    plan_transfer,
    rebuilt_table,
    recover_grid,
)
from vitrine.engine.resolution.posembed import axis_units, grid_units, sincos_table
from vitrine.engine.resolution.rope import inverse_frequencies, ntk, yarn, yarn_scale
from vitrine.engine.resolution.rotary_patch import turned

pytestmark = pytest.mark.rounding


# --- positions ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("base", "n", "scale"), [(16, 32, 1.0), (16, 24, 2.0), (16, 8, 1.0)])
def test_grid_is_diffusers_own(base, n, scale):
    for target in ((n, n), (n, 2 * n)):
        found = rebuilt_table(64, target, (base, base), scale=scale)[0]
        wanted = get_2d_sincos_pos_embed(64, target, base_size=base, interpolation_scale=scale, output_type="pt")
        assert torch.equal(found, wanted.float())


def test_grid_keeps_every_trained_position():
    base, big = (rebuilt_table(64, (n, n), (16, 16)).reshape(n, n, 64) for n in (16, 32))
    assert torch.equal(big[::2, ::2], base)
    torch.testing.assert_close(big.norm(dim=-1), torch.full((32, 32), math.sqrt(32)), rtol=1e-6, atol=0)
    longer = rebuilt_table(64, (32, 32), (16, 16), "extrapolate").reshape(32, 32, 64)
    assert torch.equal(longer[:16, :16], base)


def test_both_axes_fill_the_trained_range():
    rows, columns = grid_units((32, 64), (16, 16))
    assert float(rows[1]) == 0.5 and float(columns[1]) == 0.25
    assert float(rows[-1]) == 15.5 and float(columns[-1]) == 15.75
    with pytest.raises(VitrineError, match="grid or extrapolate"):
        axis_units(4, 2, "bicubic")


def test_stored_tables():
    part = PatchEmbed(16, 16, 2, 4, 64, pos_embed_max_size=24)
    grid = recover_grid(part.pos_embed)
    assert abs(grid.starts[0]) < 1e-4 and abs(grid.steps[1] - 8 / 24) < 1e-5
    cropped = part.cropped_pos_embed(16, 32)
    torch.testing.assert_close(grid.table((8, 16), (8, 8), "extrapolate").float(), cropped, rtol=0, atol=1e-5)
    torch.testing.assert_close(grid.table((8, 8), (8, 8)).float(), part.cropped_pos_embed(16, 16), rtol=0, atol=1e-5)
    longer = grid.table((32, 32), (8, 8), "extrapolate").reshape(32, 32, 64)
    torch.testing.assert_close(longer[4:28, 4:28].reshape(1, -1, 64).float(), part.pos_embed, rtol=0, atol=1e-5)
    finer = grid.table((16, 16), (8, 8)).reshape(16, 16, 64)[::2, ::2]
    torch.testing.assert_close(finer.reshape(1, -1, 64).float(), part.cropped_pos_embed(16, 16), rtol=0, atol=1e-5)


def test_recovery_of_half_precision_tables():
    i = torch.arange(48, dtype=torch.float64)
    table = sincos_table(1536, -16.375 + 0.25 * i, -4.5 + 0.5 * i).half()
    found = recover_grid(table)
    rows = found.starts[0] + found.steps[0] * i
    assert (rows - (-16.375 + 0.25 * i)).abs().max() < 1e-4
    assert abs(found.starts[1] + 4.5) < 1e-4 and abs(found.steps[1] - 0.5) < 1e-6
    learned = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(0))
    with pytest.raises(VitrineError, match="misses"):
        recover_grid(learned)


def test_rotary_functions():
    inverse = inverse_frequencies(16)
    assert torch.equal(ntk(16, 10000.0, 1.0), inverse)
    assert float(ntk(16, 10000.0, 4.0)[0]) == 1 and abs(float(ntk(16, 10000.0, 4.0)[-1] / inverse[-1]) - 0.25) < 1e-12
    parts = yarn(64, 10000.0, 2.0, 4096) / inverse_frequencies(64)
    assert float(parts[0]) == 1 and float(parts[-1]) == 0.5 and bool((parts.diff() <= 1e-12).all())
    assert yarn_scale(1.0) == 1 and abs(yarn_scale(4.0) - (0.1 * math.log(4) + 1)) < 1e-15


def test_rotary_in_flux_layout():
    part, ids = FluxPosEmbed(10000, [4, 6, 6]), torch.zeros(96, 3)
    ids[:, 1], ids[:, 2] = torch.arange(96) // 12, torch.arange(96) % 12
    facts = ModelFacts("flux", NoiseSchedule.flow(), None, 8, 2, positions=Positions("rope"))
    same, pi, yarned = (
        plan_transfer(facts, ResolutionTransferConfig((192, 128), train, pos_embed=mode))
        for train, mode in (((192, 128), "rope_pi"), ((96, 64), "rope_pi"), ((96, 64), "rope_yarn"))
    )
    assert same.positions == "keep" and pi.scales == (2.0, 2.0)
    scaled = part(ids / torch.tensor([1.0, 2.0, 2.0]))
    for found, wanted in zip(doubled(*turned(ids, part.axes_dim, part.theta, pi)), scaled, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    cos, sin = doubled(*turned(ids, part.axes_dim, part.theta, yarned))
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, yarn_scale(2.0) ** 2), rtol=1e-5, atol=0)
