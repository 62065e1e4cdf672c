"""A UNet's inner convolutions spread over a larger picture: which, how far, and that nothing of it stays."""

import json
from pathlib import Path

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines import ResolutionTransferPipeline
from vitrine.engine.portraits import load_portraits
from vitrine.engine.resolution import ResolutionTransferConfig, apply, facts_of, plan_transfer, transferred_copy
from vitrine.engine.resolution.receptive import MEASURED, Spread, inner_convolutions, steps_of
from vitrine_tests import models
from vitrine_tests.lanes import nightly_but
from vitrine_tests.machine import stock


@pytest.fixture
def pipe():
    made = load_portraits().pipeline()
    made.set_progress_bar_config(disable=True)
    return made


def config(size, **more):
    return ResolutionTransferConfig(size, (64, 64), receptive_field="dilate", **more)


def drawn(pipe, **more):
    how = {"num_inference_steps": 2, "output_type": "latent", "generator": torch.manual_seed(3)}
    return pipe("a smiling pale face", **how | more).images


def settings(net):
    return [
        (m.dilation, m.padding, m._reversed_padding_repeated_twice)
        for m in net.modules()
        if isinstance(m, torch.nn.Conv2d)
    ]


@pytest.mark.parametrize(
    ("scales", "step"),
    [((2.0, 2.0), (2, 2)), ((3.0, 1.0), (3, 1)), ((1.5, 1.49), (2, 1)), ((2.5, 0.5), (3, 1)), ((1.0, 1.25), (1, 1))],
)
def test_the_step_is_the_nearest_whole_scale_of_each_axis(scales, step):
    assert steps_of(scales) == step


def test_every_level_but_the_outermost(pipe):
    paths = inner_convolutions(pipe.unet)
    heads = {path.split(".")[0] + "." + path.split(".")[1] for path in paths if "mid" not in path}
    assert heads == {"down_blocks.1", "up_blocks.0"} and any(p.startswith("mid_block") for p in paths)
    assert "up_blocks.0.upsamplers.0.conv" in paths and not any("downsamplers" in path for path in paths)


def test_a_spread_convolution_is_the_same_one_on_every_second_cell():
    """On a picture enlarged by repetition it gives what the convolution gives on the small one, repeated."""
    conv = models.seeded(torch.nn.Conv2d, {"in_channels": 3, "out_channels": 5, "kernel_size": 3, "padding": 1}, 1)
    net = torch.nn.Module()
    net.down_blocks, net.mid_block, net.up_blocks = torch.nn.ModuleList([torch.nn.Identity(), conv]), None, []
    small = torch.randn(1, 3, 6, 5, generator=torch.manual_seed(0))
    large = small.repeat_interleave(2, -2).repeat_interleave(3, -1)
    with torch.no_grad():
        wanted = conv(small).repeat_interleave(2, -2).repeat_interleave(3, -1)
        assert not torch.allclose(conv(large), wanted)
        with Spread(net, (2, 3)):
            torch.testing.assert_close(conv(large), wanted, rtol=1e-6, atol=1e-6)
        assert torch.equal(conv(small).repeat_interleave(2, -2).repeat_interleave(3, -1), wanted)


def test_circular_padding_grows_with_it():
    conv = torch.nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular")
    net = torch.nn.Module()
    net.down_blocks, net.mid_block, net.up_blocks = torch.nn.ModuleList([torch.nn.Identity(), conv]), None, []
    with torch.no_grad(), Spread(net, (2, 3)):
        assert conv(torch.zeros(1, 1, 8, 9)).shape == (1, 1, 8, 9)
    assert conv(torch.zeros(1, 1, 8, 9)).shape == (1, 1, 8, 9)


def test_off_is_identity_and_leaving_restores(pipe):
    before, size = drawn(pipe), settings(pipe.unet)
    assert torch.equal(drawn(ResolutionTransferPipeline.from_pipe(pipe, config((64, 64)))), before), "64 px bit for bit"
    wide = drawn(ResolutionTransferPipeline.from_pipe(pipe, ResolutionTransferConfig((128, 96), (64, 64))))
    spread = drawn(ResolutionTransferPipeline.from_pipe(pipe, config((128, 96))))
    assert spread.shape == wide.shape and not torch.allclose(spread, wide)
    with pytest.raises(RuntimeError, match="stop"), apply(pipe, config((128, 128))):
        assert settings(pipe.unet) != size
        raise RuntimeError("stop")
    assert settings(pipe.unet) == size and torch.equal(drawn(pipe), before)


