"""Control nodes in real ComfyUI: an SDXL- and a PixArt-shaped random model in both layouts, and the portraits model."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    PixArtTransformer2DModel,
    UNet2DConditionModel,
)
from vitrine.engine.condition import Condition
from vitrine.engine.control import (
    ControlCheckpoint,
    ControlEmbedder,
    ControlMetadata,
    ControlSpec,
    GammaConfig,
    GuidanceConfig,
    Told,
    control_width,
)
from vitrine.engine.pipelines import (
    ControlConditionedPixArtPipeline,
    ControlConditionedXLPipeline,
)

FAR = {"width": 24, "height": 16, "crop_left": 4, "crop_top": 8}
TOLD = Told(original=(16, 24), crop=(8, 4))
CURVE = {
    "form": "power_cos", "alpha": 1.0, "clock": "native", "reference": "target", "reference_width": 48,
    "reference_height": 40,
}  # fmt: skip
NEVER = GammaConfig("step", step_at=0.0)
NESTED = {"cfg": 3.0, "control": 1.375, "nesting": "control_inner"}
RUN = {"seed": 3, "steps": 4, "sampler_name": "euler", "scheduler": "ddim_uniform", "denoise": 1.0, "flip": False}


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


TEXT, NO_TEXT = seeded(1, 7, 24, seed=1), seeded(1, 7, 24, seed=3)
POOLED, NO_POOLED = seeded(1, 20, seed=2), seeded(1, 20, seed=4)
POSITIVE, NEGATIVE = [[TEXT, {"pooled_output": POOLED}]], [[NO_TEXT, {"pooled_output": NO_POOLED}]]


def carried(source, key_map):
    """A diffusers state dict under ComfyUI's names, through ComfyUI's own map; merged weights are concatenated."""
    found = {}
    for name, value in source.state_dict().items():
        where = key_map.get(name)
        if where is not None:
            key, part, change = (where, None, None) if isinstance(where, str) else (*where, None)[:3]
            found.setdefault(key, {})[part[1] if part else 0] = change(value) if change else value
    return {k: torch.cat([v[i] for i in sorted(v)]) for k, v in found.items()}


def patcher(described, weights):
    from comfy import model_patcher

    described.set_inference_dtype(torch.float32, None)
    cpu = torch.device("cpu")
    model = described.get_model({}, "", device=cpu)
    missing, unexpected = model.diffusion_model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"y_embedder.y_embedding"}
    return model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)


def vae():
    return AutoencoderKL(
        block_out_channels=(4, 4, 4, 4), down_block_types=("DownEncoderBlock2D",) * 4, latent_channels=4,
        up_block_types=("UpDecoderBlock2D",) * 4, norm_num_groups=2, layers_per_block=1,
    )  # fmt: skip


def euler(**betas):
    """Its timesteps are those of ComfyUI's ddim_uniform."""
    return EulerDiscreteScheduler(timestep_spacing="leading", steps_offset=1, **betas)


@pytest.fixture(scope="module")
def xl(comfy):
    """One SDXL-shaped network as a pipeline and as a MODEL."""
    from comfy import supported_models, utils

    class Tiny(supported_models.SDXL):
        unet_extra_config = {"num_heads": -1, "num_head_channels": 16}

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(32, 64), down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), layers_per_block=1,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=24, attention_head_dim=(2, 4),
        use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=256, sample_size=8,
        projection_class_embeddings_input_dim=20 + 6 * 256,
    ).eval()  # fmt: skip
    with torch.no_grad():
        for p in unet.add_embedding.parameters():
            p.mul_(6)
    config = {
        "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 32, "channel_mult": (1, 2),
        "num_res_blocks": [1, 1], "use_spatial_transformer": True, "transformer_depth": [0, 1],
        "transformer_depth_output": [0, 0, 1, 1], "transformer_depth_middle": 1, "context_dim": 24, "legacy": False,
        "use_linear_in_transformer": True, "num_classes": "sequential", "adm_in_channels": 20 + 6 * 256,
    }  # fmt: skip
    model = patcher(Tiny(config), carried(unet, utils.unet_to_diffusers(config)))
    scheduler = euler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    parts = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    pipe = ControlConditionedXLPipeline(vae=vae(), unet=unet, scheduler=scheduler, **parts)
    pipe.set_progress_bar_config(disable=True)
    return SimpleNamespace(model=model, pipe=pipe, scale=0.13025, side=8)


