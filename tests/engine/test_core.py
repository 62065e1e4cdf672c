"""Schedule, denoiser, addresses and hooks on real diffusers classes at small size."""

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from vitrine.engine.diffusion.denoiser import Denoiser, check_finite
from vitrine.engine.diffusion.schedule import NoiseSchedule
from vitrine.engine.errors import VitrineError
from vitrine.engine.network.condition import Condition
from vitrine.engine.tracing.addresses import resolve, sites_of
from vitrine.engine.tracing.hooks import capture, edit
from vitrine_tests import models

pytestmark = pytest.mark.rounding
EXTENDED = ("-self-out", "-cross-out", "-ffn-out", "-cross-k", "-cross-v")


def tiny_unet(**changes):
    return models.unet(**{"block_out_channels": (32, 64), "cross_attention_dim": 32, "attention_head_dim": 2} | changes)


def inputs(batch=2, h=16, w=16):
    g = torch.Generator().manual_seed(1)
    return torch.randn(batch, 4, h, w, generator=g), torch.randn(batch, 7, 32, generator=g)


# --- schedule -----------------------------------------------------------------------------------------------------
def test_stable_diffusions_table():
    schedule = NoiseSchedule.scaled_linear()
    assert float(schedule.alpha_bar(50)) == pytest.approx(0.95158, abs=1e-5)  # gdf.md 1.5
    assert float(schedule.sigma(51)) == pytest.approx(0.22815, abs=1e-5)


def test_maps_are_inverse_of_each_other():
    schedule = NoiseSchedule.scaled_linear()
    t = torch.tensor([0.0, 0.25, 50, 499.5, 998.75, 999], dtype=torch.float64)
    assert torch.allclose(schedule.timestep(schedule.sigma(t)), t, atol=1e-8)
    assert torch.allclose(schedule.log_snr(t), -2 * torch.log(schedule.sigma(t)), atol=1e-10)
    flow = NoiseSchedule.flow()
    assert torch.allclose(flow.timestep(flow.sigma(t)), t)


def test_add_noise_agrees_with_diffusers():
    x, noise = torch.randn(3, 4, 8, 8), torch.randn(3, 4, 8, 8)
    t = torch.tensor([0, 50, 999])
    scheduler = DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    ours = NoiseSchedule.from_diffusers(scheduler).add_noise(x, noise, t)
    assert torch.allclose(ours, scheduler.add_noise(x, noise, t), atol=1e-5)
    flow = FlowMatchEulerDiscreteScheduler()
    ours = NoiseSchedule.from_diffusers(flow).add_noise(x, noise, 250)
    assert torch.allclose(ours, 0.75 * x + 0.25 * noise, atol=1e-6)


@pytest.mark.parametrize("t", [-1, 999.5, float("nan")])
def test_times_outside_the_table_are_refused(t):
    with pytest.raises(VitrineError, match="0 <= t <= 999"):
        NoiseSchedule.scaled_linear().sigma(t)


# --- denoiser -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("prediction", ["eps", "v", "x0", "flow"])
def test_every_convention_gives_the_same_eps_and_x0(prediction):
    schedule = NoiseSchedule.flow() if prediction == "flow" else NoiseSchedule.scaled_linear()
    x0, eps = torch.randn(2, 4, 8, 8).double(), torch.randn(2, 4, 8, 8).double()
    signal, noise = schedule.scales(400.0)
    truth = {"eps": eps, "x0": x0, "v": signal * eps - noise * x0, "flow": eps - x0}[prediction]
    denoiser = Denoiser(torch.nn.Identity(), schedule, prediction, lambda x, t, c: truth)
    found = denoiser.predict(denoiser.network_input(x0, eps, 400.0), 400.0, Condition())
    assert torch.allclose(found.eps, eps, atol=1e-12) and torch.allclose(found.x0, x0, atol=1e-12)


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
def test_x0_agrees_with_diffusers_ddim(kind):
    unet, (x, text) = tiny_unet(), inputs()
    settings = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    scheduler = DDIMScheduler(**settings, prediction_type=kind, clip_sample=False)
    denoiser = Denoiser.from_diffusers(unet, scheduler)
    with torch.no_grad():
        ours = denoiser.predict(x, 401, Condition(text)).x0
        output = unet(x, 401, encoder_hidden_states=text).sample
    scheduler.set_timesteps(1000)
    assert torch.allclose(ours, scheduler.step(output, 401, x).pred_original_sample, atol=2e-4)


