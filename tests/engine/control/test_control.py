"""Control conditioning: the curve, controls, embedder, guidance, padding, files and the cross-size meter."""

import json
import math

import pytest
import torch
from diffusers import DDIMScheduler
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from vitrine.engine.control import (
    DRAWN,
    ControlEmbedder,
    ControlField,
    ControlMetadata,
    ControlSpec,
    ControlWarning,
    GammaConfig,
    GuidanceConfig,
    PaddingConfig,
    control_guidance,
    gamma,
    half_weight_time,
    load_control,
    pad_text,
    save_control,
    trained_settings,
)
from vitrine.engine.control.embedder import embedder_shapes
from vitrine.engine.diffusion.guidance import scale_for_size
from vitrine.engine.diffusion.schedule import NoiseSchedule
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits.shipped import transformer_folder

pytestmark = pytest.mark.rounding
TABLE = {  # u = 0, .1, .25, .5, .75, .9, 1
    ("power_cos", 1): (1, 0.9755, 0.8536, 0.5, 0.1464, 0.0245, 0),
    ("power_cos", 2): (1, 0.9135, 0.5975, 0.1464, 0.0096, 0.0002, 0),
    ("power_cos", 4): (1, 0.7355, 0.2273, 0.0096, 0, 0, 0),
    ("power_cos", 8): (1, 0.3916, 0.0245, 0, 0, 0, 0),
    ("cos_pow", 2): (1, 0.9517, 0.7286, 0.25, 0.0214, 0.0006, 0),
    ("cos_pow", 4): (1, 0.9056, 0.5308, 0.0625, 0.0005, 0, 0),
}
U = torch.tensor([0, 0.1, 0.25, 0.5, 0.75, 0.9, 1], dtype=torch.float64)
VALUES = {"flip": [0, 1], "crop_top": [0.1, 0.4], "crop_left": 0.2, "aspect": [1.0, 1.5], "height": 512, "width": 300}


# --- check 1 and 2: the curve ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("key", TABLE)
def test_gamma_has_the_tables_values(key):
    form, alpha = key
    found = gamma(U, form, alpha)
    assert found.dtype == torch.float64
    assert torch.allclose(found, torch.tensor(TABLE[key], dtype=torch.float64), atol=1e-4)
    assert gamma(0.25, form, alpha) == float(found[2]) and isinstance(gamma(0.25, form, alpha), float)


@pytest.mark.parametrize("form", ["power_cos", "cos_pow", "linear", "step", "constant"])
@pytest.mark.parametrize("alpha", [0.5, 1.0, 3.0])
def test_gamma_falls_from_one_to_zero(form, alpha):
    u = torch.linspace(0, 1, 1001, dtype=torch.float64)
    found = gamma(u, form, alpha)
    assert found[0] == 1 and (found[-1] == 1 if form == "constant" else found[-1] == 0)
    assert bool((found.diff() <= 1e-15).all()) and bool(((found >= 0) & (found <= 1)).all())


def test_a_drawn_curve_goes_through_its_points():
    drawn = GammaConfig(DRAWN, points="0.5:0.2; 1:1, 0.25:0")
    u = torch.tensor([1.0, 0.8, 0.75, 0.625, 0.5, 0.25, 0.0])
    assert torch.allclose(drawn.weight(u), torch.tensor([0, 0, 0, 0.1, 0.2, 0.6, 1.0], dtype=torch.float64))
    line, straight = GammaConfig(DRAWN, points="0:0, 1:1"), GammaConfig("linear")
    t = torch.linspace(0, 1000, 41)
    assert torch.allclose(line.at(t), straight.at(t), atol=1e-15, rtol=0)
    for config in (drawn, GammaConfig("cos_pow", 3.0), GammaConfig(clock="paper_sigma")):
        assert [config.number(x) for x in t.tolist()] == config.at(t).tolist()
    assert GammaConfig.from_dict(drawn.to_dict()) == drawn and "points" not in straight.to_dict()


@pytest.mark.parametrize("text", ["0:0, 0:1", "0:0, 2:1", "a:b", "0.5", "0:0:0", "nan:0", " , "])
def test_no_curve_is_refused(text):
    with pytest.raises(VitrineError, match="points: given"):
        GammaConfig(DRAWN, points=text)


