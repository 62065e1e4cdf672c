"""Control conditioning in diffusers: SDXL- and PixArt-shaped random models, and a checkpoint on the portraits model."""

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    PixArtTransformer2DModel,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from peft import LoraConfig
from vitrine.engine.control import (
    ControlEmbedder,
    ControlMetadata,
    ControlSpec,
    ControlWarning,
    GammaConfig,
    GuidanceConfig,
    Injection,
    PaddingConfig,
    Told,
    control_width,
    needed,
    pad_text,
    save_control,
)
from vitrine.engine.errors import VitrineError
from vitrine.engine.guidance import scale_for_size
from vitrine.engine.pipelines import (
    ControlConditionedPipeline,
    ControlConditionedPixArtPipeline,
    ControlConditionedXLPipeline,
)
from vitrine.engine.portraits import load_portraits

FAR = Told(original=(16, 24), crop=(8, 4))
OFF, NEVER = GammaConfig("constant"), GammaConfig("step", step_at=0.0)
PROMPT = "a smiling pale face with curly red hair glasses navy shirt on yellow"


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def louder(net, part):
    """The size embedder's random weights enlarged, so that sizes matter."""
    with torch.no_grad():
        for p in net.get_submodule(part).parameters():
            p.mul_(6)
    return net.eval()


def vae():
    torch.manual_seed(1)
    return AutoencoderKL(
        block_out_channels=(4, 4, 4, 4), down_block_types=("DownEncoderBlock2D",) * 4, latent_channels=4,
        up_block_types=("UpDecoderBlock2D",) * 4, norm_num_groups=2, layers_per_block=1,
    ).eval()  # fmt: skip


def euler():
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    return EulerDiscreteScheduler(timestep_spacing="leading", steps_offset=1, **betas)


@pytest.fixture
def xl():
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(32, 64), down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), layers_per_block=1,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=24, attention_head_dim=(2, 4),
        use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=256, sample_size=8,
        projection_class_embeddings_input_dim=20 + 6 * 256,
    )  # fmt: skip
    parts = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    pipe = ControlConditionedXLPipeline(vae=vae(), unet=louder(unet, "add_embedding"), scheduler=euler(), **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def texts(count=1):
    return {
        "prompt_embeds": seeded(count, 7, 24, seed=1), "pooled_prompt_embeds": seeded(count, 20, seed=2),
        "negative_prompt_embeds": seeded(count, 7, 24, seed=3),
        "negative_pooled_prompt_embeds": seeded(count, 20, seed=4),
    }  # fmt: skip


def ours(pipe, gamma=None, guidance=None, told=FAR, **how):
    count = len(how.get("latents", [0]))
    settings = {"num_inference_steps": 4, "output_type": "latent", **texts(count)} | how
    return pipe(told=told, gamma=gamma, guidance=guidance or GuidanceConfig(4.0), **settings)


def stock(pipe, original=FAR.original, crop=FAR.crop, scale=4.0, output_type="latent", count=1):
    plain = StableDiffusionXLPipeline(**pipe.components)
    plain.set_progress_bar_config(disable=True)
    own = (64, 64)
    return plain(
        original_size=original, crops_coords_top_left=crop, target_size=own, negative_original_size=own,
        negative_crops_coords_top_left=(0, 0), negative_target_size=own, guidance_scale=scale, num_inference_steps=4,
        generator=[torch.Generator().manual_seed(i) for i in range(count)], output_type=output_type, **texts(count),
    ).images  # fmt: skip


# --- SDXL -----------------------------------------------------------------------------------------------------------
def test_weight_one_is_the_stock_pipeline_and_weight_zero_the_neutral_size_to_the_bit(xl):
    full, neutral = stock(xl), stock(xl, original=(64, 64))
    assert torch.equal(ours(xl, OFF).images, full)
    assert torch.equal(ours(xl, NEVER).images, neutral)
    assert not torch.equal(full, neutral)
    half = ours(xl, GammaConfig()).images
    assert not torch.equal(half, full) and not torch.equal(half, neutral)
    drawn = ours(xl, OFF, output_type="np").images
    assert drawn.shape == (1, 64, 64, 3) and (drawn == stock(xl, output_type="np")).all()
    assert torch.equal(ours(xl, OFF).images, full) and not hooks(xl.unet)


def hooks(net):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())


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
    plain = Told(original=(16, 24))
    config = GuidanceConfig(4.0, 1.375)
    all_of_them = ours(xl, NEVER, config, told=FAR)
    skipped = ours(xl, NEVER, config, told=plain)
    slow = ours(xl, NEVER, GuidanceConfig(4.0, 1.375, skip_below=0.0), told=plain)
    assert [s.evaluations for s in all_of_them.log] == [3] * 4, "the crop has weight 1 at all times"
    assert [s.evaluations for s in skipped.log] == [2] * 4 and [s.evaluations for s in slow.log] == [3] * 4
    assert torch.allclose(skipped.images, slow.images, atol=1e-5)
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
    own = Told(crop=(8, 4))
    assert torch.allclose(ours(xl, GammaConfig(alpha=1.0), told=own).images,
                          ours(xl, GammaConfig(alpha=8.0), told=own).images, atol=1e-5)  # fmt: skip
    early = GammaConfig(alpha=32.0)
    two, none = (ours(xl, early, told=t, sigmas=None).images for t in (own, Told()))
    assert float((two - none).abs().max()) > 1e-3


