"""Directions, sampling, editing, inversion: each against the published formulas written out plainly here."""

import copy
import math

import pytest
import torch
from diffusers import UNet2DConditionModel
from vitrine.engine.denoiser import Condition, Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits.models import build_models
from vitrine.engine.w2w import (
    BatchedLora,
    DeltaSpace,
    EditConfig,
    InvertConfig,
    LoraLayer,
    Manifest,
    PCAConfig,
    SampleConfig,
    W2WModel,
    WeightSpace,
    blend,
    closeness,
    conditioned,
    difference,
    direction,
    edit,
    edited_lora,
    initial_lora,
    invert,
    latent_mask,
    nearest,
    principal_components,
    quality,
    reach,
    sample,
    score,
    share_inside,
    with_directions,
    without,
)
from vitrine.engine.w2w.directions import published_direction, spread_along
from vitrine.engine.w2w.inversion import preset
from vitrine.engine.w2w.labels import parse_labels, read_table
from vitrine.engine.w2w.official import import_official
from vitrine.engine.w2w.pca import Matrix

N = 60


def tiny():
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=12, attention_head_dim=4,
        norm_num_groups=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval().requires_grad_(False)  # fmt: skip


@pytest.fixture(scope="module")
def unet():
    return tiny()


def loras(unet, count=N, strength=0.08):
    start = initial_lora(unet, rank=1, alpha=27.0)
    out = []
    for i in range(count):
        g = torch.Generator().manual_seed(i)
        out.append({
            p: LoraLayer(v.down + strength * torch.randn(v.down.shape, generator=g),
                         strength * torch.randn(v.up.shape, generator=g), 27.0)
            for p, v in start.items()
        })  # fmt: skip
    return out


@pytest.fixture(scope="module")
def space(unet):
    made = loras(unet)
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


# --- directions (checks 9, 10) ------------------------------------------------------------------------------------
def test_closed_form_equals_the_pseudo_inverse(space):
    y = torch.randint(0, 2, (N,), generator=torch.Generator().manual_seed(3)).float()
    p = space.coefficients[:, :20]
    plain = torch.linalg.pinv(p.double()) @ y.double()  # the official get_direction
    found = published_direction(space, y, 20)
    assert (found[:20] - plain).norm() / plain.norm() < 1e-4
    assert torch.equal(found[20:], torch.zeros(space.dimension - 20))  # return_dim pads with zeros
    signs = published_direction(space, 2 * y - 1, 20)
    torch.testing.assert_close(signs, 2 * found, atol=1e-6, rtol=1e-4)


def test_debias_one_after_another_and_together(space):
    g = torch.Generator().manual_seed(4)
    n, others = torch.randn(20, generator=g), list(torch.randn(3, 20, generator=g))
    plain = n.clone()
    for d in others:
        plain = plain - (plain @ d) / (d.norm() ** 2) * d
    found = without(n, others, "official_sequential")
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=0)

    def cosines(v):
        return [abs(float(torch.nn.functional.cosine_similarity(v, d, dim=0))) for d in others]

    assert cosines(found)[-1] < 1e-6 < max(cosines(found)[:-1])
    assert max(cosines(without(n, others))) < 1e-6


def test_a_direction_is_one_deviation_long(space):
    for label in space.directions:
        d = space.directions[label]
        scores = score(d, space.coefficients)
        assert abs(float(scores.std()) - 1) < 1e-3
        assert abs(float(d.norm()) - spread_along(space, d)) < 1e-5
        assert abs(float(scores.abs().max()) - reach(space, d)) < 1e-3
        assert abs(float(score(d, 2.5 * d)) - 2.5) < 1e-5


@pytest.mark.parametrize("method", ["least_squares", "logistic", "means"])
def test_methods_find_a_planted_attribute(space, method):
    y = (space.coefficients[:, 0] > 0).float()
    found = direction(space, y, method, 12)
    assert abs(float(torch.nn.functional.normalize(found, dim=0)[0])) > 0.7
    told = quality(space, {"first": y, "noise": (torch.arange(N) % 2).float()}, method, 12)
    assert told.accuracy["first"] > 0.8 > told.accuracy["noise"]
    assert told.entanglement.shape == (2, 2) and abs(float(told.entanglement[0, 0]) - 1) < 1e-5


