"""Control conditioning in diffusers: a PixArt-shaped model, a checkpoint on the portraits model, and refusals."""

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    StableDiffusionPipeline,
)
from vitrine.engine.control import (
    ControlWarning,
    GammaConfig,
    GuidanceConfig,
    Injection,
    PaddingConfig,
    SizeCondition,
    pad_text,
)
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines import (
    ControlConditionedPipeline,
)
from vitrine.engine.portraits import load_portraits
from vitrine_tests.pipelines.controlled import (
    FAR,
    NEVER,
    OFF,
    PROMPT,
    SHORT,
    checkpoint,
    ours,
    pixart_pipeline,
    seeded,
    texts,
    xl_pipeline,
)

pytestmark = pytest.mark.rounding


@pytest.fixture
def xl():
    return xl_pipeline()


@pytest.fixture(scope="module")
def pixart():
    return pixart_pipeline()


def pixart_ours(pipe, gamma, told):
    masks = {f"{n}prompt_attention_mask": torch.ones(1, 7) for n in ("", "negative_")}
    embeds = {k: v for k, v in texts().items() if "pooled" not in k} | masks
    settings = {"guidance": GuidanceConfig(3.0), "num_inference_steps": 4, "output_type": "latent"}
    return pipe(size_condition=told, gamma=gamma, **settings, **embeds).images


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
    told = SizeCondition(original=(16, 24))
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


def test_an_untrained_adapter_is_the_stock_pipeline_to_the_bit(portraits, tmp_path, no_hooks_left):
    own = portraits.load_control(checkpoint(portraits, tmp_path, zero_init=True))
    plain = StableDiffusionPipeline(**portraits.components)
    plain.set_progress_bar_config(disable=True)
    told = {"generator": [torch.Generator().manual_seed(7)], "guidance_scale": 3.0, **SHORT}
    wanted = plain(PROMPT, negative_prompt="", **told).images
    found = portraits(PROMPT, "", checkpoint=own, guidance=GuidanceConfig(3.0), seeds=[7], **SHORT)
    assert torch.equal(found.images, wanted)
    no_hooks_left(portraits.unet)
    pictures = portraits(PROMPT, checkpoint=own, seeds=[7], **SHORT | {"output_type": "pil"}).images
    assert pictures[0].size == (64, 64)


def test_a_checkpoint_is_added_as_equation_one_says(portraits, tmp_path):
    own = portraits.load_control(checkpoint(portraits, tmp_path))
    told = SizeCondition(original=(32, 48), crop=(4, 6), flip=True)
    with pytest.warns(ControlWarning, match="'alpha': 1.0"):
        found = portraits(
            PROMPT,
            "",
            checkpoint=own,
            size_condition=told,
            gamma=GammaConfig(),
            seeds=[7],
            **SHORT,
            guidance=GuidanceConfig(3.0, 1.375),
        )
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
def test_what_does_not_fit_is_refused(xl, portraits, pixart, tmp_path, no_hooks_left):
    with pytest.raises(VitrineError, match="no size conditioning"):
        portraits(PROMPT, **SHORT)
    with pytest.raises(VitrineError, match="UNet2DConditionModel"):
        pixart.load_control(checkpoint(portraits, tmp_path))
    for how, message in (
        ({"prompt": "a text"}, "give one of them"),
        ({"padding": PaddingConfig()}, "as text"),
        ({"height": 60}, "8"),
        ({"seeds": [1, 2], "size_condition": [FAR] * 3}, "one for each picture"),
        ({"reference": "own"}, "reference"),
        ({"seeds": [0], "latents": seeded(1, 4, 8, 8)}, "one of them"),
        ({"upscale": 0.0}, "above 0"),
    ):
        with pytest.raises(VitrineError, match=message):
            ours(xl, **how)
    with pytest.raises(VitrineError, match="one for each picture"):
        ours(xl, seeds=[1, 2, 3], **texts(2))
    for bad in ({"original": (0, 5)}, {"crop": (-1, 0)}, {"target": (5,)}, {"extra": {"colour": float("nan")}}):
        with pytest.raises(VitrineError):
            SizeCondition(**bad)
    own = portraits.load_control(checkpoint(portraits, tmp_path))
    with pytest.raises(VitrineError, match="unknown"):
        portraits(PROMPT, checkpoint=own, size_condition=SizeCondition(extra={"colour": 1.0}), **SHORT)
    with pytest.raises(RuntimeError, match="stop"):
        ours(xl, callback_on_step_end=stop)
    no_hooks_left(xl.unet, portraits.unet)


def stop(pipe, step, timestep, tensors):
    raise RuntimeError("stop")