def test_conditions_batch_take_and_repeat():
    a, b = Condition(torch.zeros(1, 7, 4)), Condition(torch.ones(2, 7, 4))
    both = Condition.batch([a, b])
    assert both.text.shape[0] == 3 and both.repeat(2).text.shape[0] == 6
    assert both.take(torch.tensor([2, 0])).text[:, 0, 0].tolist() == [1, 0]
    assert a.take(torch.tensor([0, 0, 0])).text.shape[0] == 3
    with pytest.raises(VitrineError):
        Condition.batch([a, Condition(torch.zeros(1, 7, 4), torch.zeros(1, 3))])


def test_nan_weights_are_named():
    unet = tiny_unet()
    unet.conv_in.weight.data[0, 0, 0, 0] = float("nan")
    with pytest.raises(VitrineError, match="conv_in.weight"):
        check_finite(unet)


def test_unknown_backbones_are_refused():
    with pytest.raises(VitrineError, match="diffusers UNet"):
        Denoiser.from_diffusers(torch.nn.Linear(1, 1), DDIMScheduler())
    with pytest.raises(VitrineError, match="diffusers UNet"):
        sites_of(torch.nn.Linear(1, 1))


# --- addresses ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("config", "shown", "with_text"),
    [(models.SD15, 197, 229), (models.SD21, 197, 229), (models.SDXL, 612, 752)],
)
def test_full_size_unets_have_gdfs_addresses(config, shown, with_text):
    unet = models.outline(**config)
    names = list(sites_of(unet))
    assert len(names) == len(set(names))
    assert sum(not n.endswith(EXTENDED) for n in names) == shown
    assert sum(not n.endswith(EXTENDED[:3]) for n in names) == with_text
    for site in sites_of(unet).values():
        unet.get_submodule(site.path)


def test_the_papers_selections_resolve():
    sd15, sdxl = models.outline(**models.SD15), models.outline(**models.SDXL)
    ours = ["up-level1-repeat1-vit-block0-cross-q", "up-level1-repeat2-res-out", "up-level3-repeat0-vit-block0-self-k"]
    assert [s.path for s in resolve(sd15, ours)] == [
        "up_blocks.1.attentions.1.transformer_blocks.0.attn2.to_q",
        "up_blocks.1.resnets.2",
        "up_blocks.3.attentions.0.transformer_blocks.0.attn1.to_k",
    ]
    assert len(resolve(sdxl, "up-level0-repeat0-vit-block7-out, up-level0-repeat0-vit-block5-out")) == 2


def test_globs_keep_execution_order_and_mistakes_are_explained():
    unet = tiny_unet()
    found = [s.address for s in resolve(unet, "up-level1-*-cross-q down-*-cross-q")]
    assert found == [n for n in sites_of(unet) if n in found] and len(found) == 3
    with pytest.raises(VitrineError, match="Did you mean up-level1-repeat0-vit-block0-cross-q"):
        resolve(unet, "up-level1-repeat0-vit-block0-cros-q")
    with pytest.raises(VitrineError, match="one layer name"):
        resolve(unet, "")


@pytest.mark.parametrize(
    ("network", "wanted"),
    [
        (lambda: models.outline(**models.SD15), "up-level1-repeat2-vit-block0-cross-q"),
        (lambda: models.outline(**models.SDXL), "up-level0-repeat0-vit-block8-cross-q"),
        (lambda: models.shared(models.pixart), "vit-block1-cross-q"),
        (lambda: models.shared(models.sd3), "vit-block1-q"),
        (lambda: models.shared(models.flux), "vit-block1-q"),
    ],
    ids=["SD1.5", "SDXL", "PixArt", "SD3", "Flux"],
)
def test_auto_is_a_place_of_every_model(network, wanted):
    assert [s.address for s in resolve(network(), "auto")] == [wanted]


# --- hooks --------------------------------------------------------------------------------------------------------
def test_capture_is_the_module_output_and_leaves_nothing_behind(no_hooks_left):
    unet, (x, text) = tiny_unet(), inputs()
    seen = {}
    query = unet.up_blocks[1].attentions[0].transformer_blocks[0].attn2.to_q
    handle = query.register_forward_hook(lambda m, a, o: seen.update(q=o.detach().clone()))
    with torch.no_grad():
        plain = unet(x, 51, encoder_hidden_states=text).sample
        handle.remove()
        weights = {k: v.clone() for k, v in unet.state_dict().items()}
        with capture(unet, "*") as taps:
            tapped = unet(x, 51, encoder_hidden_states=text).sample
        after = unet(x, 51, encoder_hidden_states=text).sample
    assert torch.equal(plain, tapped) and torch.equal(plain, after)
    assert all(torch.equal(v, weights[k]) for k, v in unet.state_dict().items())
    no_hooks_left(unet)
    found = taps["up-level1-repeat0-vit-block0-cross-q"]
    assert found.grid == (16, 16) and torch.equal(found.tensor.flatten(2).transpose(1, 2), seen["q"])
    assert set(taps.activations) == set(sites_of(unet))