def test_unknown_labels_are_left_out(space):
    y = (space.coefficients[:, 0] > 0).float()
    y[::3] = torch.nan
    assert abs(float(torch.nn.functional.normalize(direction(space, y, components=8), dim=0)[0])) > 0.7
    with pytest.raises(VitrineError, match="two classes"):
        direction(space, torch.ones(N))
    with pytest.raises(VitrineError, match="labels"):
        direction(space, torch.ones(3))


# --- sampling (check 8) -------------------------------------------------------------------------------------------
def test_official_draw_is_a_scalar_loop(space):
    """The published sample_weights: one torch.normal a component, global generator."""
    torch.manual_seed(11)
    mean, std = space.coefficients.mean(0), space.coefficients.std(0)
    plain = torch.stack([torch.normal(mean[k], std[k]) for k in range(20)])
    found = sample(space, [11], SampleConfig(components=20, rng="official"))[0, :20]
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-4)
    vector = sample(space, [11], SampleConfig(components=20))[0, :20]
    assert (vector - plain).abs().max() > 0.1


def test_moments_and_independence_of_the_batch(space):
    rows = sample(space, range(2000), SampleConfig(components=10))[:, :10] / space.deviations[:10]
    assert rows.mean(0).abs().max() < 4 / math.sqrt(2000)
    assert (rows.var(0) - 1).abs().max() < 4 * math.sqrt(2 / 2000)
    assert torch.equal(sample(space, [5, 9])[1], sample(space, [9])[0])
    cut = sample(space, range(300), SampleConfig(components=10, truncation=1.5))[:, :10] / space.deviations[:10]
    assert cut.abs().max() <= 1.5 + 1e-5
    assert torch.equal(sample(space, [1], SampleConfig(factor=0.0)), torch.zeros(1, space.dimension))


def test_conditioned_hits_its_targets_by_the_least_change(space):
    beta = sample(space, [0, 1], SampleConfig(components=space.dimension))
    wanted = {"odd": 1.5, "big": -2.0}
    found = conditioned(space, beta, wanted)
    for label, value in wanted.items():
        got = score(space.directions[label], found)
        torch.testing.assert_close(got, torch.full((2,), value), atol=1e-3, rtol=0)
    # any other way to the same targets is longer in units of the deviations
    free = without(torch.randn(space.dimension), list(space.directions.values())[:2]) * 0.05
    own = ((found - beta) / space.deviations).norm(dim=1)
    other = ((found - beta + free) / space.deviations).norm(dim=1)
    assert (own < other).all()


def test_neighbours(space):
    (near,) = nearest(space, space.coefficients[7:8], 3)
    assert near[0].name == "m07" and near[0].cosine > 0.999 and len(near) == 3
    assert -1 < closeness(space) < 1


# --- editing (checks 6, 7, 11, 23) --------------------------------------------------------------------------------
def test_zero_edit_is_the_same_bits(space):
    beta = sample(space, [3])[0]
    assert torch.equal(edit(space, beta, {"odd": 0.0, "big": 0.0}), beta)


def test_order_of_edits_is_without_effect(space):
    beta = sample(space, [3])[0]
    steps = {"odd": 1.0, "big": -2.0, "tall": 0.7}
    once = space.decode(edit(space, beta, steps))
    other = space.decode(edit(space, beta, dict(reversed(steps.items()))))
    one_by_one = beta
    for label in ("tall", "odd", "big"):
        one_by_one = edit(space, one_by_one, {label: steps[label]})
    assert (once - other).abs().max() < 1e-6 and (once - space.decode(one_by_one)).abs().max() < 1e-6


def test_edit_in_weights_is_the_published_sum(space):
    beta, n = sample(space, [3])[0], space.directions["odd"]
    plain = space.decode(beta) + 1.7 * space.scale * (n @ space.components)
    torch.testing.assert_close(space.decode(edit(space, beta, {"odd": 1.7})), plain, atol=1e-6, rtol=0)


def test_protected_labels_keep_their_score(space):
    beta = sample(space, [3])[0]
    moved = edit(space, beta, {"odd": 2.0}, EditConfig(protect=("big", "tall")))
    for label in ("big", "tall"):
        d = space.directions[label]
        assert abs(float(score(d, moved) - score(d, beta))) < 1e-4
    assert abs(float(score(space.directions["odd"], moved) - score(space.directions["odd"], beta))) > 0.5


