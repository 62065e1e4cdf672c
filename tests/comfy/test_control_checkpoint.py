"""Control nodes in real ComfyUI on the portraits model: a checkpoint of its own, padding, the meter, refusals."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import EulerDiscreteScheduler
from vitrine.engine.control import (
    ControlEmbedder,
    ControlMetadata,
    ControlSpec,
    GammaConfig,
    GuidanceConfig,
    PaddingConfig,
    SizeCondition,
    control_width,
    pad_text,
    save_control,
)
from vitrine.engine.pipelines import ControlConditionedPipeline
from vitrine.engine.portraits import load_portraits

PROMPT = "a smiling pale face with curly red hair glasses navy shirt on yellow"
FAR = {"width": 24, "height": 16, "crop_left": 4, "crop_top": 8}
CURVE = {
    "form": "power_cos",
    "alpha": 1.0,
    "clock": "native",
    "reference": "target",
    "reference_width": 48,
    "reference_height": 40,
}
NESTED = {"cfg": 3.0, "size_guidance": 1.375, "nesting": "control_inner"}
RUN = {"seed": 3, "steps": 4, "sampler_name": "euler", "scheduler": "ddim_uniform", "denoise": 1.0, "flip": False}


def latent():
    return {"samples": torch.zeros(1, 4, 16, 16)}


def close(a, b):
    """1e-5 of the largest number."""
    return float((a - b).abs().max()) < 1e-5 * max(1.0, float(b.abs().max()))


# --- a checkpoint of one's own --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def portraits(comfy):
    model, clip, _ = comfy.call("VitrineLoadPortraits")
    pipe = ControlConditionedPipeline.from_pipe(load_portraits().pipeline())
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config, timestep_spacing="leading")
    pipe.set_progress_bar_config(disable=True)
    return SimpleNamespace(model=model, clip=clip, pipe=pipe, scale=pipe.vae.config.scaling_factor)


@pytest.fixture(scope="module")
def folder(comfy, tmp_path_factory):
    import folder_paths

    made = tmp_path_factory.mktemp("controls")
    folder_paths.add_model_folder_path("vitrine_control", str(made))
    return made


def write(pipe, path, family="UNet2DConditionModel", extra=None, spec=None):
    torch.manual_seed(3)
    made = ControlEmbedder(spec or ControlSpec(), control_width(pipe.unet))
    about = ControlMetadata(family, made.dim, made.spec, GammaConfig(alpha=2.0))
    return save_control(path, made.state_dict(), about, extra)


def encode(comfy, clip, text):
    with torch.inference_mode():
        return comfy.nodes.NODE_CLASS_MAPPINGS["CLIPTextEncode"]().encode(clip, text)[0]


@pytest.mark.parametrize("beta", [1.0, 1.375])
def test_a_checkpoint_samples_as_in_the_pipeline(comfy, portraits, folder, beta):
    bias = portraits.pipe.unet.conv_out.bias.detach().clone()
    path = write(portraits.pipe, folder / "own.safetensors", extra={"base.conv_out.bias": bias + 0.01})
    model, report = comfy.call("VitrineLoadControl", model=portraits.model, file="own.safetensors")
    assert "flip, crop_top" in report and "alpha 2" in report
    positive, negative = (encode(comfy, portraits.clip, t) for t in (PROMPT, ""))
    told = {"width": 48, "height": 32, "crop_left": 6, "crop_top": 4, "flip": True}
    made, _, text = comfy.call(
        "VitrineControlConditionedSampler",
        model=model,
        positive=positive,
        negative=negative,
        latent_image=latent(),
        **CURVE | RUN | told | {"cfg": 3.0, "size_guidance": beta, "nesting": "control_inner"},
    )
    assert "alpha" in text.splitlines()[0], "the report says that the checkpoint's curve was used"
    own = portraits.pipe.load_control(path)
    scheduler = portraits.pipe.scheduler
    scheduler.set_timesteps(4)
    noise = torch.randn(1, 4, 16, 16, generator=torch.manual_seed(3)) * scheduler.sigmas[0] / scheduler.init_noise_sigma
    try:
        ours = portraits.pipe(
            PROMPT,
            "",
            checkpoint=own,
            size_condition=SizeCondition((32, 48), (4, 6), None, True),
            guidance=GuidanceConfig(3.0, beta),
            latents=noise,
            num_inference_steps=4,
            output_type="latent",
        )
    finally:
        portraits.pipe.unet.conv_out.bias.data.copy_(bias)
    assert close(made["samples"] * portraits.scale, ours.images)
    assert f"{sum(s.evaluations for s in ours.log)} evaluations" in text


def test_a_checkpoint_without_values_changes_nothing(comfy, portraits, folder):
    write(portraits.pipe, folder / "plain.safetensors")
    model, _ = comfy.call("VitrineLoadControl", model=portraits.model, file="plain.safetensors")
    positive, negative = (encode(comfy, portraits.clip, t) for t in (PROMPT, ""))

    def core(model, positive):
        with torch.inference_mode():
            sampler = comfy.nodes.NODE_CLASS_MAPPINGS["KSampler"]()
            (out,) = sampler.sample(model, 3, 3, 3.0, "euler", "normal", positive, negative, latent(), 1.0)
            return out["samples"].clone()

    plain = core(portraits.model, positive)
    assert torch.equal(core(model, positive), plain)
    (told,) = comfy.call("VitrineControlValues", conditioning=positive, target_width=64, target_height=64, **FAR)
    assert not close(core(model, told), plain)
    assert torch.equal(core(portraits.model, told), plain), "other models ignore the values"


# --- text and meter -------------------------------------------------------------------------------------------------
def test_padding_counts_the_prompt_and_leaves_the_original(comfy, portraits):
    text = "a pale face"
    given = encode(comfy, portraits.clip, text)
    settings = {"conditioning": given, "mode": "noisy_replicate", "beta_txt": 0.05, "scope": "copies"}
    settings["axis"] = "channel"
    (counted,) = comfy.call("VitrineNoisyReplicatePadding", **settings, seed=4, clip=portraits.clip, text=text)
    (told,) = comfy.call("VitrineNoisyReplicatePadding", **settings, seed=4, tokens=5)
    wanted = pad_text(given[0][0], [5], PaddingConfig(beta_txt=0.05), 4)[0]
    assert torch.equal(counted[0][0], wanted) and torch.equal(told[0][0], wanted)
    assert counted[0][0] is not given[0][0] and not torch.equal(given[0][0], wanted)
    long = " ".join(["face"] * 22)
    full = encode(comfy, portraits.clip, long)
    (same,) = comfy.call(
        "VitrineNoisyReplicatePadding", **settings | {"conditioning": full}, seed=4, clip=portraits.clip, text=long
    )
    assert full[0][0].shape[1] == 24 and torch.equal(same[0][0], full[0][0])
    masked = [[given[0][0], {"attention_mask": torch.tensor([[1] * 6 + [0] * 18])}]]
    (found,) = comfy.call("VitrineNoisyReplicatePadding", **settings | {"conditioning": masked}, seed=4)
    assert torch.equal(found[0][0], pad_text(given[0][0], [6], PaddingConfig(beta_txt=0.05), 4)[0])
    assert bool(found[0][1]["attention_mask"].all()) and not bool(masked[0][1]["attention_mask"].all())
    with pytest.raises(ValueError, match="clip and text"):
        comfy.call("VitrineNoisyReplicatePadding", **settings, seed=4)
    with pytest.raises(ValueError, match="2 prompts, and the tokens of one"):
        comfy.call("VitrineNoisyReplicatePadding", **settings | {"conditioning": given * 2}, seed=4, tokens=5)
    longer = [[torch.cat([given[0][0]] * 2, 1), {}]]  # as SD3 has CLIP's states and then T5's
    with pytest.raises(ValueError, match="48 positions, for encoders of 24"):
        asked = settings | {"conditioning": longer}
        comfy.call("VitrineNoisyReplicatePadding", **asked, seed=4, clip=portraits.clip, text=text)


def test_tokens_are_counted_by_the_encoder_that_made_the_states(comfy):
    """Flux's prompt is T5's; CLIP's tokens were counted, which are fewer."""
    from vitrine.nodes.comfy.conditioning import token_count
    from vitrine_tests.comfy import tiny_encoders

    clip, word = tiny_encoders.clip("flux", 32), "extraordinarily"
    tokens = clip.tokenize(word)
    sizes = {name: sum(map(len, chunks)) for name, chunks in tokens.items()}
    counts = {name: token_count(clip, word, size) for name, size in sizes.items()}
    assert len(set(sizes.values())) == len(sizes) == 2 and len(set(counts.values())) == 2


