"""Building a space from a folder of LoRAs: bad files, the gauge test, both modes, folders larger than memory."""

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode
from vitrine.engine.errors import VitrineError
from vitrine.engine.io.lora_writing import kohya
from vitrine.engine.portraits.shipped import PEOPLE_LORAS
from vitrine.engine.w2w import (
    BuildConfig,
    DeltaSpace,
    LoraLayer,
    WeightSpace,
    build_space,
    gauge_test,
    load_space,
    read_lora,
    write_lora,
)
from vitrine.engine.w2w.loras.low_rank import refactor
from vitrine.engine.w2w.space.factor_stacks import Stack, gram
from vitrine_tests.engine.small_loras import SHAPES, Held, deltas, lora, same

pytestmark = pytest.mark.rounding


# --- bad files ----------------------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path):
    for i in range(6):
        write_lora(tmp_path / f"good{i}.safetensors", lora(i, start=7))
    return tmp_path


def test_bad_files_are_named_with_a_remedy_and_the_rest_is_used(folder):
    wide = {p: (h, w * 2) for p, (h, w) in SHAPES.items()}
    write_lora(folder / "other_base.safetensors", lora(1, shapes=wide))
    write_lora(folder / "flux.safetensors", lora(1, shapes={"double_blocks.0.img_attn.qkv": (48, 16)}))
    whole = (folder / "good0.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(whole[:-40])
    (folder / "noise.safetensors").write_bytes(b"\x00" * 100)
    spoilt = lora(3, start=7)
    next(iter(spoilt.values())).up[0, 0] = float("nan")
    save_file(kohya(spoilt), folder / "nan.safetensors")
    save_file({"lora_unet_mid_block_attentions_0_proj_in.hada_w1_a": torch.ones(2, 2)}, folder / "loha.safetensors")
    half = kohya(lora(1))
    half.pop(next(k for k in half if "up" in k))
    save_file(half, folder / "half.safetensors")
    torch.save({"a": 1}, folder / "pickle.pt")
    text = {"lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": torch.ones(1, 4)}
    save_file(text, folder / "text.safetensors")
    built = build_space(folder)
    assert built.space.count == 6 and len(built.space.names) == 6
    problems = {b.name.split(".")[0]: b.problem for b in built.folder.bad}
    wanted = {
        "other_base": "another base",
        "flux": "another base",
        "cut": "download it again",
        "nan": "NaN",
        "noise": "download it again",
        "loha": "LoHa",
        "half": "two factors",
        "pickle": "convert it once",
        "text": "without UNet layers",
    }
    assert problems.keys() == wanted.keys()
    for name, word in wanted.items():
        assert word in problems[name], name
        assert f"left out {name}" in built.summary()


def test_report_says_what_was_found(tmp_path):
    write_lora(tmp_path / "a.safetensors", lora(1, rank=2))
    write_lora(tmp_path / "b.safetensors", lora(2, rank=4, alpha=4.0), "diffusers")
    missing = dict(list(lora(3, rank=2).items())[:2])
    write_lora(tmp_path / "c.safetensors", missing)
    built = build_space(tmp_path)
    text = built.summary()
    for word in (
        "3 LoRAs",
        "2 kohya",
        "1 diffusers",
        "3 layers",
        "ranks 2, 4",
        "alphas 27",
        "lack some",
        "no alpha",
        "mode delta: b has rank 4, a rank 2",
    ):
        assert word in text, word
    with pytest.raises(VitrineError, match="use delta or auto"):
        build_space(tmp_path, BuildConfig("factors"))


def test_too_few_files(tmp_path):
    write_lora(tmp_path / "a.safetensors", lora(1))
    with pytest.raises(VitrineError, match="two or more"):
        build_space(tmp_path)
    with pytest.raises(VitrineError, match="existing folder"):
        build_space(tmp_path / "none")


# --- gauge --------------------------------------------------------------------------------------------------------
def twisted(x, seed, how):
    """The same LoRA in another gauge, for half of the models."""
    if seed % 2:
        return x
    factor = -1.0 if how == "sign" else 30.0
    return {p: LoraLayer(v.down * factor, v.up / factor, v.alpha) for p, v in x.items()}


def test_gauge():
    shared = [lora(i, start=7) for i in range(20)]
    assert gauge_test(shared).shared and gauge_test(shared).cosine > 0.9
    apart = gauge_test([lora(i) for i in range(20)])
    assert not apart.shared and abs(apart.cosine) < 0.15 and "start differently" in apart.reason()
    assert not gauge_test([twisted(x, i, "sign") for i, x in enumerate(shared)]).shared
    scaled = gauge_test([twisted(x, i, "scale") for i, x in enumerate(shared)])
    assert not scaled.shared and "scaled differently" in scaled.reason()
    flipped = gauge_test([twisted(x, i, "sign") for i, x in enumerate(shared)])
    assert "start differently" in flipped.reason()


def test_the_shipped_people_have_one_start_as_their_card_says():
    """They were trained at a high rate, so that their factors are far from it; that is no other start."""
    people = gauge_test([read_lora(file) for file in sorted(PEOPLE_LORAS.glob("*.safetensors"))])
    assert not people.shared and people.low > 0 and "from one start" in people.reason()


@pytest.mark.parametrize("how", ["sign", "scale"])
def test_delta_mode_does_not_see_the_gauge(how, tmp_path):
    plain = [lora(i, start=7) for i in range(12)]
    other = [twisted(x, i, how) for i, x in enumerate(plain)]
    a, b = DeltaSpace.of(plain), DeltaSpace.of(other)
    assert torch.allclose(a.singular_values, b.singular_values, rtol=1e-6)
    assert torch.allclose(a.coefficients, b.coefficients, atol=1e-6 * float(a.singular_values[0]))
    for i, x in enumerate(other):
        write_lora(tmp_path / f"{i:02}.safetensors", x)
    assert build_space(tmp_path).space.mode == "delta"
    forced = build_space(tmp_path, BuildConfig("factors"))
    assert forced.space.mode == "factors" and "build it again with mode delta" in forced.summary()


def test_auto_takes_factors_for_one_start(folder):
    built = build_space(folder, BuildConfig(base="tiny"))
    assert built.space.mode == "factors" and "comparable" in built.reason and built.space.info["base"] == "tiny"
    for name, row in zip(built.space.names, built.space.coefficients, strict=True):
        wanted = read_lora(folder / f"{name}.safetensors")
        assert same(deltas(built.space.lora(row)), deltas(wanted), 1e-5)
    path = built.space.save(folder.parent / "space.w2w.safetensors")
    assert isinstance(load_space(path), WeightSpace)


# --- delta --------------------------------------------------------------------------------------------------------
MIXED = [lora(i, rank=r, alpha=a) for i, (r, a) in enumerate([(1, 27.0), (2, 1.0), (4, 4.0), (8, 16.0), (2, 2.0)])]


def stacked(loras):
    """(N, all numbers of all products), formed; missing layers are zero."""
    return torch.stack(
        [
            torch.cat([(x[p].delta() if p in x else torch.zeros(s)).reshape(-1) for p, s in SHAPES.items()])
            for x in loras
        ]
    ).double()


@pytest.mark.parametrize("memory", [1, 10_000, 2**31])
def test_gram_equals_the_formed_products(memory):
    loras = [*MIXED, dict(list(MIXED[0].items())[:1])]
    explicit = stacked([{p: LoraLayer(v.down.double(), v.up.double(), v.alpha) for p, v in x.items()} for x in loras])
    stacks = {
        p: Stack.of(p, [{q: LoraLayer(v.down.double(), v.up.double(), v.alpha) for q, v in x.items()} for x in loras])
        for p in SHAPES
    }
    found = gram(stacks, memory=memory)
    assert (found - explicit @ explicit.T).norm() / found.norm() < 1e-10


def test_products_of_many_factors_stay_within_the_memory_and_are_made_once():
    """12 LoRAs of rank 64: the products of all pairs of factors at once would take 4.7 MB, thrice."""
    random, rank, count, side = torch.Generator().manual_seed(0), 64, 12, 96
    loras = [
        {"a.to_q": LoraLayer(torch.randn(rank, side, generator=random), torch.randn(side, rank, generator=random), 1.0)}
        for _ in range(count)
    ]
    stacks = {"a.to_q": Stack.of("a.to_q", loras)}
    budget, factors = 2**20, rank * count
    with Held() as held, FlopCounterMode(display=False) as counted:
        products = gram(stacks, memory=budget)
    assert held.most <= 1.5 * budget
    # B^T B' and A A'^T of each pair of factors in one order; blocks on the diagonal in both
    assert counted.get_total_flops() < 0.65 * 2 * factors**2 * 2 * side
    assert torch.allclose(products, gram(stacks), rtol=1e-12)


def test_delta_space_equals_scikit_learn_and_reconstructs_every_model():
    from sklearn.decomposition import PCA

    space = DeltaSpace.of(MIXED)
    formed = stacked(MIXED).numpy()
    reference = PCA(len(MIXED) - 1).fit(formed)
    assert torch.allclose(space.singular_values.double(), torch.from_numpy(reference.singular_values_), rtol=1e-5)
    share = torch.from_numpy(reference.explained_variance_ratio_).float()
    assert torch.allclose(space.explained, share, atol=1e-6)
    for x, row in zip(MIXED, space.coefficients, strict=True):
        assert same(deltas(space.lora(row)), deltas(x), 1e-5)
        assert torch.allclose(space.encode_lora(x), row, atol=1e-4)
    middle = deltas(space.lora(torch.zeros(4)))
    mean = torch.cat([middle[p].reshape(-1) for p in SHAPES])
    assert torch.allclose(mean.double(), torch.from_numpy(reference.mean_), atol=1e-6)


def test_delta_file_and_gradient(tmp_path):
    space = DeltaSpace.of(MIXED, [f"m{i}" for i in range(5)], 3)
    again = load_space(space.save(tmp_path / "d.w2w.safetensors"))
    assert isinstance(again, DeltaSpace) and again.identity == space.identity and again.names == space.names
    beta = torch.ones(3, requires_grad=True)
    sum(v.delta().pow(2).sum() for v in again.stacked(beta).values()).backward()
    assert beta.grad.abs().min() > 0
    assert same(deltas(again.first(2).lora(torch.ones(2))), deltas(space.lora(torch.tensor([1.0, 1.0, 0.0]))), 1e-5)


def test_refactor_is_the_best_low_rank_product():
    layer = next(iter(lora(1, rank=8, shapes={"x": (24, 16)}).values()))
    exact = refactor(layer)
    assert exact.rank == 8 and torch.allclose(exact.delta(), layer.delta(), atol=1e-5) and exact.scale == 1
    u, s, v = torch.linalg.svd(layer.delta())
    assert torch.allclose(refactor(layer, 3).delta(), u[:, :3] * s[:3] @ v[:3], atol=1e-5)
    conv = LoraLayer(torch.randn(2, 4, 3, 3), torch.randn(5, 2, 1, 1), 2.0)
    assert refactor(conv).delta().shape == (5, 4, 3, 3)
    assert torch.allclose(refactor(conv).delta(), conv.delta(), atol=1e-5)


# --- large folders ------------------------------------------------------------------------------------------------
def test_a_folder_larger_than_memory_goes_through_a_file(folder, tmp_path_factory):
    spoilt = lora(3, start=7)
    next(iter(spoilt.values())).up[0, 0] = float("inf")
    save_file(kohya(spoilt), folder / "good2b.safetensors")
    small = BuildConfig(memory=2**20)
    big = {p: (800, 800) for p in SHAPES}
    wide = tmp_path_factory.mktemp("wide")
    for i in range(40):
        x = lora(i, shapes=big, start=7)
        if i == 11:
            next(iter(x.values())).down[0, 0] = float("nan")
        save_file(kohya(x), wide / f"{i:02}.safetensors")
    with pytest.raises(VitrineError, match="work folder"):
        build_space(wide, small)
    work = tmp_path_factory.mktemp("work")
    slow = build_space(wide, small, work=work)
    fast = build_space(wide)
    assert torch.allclose(slow.space.singular_values, fast.space.singular_values, rtol=1e-6)
    assert slow.space.count == 39 and "NaN" in slow.summary() and "11" not in slow.space.names
    again = build_space(wide, small, work=work)
    assert torch.allclose(again.space.components, fast.space.components, atol=1e-6), "from the work folder alone"
    with pytest.raises(VitrineError, match="begun with other LoRAs"):
        (wide / "00.safetensors").unlink()
        build_space(wide, small, work=work)