def test_materialised_equals_peft_style_forward(space, unet):
    """Check 6: the runtime way (W x + 27 B A x) and the merged weights give one picture."""
    beta = sample(space, [5])[0]
    x, text, t = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 12), torch.tensor([10, 700])
    with BatchedLora(unet, space.manifest, space.decode(beta)[None]):
        runtime = unet(x, t, text).sample
    merged = copy.deepcopy(unet)
    for path, layer in space.lora(beta).items():
        merged.get_submodule(path).weight += layer.delta()
    assert (runtime - unet(x, t, text).sample).abs().max() > 0.05
    torch.testing.assert_close(merged(x, t, text).sample, runtime, atol=1e-4, rtol=0)


def test_bfloat16_of_the_published_code_is_within_one_percent(space):
    beta = sample(space, [5], SampleConfig(components=space.dimension))[0]
    half = [v.bfloat16() for v in (beta, space.components, space.scale, space.mean)]
    theirs = (half[0] @ half[1]) * half[2] + half[3]
    ours = space.decode(beta)
    assert (theirs.float() - ours).norm() / ours.norm() < 0.01


def test_difference_lora(space):
    a, b = (space.lora(row) for row in sample(space, [1, 2]))
    for path, layer in difference(a, b).items():
        torch.testing.assert_close(layer.delta(), a[path].delta() - b[path].delta(), atol=1e-5, rtol=0)
        assert layer.rank == 2
    assert difference(a, a) == {}


def test_edits_of_some_blocks_only(space):
    beta = sample(space, [1])[0]
    found = edited_lora(space, beta, {"odd": 2.0}, EditConfig(blocks=("up_blocks",)))
    plain, full = space.lora(beta), edited_lora(space, beta, {"odd": 2.0})
    for path in found:
        wanted = full if path.startswith("up_blocks") else plain
        assert torch.equal(found[path].up, wanted[path].up)


def test_blend_and_share_inside(space, unet):
    a, b = sample(space, [1, 2])
    torch.testing.assert_close(blend([a, b], [3, 1]), 0.75 * a + 0.25 * b)
    with pytest.raises(VitrineError, match="weights"):
        blend([a, b], [1, -1])
    g = torch.Generator().manual_seed(999)
    foreign = {p: LoraLayer(torch.randn(v.down.shape, generator=g), torch.randn(v.up.shape, generator=g), 1.0)
               for p, v in space.lora(a).items()}  # fmt: skip
    assert share_inside(space, foreign) < 0.2 < 0.99 < share_inside(space, space.lora(a))
    delta = DeltaSpace.of(loras(unet, 12))
    assert share_inside(delta, foreign) < 0.1 and share_inside(delta, delta.lora(sample(delta, [0])[0])) > 0.99


@pytest.mark.parametrize(("given", "told"), [
    ({"strengths": {"beard": 1.0}}, "beard"),
    ({"strengths": {"odd": float("nan")}}, "strength"),
    ({"strengths": {"odd": 1.0}, "config": EditConfig(protect=("odd",))}, "protect"),
])  # fmt: skip
def test_bad_edits_are_refused(space, given, told):
    with pytest.raises(VitrineError, match=told):
        edit(space, torch.zeros(space.dimension), **given)


def test_delta_spaces_do_the_same_things(unet):
    made = loras(unet, 12)
    space = DeltaSpace.of(made, [f"m{i}" for i in range(12)])
    space = with_directions(space, {"odd": direction(space, (torch.arange(12) % 2).float())})
    beta = sample(space, [0])[0]
    assert torch.equal(edit(space, beta, {"odd": 0}), beta)
    lora = edited_lora(space, beta, {"odd": 1.0}, rank=4)
    assert all(layer.rank == 4 for layer in lora.values())
    assert nearest(space, space.coefficients[3:4])[0][0].name == "m3"


# --- inversion (checks 15, 16, 17) --------------------------------------------------------------------------------
def denoiser(unet):
    return Denoiser.from_diffusers(unet, build_models().scheduler)


