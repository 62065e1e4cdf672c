"""Control conditioning of SDXL's own sizes: both ends are the stock pipeline, the middle is the printed formula."""

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
)
from peft import LoraConfig
from vitrine.engine.control import (
    GammaConfig,
    GuidanceConfig,
    SizeCondition,
    needed_evaluations,
)
from vitrine.engine.pipelines.adapter import Adapter
from vitrine_tests.pipelines.controlled import FAR, NEVER, OFF, euler, ours, seeded, texts, xl_pipeline

pytestmark = pytest.mark.rounding


@pytest.fixture
def xl():
    return xl_pipeline()


def stock(pipe, original=FAR.original, crop=FAR.crop, scale=4.0, output_type="latent", count=1):
    plain = StableDiffusionXLPipeline(**pipe.components)
    plain.set_progress_bar_config(disable=True)
    own = (64, 64)
    return plain(
        original_size=original,
        crops_coords_top_left=crop,
        target_size=own,
        negative_original_size=own,
        negative_crops_coords_top_left=(0, 0),
        negative_target_size=own,
        guidance_scale=scale,
        num_inference_steps=4,
        generator=[torch.Generator().manual_seed(i) for i in range(count)],
        output_type=output_type,
        **texts(count),
    ).images


def test_weight_one_is_the_stock_pipeline_and_weight_zero_the_neutral_size_to_the_bit(xl, no_hooks_left):
    full, neutral = stock(xl), stock(xl, original=(64, 64))
    assert torch.equal(ours(xl, OFF).images, full)
    assert torch.equal(ours(xl, NEVER).images, neutral)
    assert not torch.equal(full, neutral)
    half = ours(xl, GammaConfig()).images
    assert not torch.equal(half, full) and not torch.equal(half, neutral)
    drawn = ours(xl, OFF, output_type="np").images
    assert drawn.shape == (1, 64, 64, 3) and (drawn == stock(xl, output_type="np")).all()
    assert torch.equal(ours(xl, OFF).images, full)
    no_hooks_left(xl.unet)


def test_a_vae_with_its_own_mean_and_deviation_encodes_and_decodes_as_in_the_stock_pipeline(xl):
    """Playground 2.5's: latents have a mean and a standard deviation per channel."""
    xl.vae.register_to_config(latents_mean=[0.5, -1.0, 0.25, 2.0], latents_std=[2.0, 1.0, 0.5, 3.0])
    shown = ours(xl, OFF, output_type="np").images
    assert (shown == stock(xl, output_type="np")).all()
    img2img = StableDiffusionXLImg2ImgPipeline(**xl.components)
    pixels, generator = seeded(1, 3, 64, 64).clamp(-1, 1), torch.Generator().manual_seed(0)
    with torch.no_grad():
        wanted = img2img.prepare_latents(pixels, None, 1, 1, torch.float32, "cpu", generator, add_noise=False)
        spread = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(Adapter(xl).encode(pixels, "sample", noise=spread), wanted)


@pytest.mark.parametrize("reference", ["target", "zeros", (40, 48)])
def test_the_middle_is_the_formula_also_with_a_lora(xl, reference):
    xl.unet.add_adapter(LoraConfig(r=2, target_modules=["add_embedding.linear_1", "add_embedding.linear_2"]))
    with torch.no_grad():
        for n, p in xl.unet.named_parameters():
            if "lora_B" in n:
                p.copy_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(n))))
    curve = GammaConfig(alpha=2.0)
    found = ours(xl, curve, GuidanceConfig(1.0), reference=reference).images
    now = {}

    def by_hand(module, args, output):
        """A(ref) + gamma (A(size) - A(ref)) at the MLP's output; the original size is the first two sinusoids."""
        neutral = args[0].clone()
        sizes = {"target": (64, 64), "zeros": None}.get(reference, reference)
        waves = xl.unet.add_time_proj(torch.tensor(sizes)).flatten() if sizes else torch.zeros(512)
        neutral[:, 20 : 20 + 512] = waves
        lowest = module.linear_2(module.act(module.linear_1(neutral)))
        return lowest + float(curve.at(now["t"])) * (output - lowest)

    handles = [
        xl.unet.register_forward_pre_hook(lambda m, args: now.update(t=float(args[1]))),
        xl.unet.add_embedding.register_forward_hook(by_hand),
    ]
    wanted = stock(xl, scale=1.0)
    for handle in handles:
        handle.remove()
    assert torch.allclose(found, wanted, atol=2e-5)
    assert float((found - stock(xl, scale=1.0)).abs().max()) > 1e-3