# --- refusals and graphs --------------------------------------------------------------------------------------------
def test_what_does_not_fit_is_refused(comfy, portraits, folder):
    with pytest.raises(ValueError, match="other models take no sizes"):
        comfy.call("VitrineApplyGammaSchedule", model=portraits.model, **CURVE)
    positive = encode(comfy, portraits.clip, PROMPT)
    told = {"model": portraits.model, "positive": positive, "negative": positive}
    with pytest.raises(ValueError, match="other models take no sizes"):
        comfy.call("VitrineControlCFGGuider", **told, **NESTED)
    (guider,) = comfy.call("VitrineControlCFGGuider", **told, **NESTED | {"size_guidance": 1.0})
    assert guider.config.scale == 3.0
    write(portraits.pipe, folder / "mine.safetensors")
    model, _ = comfy.call("VitrineLoadControl", model=portraits.model, file="mine.safetensors")
    with pytest.raises(ValueError, match="Size and Crop Values before it"):
        comfy.call("VitrineControlCFGGuider", **told | {"model": model}, **NESTED)
    write(portraits.pipe, folder / "dit.safetensors", "PixArtTransformer2DModel")
    with pytest.raises(
        ValueError, match=r"given a UNet2DConditionModel of width \d+; accepted: a PixArtTransformer2DModel of"
    ):
        comfy.call("VitrineLoadControl", model=portraits.model, file="dit.safetensors")
    write(portraits.pipe, folder / "lora.safetensors", extra={"lora.x": torch.ones(1)})
    with pytest.raises(ValueError, match="merge them"):
        comfy.call("VitrineLoadControl", model=portraits.model, file="lora.safetensors")
    values = {"conditioning": positive, "target_width": 8, "target_height": 8, **FAR}
    for extra in ("colour", "colour = blue"):
        with pytest.raises(ValueError, match="name = number"):
            comfy.call("VitrineControlValues", **values, extra=extra)
    (kept,) = comfy.call("VitrineControlValues", **values, extra="a = 1\nb: -2e-1")
    assert kept[0][1]["vitrine_sizes"].extra == {"a": 1.0, "b": -0.2}