def test_points_belong_to_the_drawn_form():
    for settings in ({"form": DRAWN}, {"points": "0:0"}):
        with pytest.raises(VitrineError, match="points with drawn"):
            GammaConfig(**settings)


def test_both_cosines_meet_at_alpha_one_and_the_half_weight_time_is_known():
    u = torch.linspace(0, 1, 1001, dtype=torch.float64)
    assert float((gamma(u, "power_cos", 1) - gamma(u, "cos_pow", 1)).abs().max()) < 1e-12
    for alpha, printed in ((1, 0.5), (2, 0.2929), (4, 0.1591), (8, 0.0830)):
        assert abs(half_weight_time(alpha) - printed) < 1e-4
        assert abs(gamma(half_weight_time(alpha), "power_cos", alpha) - 0.5) < 1e-9
    steps = torch.arange(20, dtype=torch.float64) / 20
    assert [int((gamma(steps, "power_cos", a) > 0.5).sum()) for a in (1, 2, 4, 8)] == [10, 6, 4, 2]


@pytest.mark.parametrize("count", [5, 20, 50])
def test_the_weight_rises_along_a_sampler(count):
    scheduler = DDIMScheduler(beta_schedule="scaled_linear", timestep_spacing="trailing")
    scheduler.set_timesteps(count)
    trace = GammaConfig().at(scheduler.timesteps)
    assert trace[0] < 1e-5 and bool((trace.diff() >= 0).all())
    assert GammaConfig().at(0.0) == 1 and GammaConfig().at(20.0) > 0.99
    if count >= 20:
        assert trace[-1] > 0.99


def test_the_papers_clock_reads_flow_times_by_their_sigma():
    table = NoiseSchedule.scaled_linear()
    config = GammaConfig(clock="paper_sigma")
    for t in (3, 100, 500, 998):
        sigma = float(table.sigma(t))
        assert float(config.u(1000 * sigma / (1 + sigma))) == t / 1000
    assert float(config.u(0.0)) == 0 and float(config.u(1000.0)) == 0.999
    assert GammaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_bad_curves_are_refused():
    for how in ({"alpha": 0}, {"alpha": math.nan}, {"form": "cos"}, {"step_at": 1}, {"clock": "steps"}, {"steps": 0}):
        with pytest.raises(VitrineError, match="accepted"):
            GammaConfig(**how)
    with pytest.raises(VitrineError, match="in \\[0, 1\\]"):
        GammaConfig().at(1001.0)


# --- controls and embedder ------------------------------------------------------------------------------------------
def test_controls_are_checked_and_ordered():
    spec = ControlSpec()
    assert spec.names == ("flip", "crop_top", "crop_left", "aspect", "height", "width")
    assert spec.columns("low") == [4, 5] and ControlSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    rows = spec.rows(VALUES)
    assert rows.shape == (2, 6) and rows[1].tolist() == [1, 0.4, 0.2, 1.5, 512, 300]
    coded = spec.encode(rows)
    assert coded[1, 3] == 1000 * math.log(1.5) and coded[1, 4] == 512 and coded[1, 1] == 400
    assert spec.rows(spec.reference()).shape == (1, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"height": 0}, "height"),
        ({"width": math.nan}, "width"),
        ({"aspect": 0}, "ratio above 0"),
        ({"flip": 0.5}, "0 or 1"),
        ({"crop_top": 1.5}, "0 to 1"),
        ({"colour": 1}, "unknown"),
        ({"flip": [0, 1, 0]}, "one length"),
    ],
)
def test_bad_controls_are_refused(change, message):
    with pytest.raises(VitrineError, match=message):
        ControlSpec().rows(VALUES | change)


def test_missing_controls_and_bad_fields_are_refused():
    with pytest.raises(VitrineError, match="missing"):
        ControlSpec().rows({k: v for k, v in VALUES.items() if k != "aspect"})
    for how in (("size", "middle"), ("size", "low", "pixels"), ("size", "low", "scalar", 0.0), ("", "low")):
        with pytest.raises(VitrineError):
            ControlField(*how)
    with pytest.raises(VitrineError, match="each name once"):
        ControlSpec((ControlField("a", "low"), ControlField("a", "high")))


def embedder(dim=16, **how):
    torch.manual_seed(1)
    return ControlEmbedder(ControlSpec(), dim, **how)