def by_formula(pipe, curve, scale, beta, nesting):
    """Eq. 2 as printed, with the network called once for each term."""
    embeds, scheduler, own = texts(), euler(), (64.0, 64.0)
    scheduler.set_timesteps(4)
    x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)) * scheduler.init_noise_sigma
    for t in scheduler.timesteps:
        gamma = curve.at(t)

        def eps(control, semantics, t=t, gamma=gamma, x=x):
            names = ("prompt_embeds", "pooled_prompt_embeds")
            text, pooled = (embeds[n if semantics else f"negative_{n}"] for n in names)

            def added(original, crop):
                ids = torch.tensor([[*original, *crop, *own]])
                waves = pipe.unet.add_time_proj(ids.flatten()).reshape(1, -1)
                return pipe.unet.add_embedding(torch.cat([pooled, waves], 1))

            low = added(own, FAR.crop if control else (0.0, 0.0))
            full = added(FAR.original, FAR.crop) if control else low
            handle = pipe.unet.add_embedding.register_forward_hook(lambda m, a, o: low + float(gamma) * (full - low))
            told = {"text_embeds": pooled, "time_ids": torch.zeros(1, 6)}
            try:
                return pipe.unet(scheduler.scale_model_input(x, t), t, text, added_cond_kwargs=told).sample
            finally:
                handle.remove()

        null = eps(False, True) if nesting == "control_inner" else eps(True, False)
        guided = scale * (beta * eps(True, True) + (1 - beta) * null) + (1 - scale) * eps(False, False)
        x = scheduler.step(guided, t, x).prev_sample
    return x


@pytest.mark.parametrize("nesting", ["control_inner", "semantic_inner"])
def test_two_way_guidance_is_the_printed_formula(xl, nesting):
    curve, config = GammaConfig(), GuidanceConfig(3.0, 1.375, nesting)
    out = ours(xl, curve, config)
    with torch.no_grad():
        wanted = by_formula(xl, curve, 3.0, 1.375, nesting)
    assert torch.allclose(out.images, wanted, atol=1e-4)
    assert [s.evaluations for s in out.log] == [3] * 4


def test_the_log_counts_and_the_skip_rule_spares(xl):
    plain = SizeCondition(original=(16, 24))
    config = GuidanceConfig(4.0, 1.375)
    all_of_them = ours(xl, NEVER, config, size_condition=FAR)
    skipped = ours(xl, NEVER, config, size_condition=plain)
    slow = ours(xl, NEVER, GuidanceConfig(4.0, 1.375, skip_below=0.0), size_condition=plain)
    assert [s.evaluations for s in all_of_them.log] == [3] * 4, "the crop has weight 1 at all times"
    assert [s.evaluations for s in skipped.log] == [2] * 4 and [s.evaluations for s in slow.log] == [3] * 4
    assert torch.allclose(skipped.images, slow.images, atol=1e-4), "pixels reach 7: float32 of two and of three rows"
    assert [s.evaluations for s in ours(xl, OFF, GuidanceConfig(1.0)).log] == [1] * 4
    xl.scheduler = EulerDiscreteScheduler.from_config(xl.scheduler.config, timestep_spacing="trailing")
    log = ours(xl, GammaConfig(), num_inference_steps=20).log
    weights = [s.gamma for s in log]
    assert weights[0] < 1e-5 and weights == sorted(weights)
    assert log[0].t == 999 and log[0].sigma == pytest.approx(14.6146, abs=1e-3)
    xl.scheduler = DDIMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    log = ours(xl, GammaConfig(), num_inference_steps=20).log
    assert log[-1].gamma > 0.99 and log[-1].sigma == pytest.approx(0.0292, abs=1e-4)


def test_alpha_matters_only_for_sizes_and_crops_act_at_once(xl):
    own = SizeCondition(crop=(8, 4))
    assert torch.allclose(
        ours(xl, GammaConfig(alpha=1.0), size_condition=own).images,
        ours(xl, GammaConfig(alpha=8.0), size_condition=own).images,
        atol=1e-4,
    )
    early = GammaConfig(alpha=32.0)
    two, none = (ours(xl, early, size_condition=t, sigmas=None).images for t in (own, SizeCondition()))
    assert float((two - none).abs().max()) > 1e-3


def test_needed_evaluations_are_those_that_guidance_asks_for():
    assert needed_evaluations(GuidanceConfig(4.0, 1.375)) == ((False, False), (False, True), (True, True))
    swapped = GuidanceConfig(4.0, 1.375, "semantic_inner")
    assert needed_evaluations(swapped) == ((False, False), (True, False), (True, True))
    assert needed_evaluations(GuidanceConfig(4.0)) == ((False, False), (True, True))
    assert needed_evaluations(GuidanceConfig(4.0, 1.375), 0.0, True) == ((False, False), (False, True))
    assert needed_evaluations(GuidanceConfig()) == ((True, True),)