def test_a_copy_has_convolutions_of_its_own(pipe):
    before, size = drawn(pipe), settings(pipe.unet)
    moved, plan = transferred_copy(pipe, config((128, 192)))
    assert plan.step == (3, 2) and settings(pipe.unet) == size and torch.equal(drawn(pipe), before)
    wanted = drawn(ResolutionTransferPipeline.from_pipe(pipe, config((128, 192))))
    assert torch.equal(drawn(moved, height=192, width=128), wanted)
    ours, theirs = (dict(p.unet.named_parameters()) for p in (moved, pipe))
    assert all(ours[name] is theirs[name] for name in theirs), "weights are shared"
    with pytest.raises(VitrineError, match="already"):
        apply(moved, config((128, 128)))


def test_a_plan_without_a_schedule_still_counts_as_moved(pipe):
    with apply(pipe, config((128, 128), schedule="none")) as applied:
        assert applied.plan.step == (2, 2)
        with pytest.raises(VitrineError, match="already"):
            apply(pipe, config((128, 128)))


def test_a_convolutional_lora_is_spread_with_its_layer(pipe):
    from peft import LoraConfig

    pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["conv1"], init_lora_weights=False))
    paths = inner_convolutions(pipe.unet)
    assert any("base_layer" in p for p in paths) and any("lora_A" in p for p in paths)
    assert bool(torch.isfinite(drawn(ResolutionTransferPipeline.from_pipe(pipe, config((128, 128))))).all())


@pytest.mark.parametrize("make", nightly_but([stock.sd, stock.sdxl], [stock.sd]))
def test_stock_unets(make):
    pipe = make()
    pipe.set_progress_bar_config(disable=True)
    width, height = facts_of(pipe).train_size
    told = ResolutionTransferConfig((2 * width, 2 * height), receptive_field="dilate")
    plain = ResolutionTransferConfig((2 * width, 2 * height))
    ours, theirs = (drawn(ResolutionTransferPipeline.from_pipe(pipe, c)) for c in (told, plain))
    assert ours.shape == theirs.shape and bool(torch.isfinite(ours).all())
    assert float((ours - theirs).abs().max()) > 1e-3 * float(theirs.abs().max())


@pytest.mark.parametrize(("size", "step"), [(128, (2, 2)), (112, (2, 2)), (108, (1, 1)), (64, (1, 1)), (32, (1, 1))])
def test_auto_spreads_from_1_75_times_the_side_on(pipe, size, step):
    planned = plan_transfer(facts_of(pipe), ResolutionTransferConfig((size, size), receptive_field="auto"))
    assert planned.step == step
    assert ("none turns this off" in planned.summary) is (step != (1, 1))
    assert ("measured on the shipped portraits" in planned.summary) is (step != (1, 1))


def test_auto_leaves_a_transformer_alone():
    config = ResolutionTransferConfig((256, 256), (128, 128), receptive_field="auto")
    assert plan_transfer(facts_of(stock.pixart()), config).step == (1, 1)


def test_what_the_report_says_was_measured():
    path = Path(__file__).parents[3] / "results" / "resolution.receptive.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = {arm: (shown, heads) for arm, shown, heads, *_ in result["tables"][0]["rows"]}
    shown, heads = zip(rows["untouched"], rows["dilate"], strict=True)
    assert MEASURED["heads"] == tuple(round(x, 1) for x in heads)
    assert MEASURED["attributes"] == tuple(round(x, 2) for x in shown) and result["verdict"] == "pass"


def test_the_report_says_it(pipe):
    facts = facts_of(pipe)
    spread, plain, near = (
        plan_transfer(facts, c) for c in (config((128, 192)), ResolutionTransferConfig((128, 128)), config((72, 72)))
    )
    assert "taps of the inner convolutions 3 x 2 cells" in spread.lines[-2]
    assert "draws objects only once" in spread.lines[0]
    assert plain.lines[-1].endswith("receptive_field dilate prevents them") and "once" not in plain.lines[0]
    assert near.step == (1, 1) and "neither side is 1.5 times" in near.lines[-1]


def test_refusals():
    with pytest.raises(VitrineError, match="receptive_field"):
        ResolutionTransferConfig((128, 128), receptive_field="shrink")
    facts = facts_of(stock.pixart())
    with pytest.raises(VitrineError, match="sees the whole picture"):
        plan_transfer(facts, ResolutionTransferConfig((256, 256), (128, 128), receptive_field="dilate"))