@pytest.fixture(scope="module")
def pixart(comfy):
    """One PixArt-shaped network in both layouts; ComfyUI's position embeddings are laid out for 64 x 64 cells."""
    from comfy import supported_models, utils

    torch.manual_seed(0)
    net = PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=8, num_layers=2, sample_size=64,
        cross_attention_dim=24, patch_size=2, caption_channels=24, use_additional_conditions=True,
    ).eval()  # fmt: skip
    with torch.no_grad():
        for p in net.adaln_single.emb.resolution_embedder.parameters():
            p.mul_(6)
    config = {"hidden_size": 24, "num_heads": 2, "depth": 2, "caption_channels": 24, "model_max_length": 7}
    weights = carried(net, utils.pixart_to_diffusers(config))
    model = patcher(supported_models.PixArtAlpha(config | {"in_channels": 4}), weights)
    scheduler = euler(beta_start=0.0001, beta_end=0.02)
    parts = {"tokenizer": None, "text_encoder": None, "vae": vae(), "transformer": net, "scheduler": scheduler}
    pipe = ControlConditionedPixArtPipeline(**parts)
    pipe.set_progress_bar_config(disable=True)
    return SimpleNamespace(model=model, pipe=pipe, scale=0.18215, side=64)


def latent(side=8):
    return {"samples": torch.zeros(1, 4, side, side)}


def node(comfy, twins, model=None, positive=POSITIVE, **change):
    """Latents in the network's own scale, and the report."""
    told = FAR | CURVE | RUN | {"cfg": 3.0, "control": 1.0, "nesting": "control_inner"} | change
    made, drawn, report = comfy.call(
        "VitrineControlConditionedSampler", model=model or twins.model, positive=positive, negative=NEGATIVE,
        latent_image=latent(twins.side), **told,
    )  # fmt: skip
    assert drawn.shape == (1, 320, 560, 3) and 0 <= float(drawn.min()) < float(drawn.max()) <= 1
    return made["samples"].clone() * twins.scale, report


def pipeline(twins, gamma, guidance, told=TOLD, **change):
    """The same run in diffusers: ComfyUI scales the noise by sigma alone below the highest level."""
    noise, scheduler = torch.randn(1, 4, twins.side, twins.side, generator=torch.manual_seed(3)), twins.pipe.scheduler
    scheduler.set_timesteps(4)
    noise = noise * scheduler.sigmas[0] / scheduler.init_noise_sigma
    embeds = {"prompt_embeds": TEXT, "negative_prompt_embeds": NO_TEXT}
    if hasattr(twins.pipe, "unet"):
        embeds |= {"pooled_prompt_embeds": POOLED, "negative_pooled_prompt_embeds": NO_POOLED}
    else:
        embeds |= {f"{n}prompt_attention_mask": torch.ones(1, 7) for n in ("", "negative_")}
    settings = {"num_inference_steps": 4, "output_type": "latent", "latents": noise} | embeds | change
    return twins.pipe(told=told, gamma=gamma, guidance=guidance, **settings)


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.model.diffusion_model.modules())


def close(a, b):
    """1e-5 of the largest number."""
    return float((a - b).abs().max()) < 1e-5 * max(1.0, float(b.abs().max()))


# --- the doors agree ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["xl", "pixart"])
@pytest.mark.parametrize("beta", [1.0, 1.375])
def test_node_and_pipeline_give_the_same_latents(comfy, request, family, beta):
    twins = request.getfixturevalue(family)
    theirs, report = node(comfy, twins, control=beta)
    ours = pipeline(twins, GammaConfig(), GuidanceConfig(3.0, beta))
    assert close(theirs, ours.images) and hooks(twins.model) == 0
    lines = report.splitlines()[2:]
    assert len(lines) == 4 and report.splitlines()[1] == f"{sum(s.evaluations for s in ours.log)} evaluations"
    for line, step in zip(lines, ours.log, strict=True):
        assert f"t {step.t:6.1f}  sigma {step.sigma:8.4f}" in line and f"gamma {step.gamma:.4f}" in line