def test_pictures_do_not_depend_on_the_batch(xl):
    both = ours(xl, told=[FAR, Told()], latents=seeded(2, 4, 8, 8))
    embeds = {k: v[1:] for k, v in texts(2).items()}
    alone = ours(xl, told=Told(), latents=seeded(2, 4, 8, 8)[1:], **embeds)
    assert torch.allclose(both.images[1:], alone.images, atol=1e-4)  # numbers up to 15
    pair = ours(xl, seeds=[5, 6])
    assert torch.allclose(pair.images[1:], ours(xl, seeds=[6]).images, atol=1e-4)
    xl.scheduler = EulerAncestralDiscreteScheduler.from_config(xl.scheduler.config)  # draws noise in every step
    pair = ours(xl, seeds=[5, 6])
    assert torch.allclose(pair.images[1:], ours(xl, seeds=[6]).images, atol=1e-4)


def test_guidance_grows_with_the_resolution(xl):
    law = ours(xl, guidance=GuidanceConfig(1.5), upscale=2.0).images
    assert scale_for_size(1.5, 2.0) == 2.0
    assert torch.equal(law, ours(xl, guidance=GuidanceConfig(2.0)).images)


def test_needed_evaluations_are_those_that_guidance_asks_for():
    assert needed(GuidanceConfig(4.0, 1.375)) == ((False, False), (False, True), (True, True))
    assert needed(GuidanceConfig(4.0, 1.375, "semantic_inner")) == ((False, False), (True, False), (True, True))
    assert needed(GuidanceConfig(4.0)) == ((False, False), (True, True))
    assert needed(GuidanceConfig(4.0, 1.375), 0.0, True) == ((False, False), (False, True))
    assert needed(GuidanceConfig()) == ((True, True),)