def test_inversion_is_the_published_loop(space, unet):
    """Five Adam steps against a plain loop: beta = 0, uniform t, masked MSE over all elements, one level a step."""
    g = torch.Generator().manual_seed(1)
    latents, text = torch.randn(1, 4, 8, 8, generator=g), torch.randn(1, 5, 12, generator=g)
    mask = (torch.rand(1, 1, 8, 8, generator=g) > 0.4).float()
    config = InvertConfig(components=20, steps=5, lr=0.1, seed=3, check_every=5)
    found = invert(denoiser(unet), space, latents, Condition(text), config, mask)

    beta = torch.zeros(20, requires_grad=True)
    adam = torch.optim.Adam([beta], 0.1, weight_decay=1e-10)
    abar, draw = build_models().scheduler.alphas_cumprod, torch.Generator().manual_seed(3)
    for _ in range(5):
        noise = torch.randn(1, 4, 8, 8, generator=draw)
        t = torch.randint(0, 1000, (1,), generator=draw)
        theta = (beta @ space.components[:20]) * space.scale + space.mean
        with BatchedLora(unet, space.manifest, theta[None]):
            x = abar[t].sqrt() * latents + (1 - abar[t]).sqrt() * noise
            loss = torch.nn.functional.mse_loss(mask * unet(x, t, text).sample, mask * noise)
        adam.zero_grad()
        loss.backward()
        adam.step()
    torch.testing.assert_close(found.coefficients[0, :20], beta.detach(), atol=1e-4, rtol=0)
    assert torch.equal(found.coefficients[0, 20:], torch.zeros(space.dimension - 20))


def test_pictures_of_a_batch_do_not_see_each_other(space, unet):
    latents, text = torch.randn(3, 4, 8, 8), torch.randn(1, 5, 12)
    config = InvertConfig(components=20, steps=6, batch=2)
    together = invert(denoiser(unet), space, latents, Condition(text), config).coefficients
    alone = invert(denoiser(unet), space, latents[1:2], Condition(text), config).coefficients
    torch.testing.assert_close(together[1:2], alone, atol=1e-4, rtol=1e-3)


def test_inversion_lowers_the_loss_and_keeps_the_best(space, unet):
    config = InvertConfig(steps=40, batch=4, lr=1.0, antithetic=True, check_every=10)
    found = invert(denoiser(unet), space, torch.randn(1, 4, 8, 8), Condition(torch.randn(1, 5, 12)), config)
    losses = [row[0] for _, row in found.losses]
    assert min(losses) < losses[0] and len(losses) == 4
    assert found.steps == 40 and not found.interrupted


def test_an_interruption_keeps_the_best_so_far(space, unet):
    class InterruptProcessingException(Exception):
        """Named as ComfyUI's own."""

    def stop(step, total, preview=None):
        if step == 7:
            raise InterruptProcessingException

    args = (denoiser(unet), space, torch.randn(1, 4, 8, 8), Condition(torch.randn(1, 5, 12)))
    found = invert(*args, InvertConfig(steps=100), progress=stop)
    assert found.interrupted and found.steps == 7 and found.coefficients.abs().max() > 0
    assert not any(m._forward_hooks for m in unet.modules())

    def break_down(step, total, preview=None):
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        invert(*args, InvertConfig(steps=5), progress=break_down)


def test_masks(space, unet):
    eight_bit = torch.randint(0, 2, (1, 32, 32)).float() * 255
    small = latent_mask(eight_bit / 255, 8, 8)
    assert small.shape == (1, 1, 8, 8) and small.min() >= 0 and small.max() <= 1
    tall = torch.zeros(1, 48, 32)
    tall[:, :24] = 1
    # aligned with its picture, not squashed to a square
    assert torch.equal(latent_mask(tall, 12, 8)[0, 0, :, 0], torch.tensor([1.0] * 6 + [0.0] * 6))
    args = (denoiser(unet), space, torch.randn(1, 4, 8, 8), Condition(torch.randn(1, 5, 12)), InvertConfig(steps=1))
    for bad, told in ((eight_bit[None, :, :8, :8], "0 .. 1"), (torch.ones(1, 1, 4, 4), "mask"),
                      (torch.zeros(1, 1, 8, 8), "empty")):  # fmt: skip
        with pytest.raises(VitrineError, match=told):
            invert(*args, bad)