@pytest.mark.parametrize("reference", ["zeros", "size below"])
@pytest.mark.parametrize(("family", "form"), [("xl", "power_cos"), ("xl", "constant"), ("pixart", "power_cos")])
def test_other_neutral_sizes_agree_too(comfy, request, family, form, reference):
    twins = request.getfixturevalue(family)
    theirs, _ = node(comfy, twins, control=1.5, reference=reference, nesting="semantic_inner", alpha=0.5, form=form)
    neutral, curve = {"zeros": "zeros"}.get(reference, (40, 48)), GammaConfig(form, 0.5)
    guidance = GuidanceConfig(3.0, 1.5, "semantic_inner")
    assert close(theirs, pipeline(twins, curve, guidance, reference=neutral).images)
    assert not close(theirs, pipeline(twins, curve, guidance).images)


def test_the_parts_in_a_row_are_the_sampler(comfy, xl):
    from comfy import sample, samplers

    (model,) = comfy.call("VitrineApplyGammaSchedule", model=xl.model, **CURVE)
    (positive,) = comfy.call("VitrineControlValues", conditioning=POSITIVE, target_width=64, target_height=64, **FAR)
    assert "width" not in POSITIVE[0][1] and positive[0][1]["height"] == 16
    (guider,) = comfy.call("VitrineControlCFGGuider", model=model, positive=positive, negative=NEGATIVE, **NESTED)
    sigmas = samplers.KSampler(model, 4, "cpu", "euler", "ddim_uniform").sigmas
    noise = sample.prepare_noise(latent()["samples"], 3)
    with torch.inference_mode():
        made = guider.sample(noise, latent()["samples"], samplers.sampler_object("euler"), sigmas, seed=3).clone()
    whole, _ = node(comfy, xl, control=1.375)
    assert torch.equal(made * xl.scale, whole)
    assert [s.evaluations for s in guider.log] == [3] * 4


# --- the two ends, to the bit ---------------------------------------------------------------------------------------
def vector(model, **sizes):
    return model.model.encode_adm(pooled_output=POOLED, **{"width": 64, "height": 64} | sizes)


SMALL = {"width": 24, "height": 16, "crop_w": 4, "crop_h": 8, "target_width": 64, "target_height": 64}


def call(model, y, t=500.0):
    """The network's x0 for rows of y, at one timestep or one for each."""
    from vitrine.nodes.comfy import model as bridge

    with torch.inference_mode():
        denoiser = bridge.denoiser_of(model)
        t = torch.as_tensor(t).expand(len(y))
        cond = Condition(TEXT.expand(len(y), -1, -1), None, {"y": y})
        return denoiser.call(seeded(1, 4, 8, 8, seed=9).expand(len(y), -1, -1, -1), t, cond).clone()


def test_both_ends_are_the_untouched_model_to_the_bit(comfy, xl):
    from vitrine.nodes.comfy.control import weighted

    told = vector(xl.model, **SMALL)
    neutral = vector(xl.model, **SMALL | {"width": 64, "height": 64})
    full, low = call(xl.model, told), call(xl.model, neutral)
    always, never = weighted(xl.model, GammaConfig("step", step_at=0.99)), weighted(xl.model, NEVER)
    assert not torch.equal(full, low)
    assert torch.equal(call(always, told), full) and torch.equal(call(never, told), low)
    other = vector(xl.model, **SMALL | {"width": 48, "height": 40})
    assert torch.equal(call(weighted(xl.model, NEVER, (40, 48)), told), call(xl.model, other))
    half = weighted(xl.model, GammaConfig())
    assert not torch.equal(call(half, told), full) and torch.equal(call(half, neutral), low)
    assert torch.equal(call(xl.model, told), full), "the sibling branch never sees it"
    constant = comfy.call("VitrineApplyGammaSchedule", model=xl.model, **CURVE | {"form": "constant"})[0]
    assert constant is xl.model
    again = weighted(weighted(xl.model, NEVER), GammaConfig("constant"))
    assert torch.equal(call(again, told), full), "the last one counts"


def test_rows_have_weights_of_their_own(xl):
    from vitrine.nodes.comfy.control import weighted

    model = weighted(xl.model, GammaConfig("step", step_at=0.5))
    told = vector(xl.model, **SMALL)
    both = call(model, told.expand(2, -1), torch.tensor([900.0, 100.0]))
    swapped = call(model, told.expand(2, -1), torch.tensor([100.0, 900.0]))
    assert torch.allclose(both.flip(0), swapped, atol=1e-5)
    neutral = vector(xl.model, **SMALL | {"width": 64, "height": 64})
    assert torch.allclose(both[:1], call(xl.model, neutral, 900.0), atol=1e-5)
    assert torch.allclose(both[1:], call(xl.model, told, 100.0), atol=1e-5)