# --- PixArt ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def pixart():
    torch.manual_seed(0)
    net = PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
        cross_attention_dim=24, patch_size=2, caption_channels=24, use_additional_conditions=True,
    )  # fmt: skip
    parts = dict.fromkeys(("tokenizer", "text_encoder"))
    net = louder(net, "adaln_single.emb.resolution_embedder")
    parts |= {"vae": vae(), "transformer": net, "scheduler": DDIMScheduler(steps_offset=1)}
    pipe = ControlConditionedPixArtPipeline(**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pixart_ours(pipe, gamma, told):
    masks = {f"{n}prompt_attention_mask": torch.ones(1, 7) for n in ("", "negative_")}
    embeds = {k: v for k, v in texts().items() if "pooled" not in k} | masks
    settings = {"guidance": GuidanceConfig(3.0), "num_inference_steps": 4, "output_type": "latent"}
    return pipe(told=told, gamma=gamma, **settings, **embeds).images


def pixart_by_hand(pipe, original):
    scheduler = DDIMScheduler(steps_offset=1)
    scheduler.set_timesteps(4)
    x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    text = torch.cat([texts()["negative_prompt_embeds"], texts()["prompt_embeds"]])
    told = {"resolution": torch.tensor([(64.0, 64.0), original]), "aspect_ratio": torch.tensor([[1.0], [1.0]])}
    for t in scheduler.timesteps:
        kwargs = {"encoder_attention_mask": torch.ones(2, 7), "added_cond_kwargs": told}
        out = pipe.transformer(torch.cat([x, x]), text, t.expand(2), **kwargs).sample[:, :4]
        none, full = out.chunk(2)
        x = scheduler.step(none + 3.0 * (full - none), t, x).prev_sample
    return x


def test_pixart_at_both_ends_is_untouched(pixart):
    told = Told(original=(16, 24))
    with torch.no_grad():
        full, neutral = pixart_by_hand(pixart, (16.0, 24.0)), pixart_by_hand(pixart, (64.0, 64.0))
    assert torch.equal(pixart_ours(pixart, OFF, told), full)
    assert torch.equal(pixart_ours(pixart, NEVER, told), neutral)
    assert float((full - neutral).abs().max()) > 1e-4
    half = pixart_ours(pixart, GammaConfig(), told)
    assert not torch.equal(half, full) and not torch.equal(half, neutral)


# --- a checkpoint of one's own --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def portraits():
    pipe = ControlConditionedPipeline.from_pipe(load_portraits().pipeline())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def checkpoint(pipe, folder, zero_init=False, extra=None, **facts):
    torch.manual_seed(3)
    made = ControlEmbedder(ControlSpec(), control_width(pipe.unet), zero_init)
    about = ControlMetadata("UNet2DConditionModel", made.dim, **{"gamma": GammaConfig(alpha=2.0)} | facts)
    return save_control(folder / "control.safetensors", made.state_dict(), about, extra)


SHORT = {"num_inference_steps": 3, "output_type": "latent", "height": 64, "width": 64}


def test_an_untrained_adapter_is_the_stock_pipeline_to_the_bit(portraits, tmp_path):
    own = portraits.load_control(checkpoint(portraits, tmp_path, zero_init=True))
    plain = StableDiffusionPipeline(**portraits.components)
    plain.set_progress_bar_config(disable=True)
    told = {"generator": [torch.Generator().manual_seed(7)], "guidance_scale": 3.0, **SHORT}
    wanted = plain(PROMPT, negative_prompt="", **told).images
    found = portraits(PROMPT, "", checkpoint=own, guidance=GuidanceConfig(3.0), seeds=[7], **SHORT)
    assert torch.equal(found.images, wanted) and not hooks(portraits.unet)
    pictures = portraits(PROMPT, checkpoint=own, seeds=[7], **SHORT | {"output_type": "pil"}).images
    assert pictures[0].size == (64, 64)


def test_a_checkpoint_is_added_as_equation_one_says(portraits, tmp_path):
    own = portraits.load_control(checkpoint(portraits, tmp_path))
    told = Told(original=(32, 48), crop=(4, 6), flip=True)
    with pytest.warns(ControlWarning, match="'alpha': 1.0"):
        found = portraits(PROMPT, "", checkpoint=own, told=told, gamma=GammaConfig(), seeds=[7], **SHORT,
                          guidance=GuidanceConfig(3.0, 1.375))  # fmt: skip
    values = own.embedder.spec.rows(
        {"flip": 1, "crop_top": 4 / 32, "crop_left": 6 / 48, "aspect": 1.0, "height": 32, "width": 48}
    )
    scheduler = type(portraits.scheduler).from_config(portraits.scheduler.config)
    scheduler.set_timesteps(3)
    x = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(7)) * scheduler.init_noise_sigma
    with torch.no_grad():
        text, none = portraits.encode_prompt([PROMPT], "cpu", 1, True, [""])
        for t in scheduler.timesteps:
            rows = scheduler.scale_model_input(x, t)
            with Injection(portraits.unet, own.embedder, values, GammaConfig(alpha=2.0)):
                full = portraits.unet(rows, t, text).sample
            null, empty = (portraits.unet(rows, t, c).sample for c in (text, none))
            x = scheduler.step(3.0 * (1.375 * full - 0.375 * null) - 2.0 * empty, t, x).prev_sample
    assert torch.allclose(found.images, x, atol=2e-5)
    assert [s.evaluations for s in found.log] == [3] * 3, "its high-level control is never null"