def test_coefficients_pass_32_where_bfloat16_stalls():
    """Check 17: unit gradients, lr 0.1, 800 steps: 80 in float32, 32 in bfloat16 (state of the published code)."""
    ends = {}
    for dtype in (torch.float32, torch.bfloat16):
        beta = torch.zeros(1, dtype=dtype, requires_grad=True)
        adam = torch.optim.Adam([beta], 0.1)
        for _ in range(800):
            beta.grad = torch.full_like(beta, -1.0)
            adam.step()
        ends[dtype] = float(beta.detach())
    assert ends[torch.bfloat16] == 32 and abs(ends[torch.float32] - 80) < 0.1


def test_presets_are_the_papers():
    assert (preset("photo").components, preset("photo").lr, preset("photo").steps) == (10_000, 0.1, 400)
    odd = preset("out_of_distribution")
    assert (odd.components, odd.lr, odd.weight_decay, odd.steps) == (1_000, 1.0, 0.0, 800)
    with pytest.raises(VitrineError, match="preset"):
        preset("best")


# --- files --------------------------------------------------------------------------------------------------------
def test_models_as_files(space, tmp_path):
    model = W2WModel(sample(space, [1, 2]), space.identity, ({"sample": {"seeds": [1, 2]}},))
    path = model.told(edit(space, model.coefficients, {"odd": 1.0}), edit={"odd": 1.0}).save(tmp_path / "m.safetensors")
    back = W2WModel.load(path)
    assert len(back) == 2 and back.history[1]["edit"] == {"odd": 1.0} and len(back[1]) == 1
    assert back.belongs(space) is back
    with pytest.raises(VitrineError, match="space"):
        back.belongs(space.first(5))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(VitrineError, match=r"m\.safetensors"):
        W2WModel.load(path)


def test_labels_from_text_and_csv(space, tmp_path):
    y = parse_labels("m0* 1\nm1*, 0\nm05: 3", space.names)
    assert y[0] == 1 and y[12] == 0 and y[5] == 3 and bool(y[40].isnan())
    with pytest.raises(VitrineError, match="label line"):
        parse_labels("nobody 1", space.names)
    table = tmp_path / "labels.csv"
    table.write_text("name,beard,age\nm00,1,30\nm01.safetensors,0,\n")
    found = read_table(table, space.names)
    assert found["beard"][0] == 1 and found["age"][0] == 30 and bool(found["age"][1].isnan())
    table.write_text("name,beard\nsomebody,1\n")
    with pytest.raises(VitrineError, match="somebody"):
        read_table(table, space.names)


def official_files(space, folder, negative=3):
    """What the published folder holds, from a space of ours."""
    std = space.scale.clone()
    std[:negative] *= -1
    dims = {}
    for layer in space.manifest:
        for role, shape in (("A", layer.down), ("B", layer.up)):
            key = f"base_model.model.{layer.path}.lora_{role}.weight"
            dims[key] = [torch.Size([math.prod(shape)]), torch.Size(shape)]
    basis = space.components.clone()
    basis[:, :negative] *= -1
    torch.save(space.mean, folder / "mean.pt")
    torch.save(std, folder / "std.pt")
    torch.save(basis.T.contiguous(), folder / "V.pt")
    torch.save(dims, folder / "weight_dimensions.pt")
    torch.save(space.coefficients[:, :20].clone(), folder / "proj_1000pc.pt")


def test_import_of_the_published_files(space, tmp_path):
    official_files(space, tmp_path)
    found = import_official(tmp_path, 20)
    beta = sample(space, [1], SampleConfig(components=20))[0, :20]
    torch.testing.assert_close(found.decode(beta), space.decode(beta), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.encode(space.decode(beta)), beta, atol=1e-3, rtol=0)
    torch.testing.assert_close(found.deviations, space.deviations[:20], atol=1e-4, rtol=1e-3)
    assert "3 negative" in found.info["note"] and found.count == N
    wide = import_official(tmp_path, None)
    assert wide.dimension == space.dimension and len(wide.coefficients) == 0
    assert [layer.offset for layer in found.manifest] == [layer.offset for layer in space.manifest]


def test_pickles_are_never_opened(space, tmp_path):
    official_files(space, tmp_path)

    class Evil:
        def __reduce__(self):
            return (print, ("unpickled!",))

    torch.save({"weights": Evil()}, tmp_path / "mean.pt")
    with pytest.raises(VitrineError, match=r"mean\.pt"):
        import_official(tmp_path)
    (tmp_path / "mean.pt").unlink()
    with pytest.raises(VitrineError, match="without"):
        import_official(tmp_path)