@pytest.mark.parametrize("shape", [(16, 16), (8, 24)])
def test_token_grids_follow_the_picture(shape):
    unet, (x, text) = tiny_unet(), inputs(2, *shape)
    with torch.no_grad(), capture(unet, "*-vit-block0-out *-vit-out") as taps:
        unet(x, 51, encoder_hidden_states=text)
    for name in taps.activations:
        if name.endswith("block0-out"):
            outer = taps[name.replace("block0-out", "out")]
            assert taps[name].grid == outer.grid == tuple(outer.tensor.shape[-2:])


def test_text_places_give_tokens_and_maps_sum_to_one():
    unet, (x, text) = tiny_unet(), inputs()
    with torch.no_grad(), capture(unet, "mid-vit-block0-cross-k mid-vit-block0-*-map") as taps:
        unet(x, 51, encoder_hidden_states=text)
    assert taps["mid-vit-block0-cross-k"].tensor.shape == (2, 7, 64) and taps["mid-vit-block0-cross-k"].grid is None
    cross = taps["mid-vit-block0-cross-map"].tensor
    assert cross.shape == (2, 2, 64, 7)
    assert torch.allclose(cross.sum(-1), torch.ones(2, 2, 64), atol=1e-5)


def test_maps_equal_diffusers_own_scores():
    unet, (x, text) = tiny_unet(), inputs()
    attention = unet.mid_block.attentions[0].transformer_blocks[0].attn2
    asked = {}
    attention.to_q.register_forward_hook(lambda m, a, o: asked.update(q=o))
    attention.to_k.register_forward_hook(lambda m, a, o: asked.update(k=o))
    with torch.no_grad(), capture(unet, "mid-vit-block0-cross-map") as taps:
        unet(x, 51, encoder_hidden_states=text)
        q, k = (attention.head_to_batch_dim(asked[n]) for n in "qk")
        scores = attention.get_attention_scores(q, k).view(2, 2, 64, 7)
    assert torch.allclose(taps["mid-vit-block0-cross-map"].tensor, scores, atol=1e-6)


def test_early_exit_gives_the_same_tensors_in_any_order():
    unet, (x, text) = tiny_unet(), inputs()
    names = ["up-level0-repeat1-res-out", "mid-repeat0-res-out", "down-level0-repeat0-vit-block0-self-q"]
    reached = []
    unet.conv_out.register_forward_hook(lambda m, a, o: reached.append(1))
    with torch.no_grad():
        with capture(unet, names) as full:
            unet(x, 51, encoder_hidden_states=text)
        with capture(unet, names[::-1], early_exit=True) as early:
            for _ in range(2):
                unet(x, 51, encoder_hidden_states=text)
    assert reached == [1]
    for name in names:
        assert torch.equal(full[name].tensor, early[name].tensor)


def test_an_exception_leaves_no_hook(no_hooks_left):
    unet, (x, text) = tiny_unet(), inputs()
    with pytest.raises(RuntimeError), capture(unet, "*"):
        unet(x[:, :3], 51, encoder_hidden_states=text)
    with pytest.raises(ZeroDivisionError), torch.no_grad(), capture(unet, "*", reduce=lambda a: 1 / 0):
        unet(x, 51, encoder_hidden_states=text)
    with pytest.raises(VitrineError), capture(unet, "nothing"):
        pass
    no_hooks_left(unet)


def test_reduce_decides_what_is_kept():
    unet, (x, text) = tiny_unet(), inputs()

    def small(found):
        return None if "res" in found.address else type(found)(found.address, found.tensor.mean((2, 3)), None)

    with torch.no_grad(), capture(unet, "mid-repeat0-res-out mid-vit-out", reduce=small) as taps:
        unet(x, 51, encoder_hidden_states=text)
    assert list(taps.activations) == ["mid-vit-out"] and taps["mid-vit-out"].tensor.shape == (2, 64)