def test_padding_is_applied_to_prompts_and_the_checkpoints_is_used(portraits, tmp_path):
    config = PaddingConfig("replicate")
    own = portraits.load_control(checkpoint(portraits, tmp_path, zero_init=True, padding=config))
    found = portraits("a pale face", "", checkpoint=own, seeds=[7], **SHORT).images
    text, none = portraits.encode_prompt(["a pale face"], "cpu", 1, True, [""])
    with torch.no_grad():
        padded, empty = pad_text(text, [5], config)[0], pad_text(none, [2], config)[0]
    plain = StableDiffusionPipeline(**portraits.components)
    plain.set_progress_bar_config(disable=True)
    how = {"generator": [torch.Generator().manual_seed(7)], "guidance_scale": 5.0, **SHORT}
    assert torch.equal(found, plain(prompt_embeds=padded, negative_prompt_embeds=empty, **how).images)


def test_trained_weights_travel_with_the_checkpoint(tmp_path):
    pipe = ControlConditionedPipeline.from_pipe(load_portraits().pipeline())
    before = pipe.unet.conv_out.bias.detach().clone()
    pipe.load_control(checkpoint(pipe, tmp_path, extra={"base.conv_out.bias": before + 1}))
    assert torch.equal(pipe.unet.conv_out.bias, before + 1)
    path = checkpoint(pipe, tmp_path, extra={"lora.mid_block.lora_A.weight": before})
    with pytest.raises(VitrineError, match="add_adapter"):
        pipe.load_control(path)


# --- refusals -------------------------------------------------------------------------------------------------------
def test_what_does_not_fit_is_refused(xl, portraits, pixart, tmp_path):
    with pytest.raises(VitrineError, match="no size conditioning"):
        portraits(PROMPT, **SHORT)
    with pytest.raises(VitrineError, match="UNet2DConditionModel"):
        pixart.load_control(checkpoint(portraits, tmp_path))
    for how, message in (
        ({"prompt": "a text"}, "give one of them"), ({"padding": PaddingConfig()}, "as text"), ({"height": 60}, "8"),
        ({"seeds": [1, 2], "told": [FAR] * 3}, "one for each picture"), ({"reference": "own"}, "reference"),
        ({"seeds": [0], "latents": seeded(1, 4, 8, 8)}, "one of them"), ({"upscale": 0.0}, "above 0"),
    ):  # fmt: skip
        with pytest.raises(VitrineError, match=message):
            ours(xl, **how)
    with pytest.raises(VitrineError, match="one for each picture"):
        ours(xl, seeds=[1, 2, 3], **texts(2))
    for bad in ({"original": (0, 5)}, {"crop": (-1, 0)}, {"target": (5,)}, {"extra": {"colour": float("nan")}}):
        with pytest.raises(VitrineError):
            Told(**bad)
    own = portraits.load_control(checkpoint(portraits, tmp_path))
    with pytest.raises(VitrineError, match="unknown"):
        portraits(PROMPT, checkpoint=own, told=Told(extra={"colour": 1.0}), **SHORT)
    with pytest.raises(RuntimeError, match="stop"):
        ours(xl, progress=stop)
    assert not hooks(xl.unet) and not hooks(portraits.unet)


def stop(step, total, preview):
    raise RuntimeError("stop")
