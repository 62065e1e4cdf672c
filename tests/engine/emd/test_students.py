"""Published students: levels are those of the schedulers that their cards name, and so are the steps."""

import pytest
import torch
from diffusers import (
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    LCMScheduler,
    TCDScheduler,
)
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.noise import seeded_noise
from vitrine.engine.emd import (
    ONE_STEP,
    PRESETS,
    STUDENTS,
    Base,
    FirstSteps,
    StudentSampling,
    check_student,
    detect,
    few_steps,
    mean_distance,
    measure_variety,
    noisy_text,
    small_pixels,
    vendi_score,
)
from vitrine.engine.errors import VitrineError
from vitrine.engine.network.condition import Condition
from vitrine.engine.pipelines.emd import student_scheduler
from vitrine_tests import models
from vitrine_tests.machine import stock

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
NAMES = {
    "sdxl_lightning_4step_lora.safetensors": "SDXL-Lightning, 4 steps",
    "sdxl_lightning_1step_x0.safetensors": "SDXL-Lightning, 1 step",
    "Hyper-SDXL-1step-lora.safetensors": "Hyper-SD, 1 step (LoRA)",
    "Hyper-SDXL-1step-Unet.safetensors": "Hyper-SDXL, 1 step (UNet)",
    "Hyper-SD15-8steps-lora.safetensors": "Hyper-SD, 8 steps",
    "Hyper-SD15-8steps-CFG-lora.safetensors": None,
    "dmd2_sdxl_1step_unet_fp16.bin": "DMD2 SDXL, 1 step",
    "dmd2_sdxl_4step_lora.safetensors": "DMD2 SDXL, 4 steps",
    "lcm-lora-sdv1-5.safetensors": "LCM-LoRA, 4 steps",
    "pcm_sdxl_smallcfg_2step_converted.safetensors": "PCM small guidance, 2 steps",
    "pcm_sdxl_normalcfg_8step_converted.safetensors": None,
    "TCD-SDXL-LoRA.safetensors": "TCD-LoRA, 4 steps",
    "sd_turbo.safetensors": "SD-Turbo, 1 step",
    "sd_xl_turbo_1.0_fp16.safetensors": "SDXL-Turbo, 1 step",
    "z_image_turbo_bf16.safetensors": "Z-Image-Turbo, 8 steps",
    "flux1-schnell.safetensors": "FLUX.1 schnell, 4 steps",
    "Qwen-Image-Lightning-8steps-V1.1.safetensors": "Qwen-Image-Lightning, 8 steps",
    "Qwen-Image-Edit-Lightning-4steps-V1.0.safetensors": None,
    "my_style.safetensors": None,
}


@pytest.mark.parametrize("file", NAMES)
def test_a_file_is_known_by_its_name(file):
    found = detect(file)
    assert (found and found.name) == NAMES[file]


def test_levels_are_those_of_the_schedulers():
    for steps in (2, 4, 8):
        trailing = EulerDiscreteScheduler(timestep_spacing="trailing", **BETAS)
        trailing.set_timesteps(steps)
        assert STUDENTS[f"SDXL-Lightning, {steps} steps"].timesteps == tuple(trailing.timesteps.tolist())
        assert STUDENTS[f"Hyper-SD, {steps} steps"].timesteps == tuple(trailing.timesteps.tolist())
    for name, scheduler in (("LCM-LoRA", LCMScheduler()), ("TCD-LoRA", TCDScheduler())):
        scheduler.set_timesteps(4)
        assert STUDENTS[f"{name}, 4 steps"].timesteps == tuple(float(t) for t in scheduler.timesteps)
    for name, shift, steps in (("Z-Image-Turbo", 3.0, 8), ("Qwen-Image-Lightning", 3.0, 4), ("FLUX.1 schnell", 1.0, 4)):
        flow = FlowMatchEulerDiscreteScheduler(shift=shift)
        flow.set_timesteps(sigmas=[1 - i / steps for i in range(steps)])
        assert STUDENTS[f"{name}, {steps} steps"].timesteps == pytest.approx(flow.timesteps.tolist(), abs=1e-2)