def test_edits_apply_to_chosen_rows_and_come_off_again(no_hooks_left):
    unet, (x, text) = tiny_unet(), inputs(3)
    rows = torch.tensor([False, True, False])
    with torch.no_grad():
        plain = unet(x, 51, encoder_hidden_states=text).sample
        with edit(unet, {"mid-vit-block0-cross-v": lambda v: v * 0}, rows=rows):
            changed = unet(x, 51, encoder_hidden_states=text).sample
        with edit(unet, {"*-cross-v": lambda v: v}):
            same = unet(x, 51, encoder_hidden_states=text).sample
        after = unet(x, 51, encoder_hidden_states=text).sample
        value = unet.mid_block.attentions[0].transformer_blocks[0].attn2.to_v
        value.weight.zero_()
        zeroed = unet(x, 51, encoder_hidden_states=text).sample
    assert torch.equal(plain[rows.logical_not()], changed[rows.logical_not()])
    assert torch.allclose(changed[rows], zeroed[rows], atol=1e-6) and not torch.allclose(changed[rows], plain[rows])
    assert torch.equal(plain, same) and torch.equal(plain, after)
    no_hooks_left(unet)


def test_maps_cannot_be_edited():
    with pytest.raises(VitrineError, match="edit the q, k or v"):
        edit(tiny_unet(), {"mid-vit-block0-self-map": lambda m: m})


# --- transformers -------------------------------------------------------------------------------------------------
def sd35():
    return models.sd3(dual_attention_layers=(0,), qk_norm="rms_norm")


@pytest.mark.parametrize("make", [models.pixart, sd35, models.flux])
def test_transformers_tap_through_the_denoiser(make, no_hooks_left):
    net = make()
    scheduler = EulerDiscreteScheduler() if make is models.pixart else FlowMatchEulerDiscreteScheduler()
    denoiser = Denoiser.from_diffusers(net, scheduler)
    cond = Condition(torch.randn(2, 7, 24), None if make is models.pixart else torch.randn(2, 20))
    x = torch.randn(2, 4, 8, 12)
    with torch.no_grad():
        plain = denoiser.forward(x, 500, cond)
        with capture(net, "*") as taps:
            tapped = denoiser.forward(x, 500, cond)
    assert plain.shape == x.shape and torch.equal(plain, tapped)
    no_hooks_left(net)
    missing = set(sites_of(net)) - set(taps.activations)
    assert not missing
    for name, found in taps.activations.items():
        text = "-ctx-" in name or name.endswith(("cross-k", "cross-v"))
        assert found.grid == (None if text or name.endswith("-map") else (4, 6)), name


def test_captures_see_what_edits_and_late_weights_leave(no_hooks_left):
    """Opened first or last, a capture reads the final value; a LoRA added last does not revive what an edit zeroed."""
    from vitrine.engine.portraits import build_models
    from vitrine.engine.tracing.hooks import capture, edit
    from vitrine.engine.w2w import BatchedLora, Manifest
    from vitrine.engine.w2w.train.batched_lora import initial_lora

    unet, address = build_models().unet, "mid-vit-block0-cross-v"
    manifest = Manifest.of(initial_lora(unet, ("attn2.to_v",)))
    weights = torch.randn(1, manifest.size, generator=torch.Generator().manual_seed(0))
    inputs = torch.randn(1, 4, 16, 16), torch.tensor([500]), torch.randn(1, 24, 64)
    with torch.no_grad(), capture(unet, address) as taps, edit(unet, {address: torch.zeros_like}):
        with BatchedLora(unet, manifest, weights):
            unet(*inputs)
        assert not taps[address].tensor.any(), "the edit comes after the weights, the capture after the edit"
    with torch.no_grad(), capture(unet, address) as taps:
        unet(*inputs)
        plain = taps[address].tensor.clone()
        with BatchedLora(unet, manifest, weights):
            unet(*inputs)
        assert not torch.equal(plain, taps[address].tensor)
    no_hooks_left(unet)


def test_a_distilled_table_knows_every_twentieth_timestep():
    """ComfyUI's LCM keeps 50 rows; the network's time still runs to 999, and 999 and 50 were refused."""
    whole = NoiseSchedule.scaled_linear()
    lcm = NoiseSchedule("vp", whole.log_sigmas[19::20].clone(), 1000)
    for t in (19.0, 59.0, 499.0, 999.0):
        assert lcm.sigma(t) == whole.sigma(t) and lcm.timestep(lcm.sigma(t)) == t
    assert whole.sigma(39.0) < lcm.sigma(50.0) < whole.sigma(59.0)
    assert lcm.sigma(0.0) == whole.sigma(19.0)
    with pytest.raises(VitrineError, match="999"):
        lcm.sigma(1000.0)