def test_shapes_are_known_without_the_embedder():
    for spec in (ControlSpec(), ControlSpec(ControlSpec().fields[:1])):
        made = ControlEmbedder(spec, 16).state_dict()
        assert embedder_shapes(spec, 16) == {name: tuple(value.shape) for name, value in made.items()}


def test_the_embedder_is_equation_one():
    net, rows, u = embedder(), ControlSpec().rows(VALUES), torch.tensor([0.3, 1.0], dtype=torch.float64)
    high, low = net.terms(rows)
    found = net(rows, u, GammaConfig(alpha=2.0))
    assert torch.allclose(found[0], high[0] + gamma(0.3, alpha=2.0) * low[0], atol=1e-7)
    assert torch.equal(found[1], high[1])
    assert sorted(net.state_dict()) == [f"{g}.{i}.{p}" for g in "hl" for i in (0, 2) for p in ("bias", "weight")]
    only_low = ControlEmbedder(ControlSpec((ControlField("height", "low"),)), 8)
    assert only_low.h is None and only_low(torch.tensor([[300.0]]), torch.zeros(1), GammaConfig()).shape == (1, 8)
    with pytest.raises(VitrineError, match="one for each picture"):
        net(rows, torch.zeros(3), GammaConfig())


def test_dropped_rows_are_exactly_zero_and_changing_alpha_moves_only_the_low_part():
    net, rows, u = embedder(), ControlSpec().rows(VALUES), torch.full((2,), 0.4, dtype=torch.float64)
    found = net(rows, u, GammaConfig(), torch.tensor([True, False]))
    assert bool((found[0] == 0).all()) and torch.equal(found[1], net(rows, u, GammaConfig())[1])
    no_low = net(rows, u, GammaConfig(), torch.tensor([[False, True]] * 2))
    assert torch.equal(no_low, net.terms(rows)[0])
    assert bool((embedder(zero_init=True)(rows, u, GammaConfig()) == 0).all())


def test_at_full_noise_the_low_part_gets_no_gradient():
    net, rows = embedder(), ControlSpec().rows(VALUES)
    net(rows, torch.ones(2, dtype=torch.float64), GammaConfig()).square().sum().backward()
    assert all(bool((p.grad == 0).all()) for p in net.l.parameters())
    assert all(bool((p.grad != 0).any()) for p in net.h.parameters())


# --- checks 10 and 11: guidance -------------------------------------------------------------------------------------
class Calls:
    """A predictor over four fixed tensors, with the null-control ones copied where control means nothing."""

    def __init__(self, null_control=False):
        random = torch.Generator().manual_seed(3)
        self.eps = {(c, s): torch.randn(2, 4, 8, 8, generator=random) for c in (True, False) for s in (True, False)}
        if null_control:
            self.eps |= {(True, s): self.eps[False, s] for s in (True, False)}
        self.seen = []

    def __call__(self, control, semantics):
        self.seen.append((control, semantics))
        return self.eps[control, semantics]


def test_equation_two_is_nested_and_regular_dual_guidance():
    scale, beta = 4.0, 1.375
    for nesting, inner in (("control_inner", (False, True)), ("semantic_inner", (True, False))):
        calls = Calls()
        full, mid, none = (calls.eps[k].double() for k in ((True, True), inner, (False, False)))
        found = control_guidance(calls, GuidanceConfig(scale, beta, nesting))
        assert found.evaluations == 3 == len(calls.seen)
        printed = scale * (beta * full + (1 - beta) * mid) + (1 - scale) * none
        nested = none + scale * (mid + beta * (full - mid) - none)
        regular = none + scale * (mid - none) + scale * beta * (full - mid)
        for oracle in (printed, nested, regular):
            assert torch.allclose(found.prediction.double(), oracle, atol=2e-5)


def test_guidance_without_strength_spares_evaluations():
    calls = Calls()
    full, none = calls.eps[True, True], calls.eps[False, False]
    plain = control_guidance(calls, GuidanceConfig())
    assert plain.prediction is full and plain.evaluations == 1
    cfg = control_guidance(calls, GuidanceConfig(scale=5.0))
    assert cfg.evaluations == 2 and torch.allclose(cfg.prediction, none + 5 * (full - none))
    only = control_guidance(calls, GuidanceConfig(size_guidance=2.0))
    assert only.evaluations == 2 and torch.allclose(only.prediction, 2 * full - calls.eps[False, True], atol=1e-6)