def test_one_step_presets_keep_their_names():
    assert PRESETS.items() <= ONE_STEP.items() and len(ONE_STEP) > len(PRESETS)
    assert len(set(ONE_STEP.values())) == len(ONE_STEP), "no student under two names"
    assert ONE_STEP["SDXL-Lightning, 1 step"].prediction == "x0"
    with pytest.raises(VitrineError, match="one of 4 steps"):
        _ = STUDENTS["TCD-LoRA, 4 steps"].one_step
    for bad in ({"timesteps": (1.0, 2.0)}, {"timesteps": ()}, {"sampler": "heun"}, {"eta": 2.0}):
        with pytest.raises(VitrineError):
            StudentSampling(**{"base": "", "timesteps": (999.0,)} | bad)
    one = STUDENTS["DMD2 SDXL, 4 steps"]
    assert StudentSampling.from_dict(one.to_dict()) == one


def test_a_preset_on_another_base_is_refused():
    net = models.unet(cross_attention_dim=768, block_out_channels=(16, 32))
    check_student(STUDENTS["Hyper-SD, 4 steps"], net)
    for name in ("SDXL-Lightning, 4 steps", "SD-Turbo, 2 steps", "Z-Image-Turbo, 8 steps", "FLUX.1 schnell, 4 steps"):
        with pytest.raises(VitrineError, match="preset of this model"):
            check_student(STUDENTS[name], net)
    check_student(STUDENTS["FLUX.1 schnell, 4 steps"], models.flux())
    with pytest.raises(VitrineError, match="Flux.1 dev"):
        check_student(STUDENTS["FLUX.1 schnell, 4 steps"], models.flux(guidance_embeds=True))


TINY = {
    name: StudentSampling.from_dict(STUDENTS[name].to_dict() | {"base": ""})
    for name in (
        "SDXL-Lightning, 4 steps",
        "LCM-LoRA, 4 steps",
        "TCD-LoRA, 4 steps",
        "SD-Turbo, 4 steps",
        "DMD2 SDXL, 4 steps",
        "SDXL-Lightning, 1 step",
        "LCM (full), 4 steps",
    )
}


@pytest.mark.parametrize("name", TINY)
def test_steps_are_those_of_diffusers(name):
    """The stock pipeline with our scheduler and arguments, against our own loop, noise and all."""
    pipe, sampling = stock.stock("sd"), TINY[name]
    if sampling.trained_guidance:
        pipe.register_modules(
            unet=models.unet(time_cond_proj_dim=32, cross_attention_dim=pipe.unet.config.cross_attention_dim)
        )
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler, told = student_scheduler(pipe, sampling)
    seeds, calls = [3, 4], []
    handle = pipe.unet.register_forward_hook(lambda m, i, o: calls.append(len(i[0])))
    theirs = pipe(
        ["a face"] * 2, generator=[torch.Generator().manual_seed(s) for s in seeds], output_type="latent", **told
    )
    handle.remove()
    assert calls == [2] * len(sampling.timesteps), "one call a step, without guidance"
    with torch.no_grad():
        cond = Condition(pipe.encode_prompt(["a face"] * 2, "cpu", 1, False)[0])
        student = Denoiser.from_diffusers(pipe.unet, EulerDiscreteScheduler(**BETAS))
        z = seeded_noise(seeds, tuple(theirs.images.shape[1:]))
        ours = few_steps(student, z, cond, sampling, seeds)
    # diffusers' TCD ends at the level of t = 0, not at none
    bound = 0.05 if sampling.sampler == "tcd" else 1e-3
    assert (ours - theirs.images).norm() / ours.norm() < bound


def conv(seed, schedule):
    torch.manual_seed(seed)
    net, calls = torch.nn.Conv2d(4, 4, 3, padding=1), []

    def call(x, t, cond):
        calls.append((len(x), float(t[0])))
        return torch.tanh(net(x))

    return Denoiser(net, schedule, "flow" if schedule.kind == "flow" else "eps", call), calls