@pytest.mark.parametrize("t", [100.0, 500.0, 800.0])
def test_the_middle_is_the_formula_also_with_a_lora(xl, t):
    from vitrine.nodes.comfy.control import weighted

    name = "diffusion_model.label_emb.0.{}.weight"
    change = {name.format(i): (0.3 * seeded(128, n, seed=i),) for i, n in ((0, 1556), (2, 128))}
    with_lora, curve = xl.model.clone(), GammaConfig(alpha=2.0)
    assert len(with_lora.add_patches(change, 1.0)) == 2
    told = vector(xl.model, **SMALL)
    neutral = vector(xl.model, **SMALL | {"width": 64, "height": 64})
    found = call(weighted(with_lora, curve), told, t)
    label = xl.model.model.diffusion_model.label_emb
    by_hand = with_lora.clone()

    def patch(emb, channels, options):
        full, low = label(told), label(neutral)
        return emb + (low + float(curve.at(t)) * (full - low)) - full

    by_hand.set_model_emb_patch(patch)
    assert torch.allclose(found, call(by_hand, told, t), atol=1e-4 * float(found.abs().max()))
    assert not torch.allclose(found, call(weighted(xl.model, curve), told, t), atol=1e-2)
    assert torch.equal(call(with_lora, told, t), call(with_lora.clone(), told, t))


def test_pixarts_ends_are_the_untouched_model_to_the_bit(pixart):
    from vitrine.nodes.comfy import model as bridge
    from vitrine.nodes.comfy.control import weighted

    def predict(model, size):
        told = {"c_size": torch.tensor([size]), "c_ar": torch.tensor([[1.0]])}
        with torch.inference_mode():
            x = seeded(1, 4, 64, 64, seed=9)
            return bridge.denoiser_of(model).call(x, torch.tensor([500.0]), Condition(TEXT, None, told)).clone()

    full, low = predict(pixart.model, (16.0, 24.0)), predict(pixart.model, (512.0, 512.0))
    assert not torch.equal(full, low)
    assert torch.equal(predict(weighted(pixart.model, GammaConfig("step", step_at=0.99)), (16.0, 24.0)), full)
    assert torch.equal(predict(weighted(pixart.model, NEVER), (16.0, 24.0)), low)
    other = predict(weighted(pixart.model, NEVER, (40, 48)), (16.0, 24.0))
    assert torch.equal(other, predict(pixart.model, (40.0, 48.0)))
    half = predict(weighted(pixart.model, GammaConfig()), (16.0, 24.0))
    assert not torch.equal(half, full) and not torch.equal(half, low) and hooks(pixart.model) == 0


# --- guidance -------------------------------------------------------------------------------------------------------
def guided(guider, scheduler="ddim_uniform", steps=4):
    from comfy import sample, samplers

    sigmas = samplers.KSampler(guider.model_patcher, steps, "cpu", "euler", scheduler).sigmas
    noise = sample.prepare_noise(latent()["samples"], 3)
    with torch.inference_mode():
        return guider.sample(noise, latent()["samples"], samplers.sampler_object("euler"), sigmas, seed=3).clone()


def test_equation_two_is_comfyuis_dual_guidance(xl):
    from comfy_extras.nodes_custom_sampler import Guider_DualCFG
    from vitrine.nodes.comfy.control import weighted, with_told
    from vitrine.nodes.comfy.control_guider import ControlGuider

    model, positive = weighted(xl.model, GammaConfig()), with_told(POSITIVE, TOLD, (64, 64))
    found = guided(ControlGuider(model, positive, NEGATIVE, GuidanceConfig(3.0, 1.375)))
    for nested, cfg1 in ((True, 1.375), (False, 3.0 * 1.375)):
        dual = Guider_DualCFG(model)
        dual.set_conds(positive, POSITIVE, NEGATIVE)
        dual.set_cfg(cfg1, 3.0, nested)
        assert close(found, guided(dual)), nested
    inner = ControlGuider(model, positive, NEGATIVE, GuidanceConfig(3.0, 1.375, "semantic_inner"))
    dual = Guider_DualCFG(model)
    dual.set_conds(positive, with_told(NEGATIVE, TOLD, (64, 64)), NEGATIVE)
    dual.set_cfg(1.375, 3.0, True)
    assert close(guided(inner), guided(dual))