@pytest.mark.parametrize("nesting", ["control_inner", "semantic_inner"])
def test_the_skip_rule_changes_no_bit(nesting):
    config = GuidanceConfig(3.7, 1.375, nesting)
    slow = control_guidance(Calls(null_control=True), config, weight=0.0, high_is_null=False)
    quick = control_guidance(Calls(null_control=True), config, weight=torch.zeros(2), high_is_null=True)
    assert (slow.evaluations, quick.evaluations) == (3, 2)
    assert torch.equal(slow.prediction, quick.prediction)
    late = control_guidance(Calls(), config, weight=torch.tensor([0.0, 0.3]), high_is_null=True)
    assert late.evaluations == 3  # one row still has control


def test_equation_four():
    assert scale_for_size(1.5, 2) == 2.0 and scale_for_size(7.5, 1) == 7.5 and scale_for_size(1.0, 4) == 1.0
    for make in (lambda: scale_for_size(2.0, 0), lambda: GuidanceConfig(nesting="x"), lambda: GuidanceConfig(math.inf)):
        with pytest.raises(VitrineError):
            make()


# --- check 15: padding ----------------------------------------------------------------------------------------------
def texts(rows=1, length=20, width=6):
    return torch.randn(rows, length, width, generator=torch.Generator().manual_seed(5))


def test_full_prompts_stay_and_copies_repeat():
    full = texts(length=77)
    for mode in ("zero", "replicate", "noisy_replicate"):
        assert torch.equal(pad_text(full, [77], PaddingConfig(mode, scope="all"))[0], full)
    x, count = texts(), 6
    plain, mask = pad_text(x, [count], PaddingConfig(beta_txt=0.0))
    assert all(torch.equal(plain[0, i], x[0, i % count]) for i in range(20))
    assert bool((mask == 1).all()) and mask.shape == (1, 20)
    zeros = pad_text(x, [count], PaddingConfig("zero"))[0]
    assert torch.equal(zeros[0, :count], x[0, :count]) and bool((zeros[0, count:] == 0).all())
    noisy = pad_text(x, [count])[0]
    assert torch.equal(noisy[0, :count], x[0, :count]) and not torch.equal(noisy[0, count:], plain[0, count:])
    assert not torch.equal(pad_text(x, [count], PaddingConfig(scope="all"))[0][0, :count], x[0, :count])


@pytest.mark.parametrize("count", [2, 5, 10])
def test_the_noise_has_the_papers_deviation(count):
    x, beta, rows = texts(), 0.04, 4000
    config = PaddingConfig(beta_txt=beta, scope="all")
    found = pad_text(x.expand(rows, -1, -1), [count] * rows, config, range(rows))[0]
    plain = pad_text(x, [count], PaddingConfig("replicate"))[0]
    copies = math.ceil(20 / count)
    wanted = math.sqrt(beta * (copies - 1)) * x[0, :count].std(0, correction=0)
    assert torch.allclose((found - plain).std((0, 1)), wanted, rtol=0.02)


def test_padding_does_not_depend_on_the_batch():
    x = texts(3)
    both = pad_text(x, torch.tensor([5, 9, 20]), seeds=[1, 2, 3])[0]
    assert torch.equal(both[1:2], pad_text(x[1:2], [9], seeds=2)[0])
    assert torch.equal(pad_text(x, [4] * 3, seeds=8)[0], pad_text(x, [4] * 3, seeds=8)[0])
    feature = pad_text(x, [5, 9, 20], PaddingConfig(axis="feature"))[0]
    assert not torch.equal(feature, pad_text(x, [5, 9, 20])[0])
    assert bool(torch.isfinite(pad_text(x, [1, 1, 1])[0]).all())
    for bad in ([5, 9], [0, 1, 1], [5, 9, 21]):
        with pytest.raises(VitrineError, match="lengths"):
            pad_text(x, bad)