@pytest.mark.parametrize("name", ["SDXL-Lightning, 4 steps", "DMD2 SDXL, 4 steps", "Z-Image-Turbo, 8 steps"])
def test_the_base_takes_the_first_step(name):
    from vitrine.engine.diffusion.schedule import NoiseSchedule

    sampling, z = STUDENTS[name], seeded_noise([1, 2], (4, 8, 8))
    schedule = NoiseSchedule.flow() if "Z-Image" in name else NoiseSchedule.scaled_linear()
    (student, mine), (teacher, theirs) = conv(0, schedule), conv(1, schedule)
    alone = few_steps(student, z, Condition(), sampling, [1, 2])
    count = len(sampling.timesteps)
    assert [t for _, t in mine] == pytest.approx(sampling.timesteps) and alone.dtype == torch.float32
    mine.clear()
    pair = few_steps(student, z, Condition(), sampling, [1, 2], Base(teacher, Condition()))
    assert len(mine) + len(theirs) == count, "equal network calls"
    assert theirs == [(2, pytest.approx(sampling.timesteps[0]))] and not torch.equal(pair, alone)
    if sampling.sampler == "euler":
        same = few_steps(student, z, Condition(), sampling, [1, 2], Base(student, Condition()))
        torch.testing.assert_close(same, alone, rtol=1e-4, atol=1e-4)  # the student as its own base
    theirs.clear()
    few_steps(student, z, Condition(), sampling, [1, 2], Base(teacher, Condition(), FirstSteps(1, 3)))
    assert [rows for rows, _ in theirs] == [2] * 3
    with pytest.raises(VitrineError, match="no further step"):
        few_steps(student, z, Condition(), sampling, [1, 2], Base(teacher, Condition(), FirstSteps(count)))
    one = few_steps(student, z[1:], Condition(), sampling, [2], Base(teacher, Condition()))
    torch.testing.assert_close(one, pair[1:], rtol=1e-4, atol=1e-4)


def test_measures_of_variety():
    one, many = torch.ones(6, 8), torch.eye(6, 8)
    assert mean_distance(one) == pytest.approx(0, abs=1e-9) and vendi_score(one) == pytest.approx(1)
    assert mean_distance(many) == pytest.approx(1) and vendi_score(many) == pytest.approx(6)
    pairs = torch.eye(3, 8).repeat_interleave(2, 0)
    assert vendi_score(pairs) == pytest.approx(3) and mean_distance(pairs) == pytest.approx(12 / 15)
    with pytest.raises(VitrineError, match="several seeds"):
        vendi_score(torch.ones(1, 4))


def test_noise_on_the_text_is_each_pictures_own():
    text = Condition(torch.randn(1, 5, 16), torch.ones(1, 3))
    text.text[0, 4] = 0
    assert noisy_text(text, 0.0, [1]) is text
    many, one = noisy_text(text, 0.5, [7, 8]), noisy_text(text, 0.5, [8])
    assert torch.equal(many.text[1], one.text[0]) and not torch.equal(many.text[0], many.text[1])
    assert float(many.text[:, 4].abs().max()) == 0 and torch.equal(many.pooled, torch.ones(2, 3))
    added = (many.text - text.text)[:, :4]
    ratio = added.std(dim=(0, 2)) / text.text[0, :4].std(dim=1)
    assert bool(((ratio > 0.3) & (ratio < 0.75)).all())


def test_variety_beside_a_reference():
    """A collapsed student has no recall; noise has distance, but no precision."""
    gen = torch.Generator().manual_seed(0)
    real, noise = torch.randn(12, 4, generator=gen), 50 + 30 * torch.randn(8, 4, generator=gen)
    same = real[:1] + 1e-3 * torch.randn(8, 4, generator=gen)
    collapsed, spoiled, alike = (measure_variety(f, real) for f in (same, noise, real[:8]))
    assert collapsed.distance < 1e-3 and collapsed.vendi < 1.1 and collapsed.recall <= 1 / 12
    assert spoiled.precision == 0 and alike.precision == 1 and alike.recall > collapsed.recall
    assert measure_variety(real)[2:] == (None, None)
    with pytest.raises(VitrineError, match="3 or more"):
        measure_variety(real[:2], real)
    pictures = torch.zeros(2, 3, 32, 32)
    pictures[1, :, :16] = 1
    features = small_pixels(pictures)
    assert features.shape == (2, 3 * 16 * 16) and measure_variety(features).distance == pytest.approx(1.0)