def test_without_control_guidance_it_is_ksampler(comfy, xl):
    from vitrine.nodes.comfy.control import weighted, with_told
    from vitrine.nodes.comfy.control_guider import ControlGuider

    model, positive = weighted(xl.model, GammaConfig()), with_told(POSITIVE, TOLD, (64, 64))
    for scale in (3.0, 1.0):
        with torch.inference_mode():
            sampler = comfy.nodes.NODE_CLASS_MAPPINGS["KSampler"]()
            (core,) = sampler.sample(model, 3, 4, scale, "euler", "ddim_uniform", positive, NEGATIVE, latent(), 1.0)
            found = guided(ControlGuider(model, positive, NEGATIVE, GuidanceConfig(scale)))
            assert close(found, core["samples"])


def test_evaluations_are_spared_and_counted(comfy, xl):
    sizes = {"width": 24, "height": 16, "crop_left": 0, "crop_top": 0}
    _, report = node(comfy, xl, **NESTED, **sizes, alpha=8.0, steps=20, scheduler="normal")
    counts = [int(line.split()[-1]) for line in report.splitlines()[2:]]
    weights = GammaConfig(alpha=8.0).at(torch.tensor([float(line.split()[1]) for line in report.splitlines()[2:]]))
    weights = weights.tolist()
    assert counts == [2 if w < 1e-4 else 3 for w in weights] and 2 in counts and 3 in counts
    assert weights == sorted(weights) and weights[0] < 1e-5 and weights[-1] > 0.99
    _, cropped = node(comfy, xl, **NESTED, alpha=8.0, steps=20, scheduler="normal")
    assert "60 evaluations" in cropped
    _, plain = node(comfy, xl, cfg=1.0)
    assert "4 evaluations" in plain


def test_patches_of_guidance_still_act(xl):
    from vitrine.nodes.comfy.control import weighted, with_told
    from vitrine.nodes.comfy.control_guider import ControlGuider

    model, positive, seen = weighted(xl.model, GammaConfig()), with_told(POSITIVE, TOLD, (64, 64)), []
    plain = guided(ControlGuider(model, positive, NEGATIVE, GuidanceConfig(3.0, 1.375)))
    patched = model.clone()
    patched.set_model_sampler_post_cfg_function(lambda args: seen.append(args["cond_scale"]) or args["denoised"] * 0.5)
    patched.set_model_sampler_pre_cfg_function(lambda args: seen.append(len(args["conds_out"])) or args["conds_out"])
    assert not close(plain, guided(ControlGuider(patched, positive, NEGATIVE, GuidanceConfig(3.0, 1.375))))
    assert sorted(seen) == [2] * 4 + [3.0] * 4
    forced = model.clone()
    forced.model_options["disable_cfg1_optimization"] = True
    guider = ControlGuider(forced, positive, NEGATIVE, GuidanceConfig())
    guided(guider)
    assert [s.evaluations for s in guider.log] == [2] * 4


def test_guidance_grows_with_the_resolution(comfy, xl):
    law, report = node(comfy, xl, cfg=1.5, upscale=2.0)
    assert torch.equal(law, node(comfy, xl, cfg=2.0)[0]) and "guidance 2\n" in report


# --- refusals -------------------------------------------------------------------------------------------------------
def test_models_that_cannot_be_weighted_are_refused(comfy, xl):
    from comfy import model_sampling
    from vitrine.nodes.comfy.control import weighted, with_checkpoint

    torch.manual_seed(3)
    made = ControlEmbedder(ControlSpec(), control_width(xl.pipe.unet))
    own = ControlCheckpoint(made, ControlMetadata("UNet2DConditionModel", made.dim), {})
    with pytest.raises(ValueError, match="part of what was trained"):
        comfy.call("VitrineApplyGammaSchedule", model=with_checkpoint(xl.model, own), **CURVE)

    class EDM(model_sampling.ModelSamplingContinuousEDM, model_sampling.EDM):
        pass

    model = xl.model.clone()
    model.add_object_patch("model_sampling", EDM(xl.model.model.model_config))
    with pytest.raises(ValueError, match="no timesteps"):
        weighted(model, GammaConfig())