# --- check 16: files ------------------------------------------------------------------------------------------------
def metadata(**how):
    facts = {
        "base_model": "a/b",
        "base_hash": "00ff",
        "steps": 5,
        "licence": "Apache-2.0",
        "crop": (0.5, 1.0),
        "gamma": GammaConfig(alpha=3.0),
        "padding": PaddingConfig(),
        "schedule": {"T": 1000},
    }
    return ControlMetadata("PixArtTransformer2DModel", 16, **facts | how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_checkpoints_round_trip_to_the_bit(tmp_path, dtype):
    net, extra = embedder().to(dtype), {"lora.x.lora_A.weight": torch.ones(2, 3)}
    path = save_control(tmp_path / "c.safetensors", net.state_dict(), metadata(), extra)
    assert {k.split(".")[0] for k in load_file(path)} == {"ctrl", "lora"}
    loaded = load_control(path)
    assert loaded.metadata == metadata() and loaded.extra.keys() == extra.keys()
    rows, u = ControlSpec().rows(VALUES), torch.tensor([0.2, 0.6], dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(loaded.embedder(rows, u, metadata().gamma), net(rows, u, metadata().gamma))


def test_the_checkpoint_rules_over_widgets(tmp_path, recwarn):
    same = (GammaConfig(alpha=3.0), PaddingConfig())
    assert trained_settings(metadata(), *same) == same
    assert trained_settings(metadata())[0].alpha == 3.0 and not recwarn
    with pytest.warns(ControlWarning, match="'alpha': 1.0"):
        assert trained_settings(metadata(), GammaConfig())[0].alpha == 3.0
    with pytest.warns(ControlWarning, match="padding"):
        trained_settings(metadata(padding=None), None, PaddingConfig())


def test_foreign_and_later_files_are_refused(tmp_path):
    net, path = embedder(), tmp_path / "c.safetensors"
    tensors = {f"ctrl.{k}": v for k, v in net.state_dict().items()}
    text = json.dumps(metadata().to_dict())
    save_file(tensors, path, {"ccs_format": "1.4", "ccs": json.dumps(metadata().to_dict() | {"later": 1})})
    assert load_control(path).metadata == metadata()
    later, bare, empty = {"ccs_format": "2", "ccs": text}, {"ccs_format": "1"}, {"ccs_format": "1", "ccs": "{}"}
    for header in (later, {"ccs": text}, bare, empty):
        save_file(tensors, path, header)
        with pytest.raises(VitrineError, match="ccs"):
            load_control(path)
    save_file({k: v for k, v in tensors.items() if k != "ctrl.l.2.bias"}, path, {"ccs_format": "1", "ccs": text})
    with pytest.raises(VitrineError, match="l.2.bias"):
        load_control(path)
    with pytest.raises(VitrineError, match="base. or lora."):
        save_control(path, net.state_dict(), metadata(), {"odd": torch.ones(1)})


@pytest.mark.parametrize("name", ["constant", "power-cosine", "power-cosine-flips", "power-cosine-128"])
def test_shipped_checkpoints_load(name):
    """Files in the form of the first release: their header is checked key by key."""
    path = transformer_folder(name) / "control.safetensors"
    loaded = load_control(path)
    with safe_open(path, "pt") as file:
        header = file.metadata()
    assert header["ccs_format"] == "1" and loaded.metadata.to_dict() == json.loads(header["ccs"])
    assert loaded.metadata.spec == ControlSpec() and not loaded.extra
    added = loaded.embedder(ControlSpec().rows(ControlSpec().reference()), torch.zeros(1), loaded.metadata.gamma)
    assert added.shape == (1, loaded.metadata.dim) and bool(torch.isfinite(added).all())


def test_damaged_checkpoints_are_refused_by_name(tmp_path):
    shipped = (transformer_folder("constant") / "control.safetensors").read_bytes()
    for content in (shipped[:1000], b"", shipped[:-64]):
        (tmp_path / "cut.safetensors").write_bytes(content)
        with pytest.raises(VitrineError, match="cut.safetensors"):
            load_control(tmp_path / "cut.safetensors")
    with pytest.raises(VitrineError, match="not_there"):
        load_control(tmp_path / "not_there.safetensors")
    with pytest.raises(VitrineError, match="pickles"):
        load_control(tmp_path / "pickle.pt")
    tensors = {f"ctrl.{k}": torch.full_like(v, math.nan) for k, v in embedder().state_dict().items()}
    save_file(tensors, tmp_path / "nan.safetensors", {"ccs_format": "1", "ccs": json.dumps(metadata().to_dict())})
    with pytest.raises(VitrineError, match="NaN"):
        load_control(tmp_path / "nan.safetensors")
