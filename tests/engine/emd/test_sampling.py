"""One-step generation against diffusers, and the student preset."""

import pytest
import torch
from safetensors.torch import save_file
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.noise import seeded_noise
from vitrine.engine.diffusion.schedule import NoiseSchedule
from vitrine.engine.emd import PRESETS, StudentPreset, check_base, noise_scale, one_step, read_student
from vitrine.engine.errors import VitrineError
from vitrine.engine.network.condition import Condition

pytestmark = pytest.mark.rounding
VP = NoiseSchedule.scaled_linear()
KINDS = {"eps": "epsilon", "v": "v_prediction", "x0": "sample"}


def network(seed=0, prediction="eps"):
    torch.manual_seed(seed)
    net, calls = torch.nn.Conv2d(4, 4, 3, padding=1), []

    def call(x, t, cond):
        calls.append((x.detach().clone(), t))
        return torch.tanh(net(x))

    return Denoiser(net, VP, prediction, call), calls


@pytest.mark.parametrize("prediction", KINDS)
@pytest.mark.parametrize("noise", ["unit", "vp"])
@pytest.mark.parametrize("t", [999, 625, 399])
def test_same_as_lcm_scheduler(prediction, noise, t):
    from diffusers import LCMScheduler

    student, calls = network(prediction=prediction)
    z, preset = seeded_noise([1, 2], (4, 8, 8)), StudentPreset(timestep=t, noise=noise)
    with torch.no_grad():
        ours = one_step(student, z, Condition(), preset)
        assert len(calls) == 1, "one network call"
        scheduler = LCMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type=KINDS[prediction]
        )
        scheduler.set_timesteps(timesteps=[t])
        sigma_vp = float((1 - scheduler.alphas_cumprod[t].double()).sqrt())
        latents = z * scheduler.init_noise_sigma * (1 if noise == "unit" else sigma_vp)
        output = student.call(scheduler.scale_model_input(latents, t), torch.full((2,), float(t)), Condition())
        theirs = scheduler.step(output, scheduler.timesteps[0], latents).prev_sample
    assert (ours - theirs).norm() / theirs.norm() < 1e-6


def test_the_wrong_convention_shows():
    student, _ = network()
    z = seeded_noise([1], (4, 8, 8))
    with torch.no_grad():
        unit, vp = (one_step(student, z, Condition(), StudentPreset(timestep=399, noise=n)) for n in ("unit", "vp"))
    assert (unit - vp).norm() / unit.norm() > 0.1
    assert noise_scale(VP, StudentPreset(timestep=399, noise="vp")) == pytest.approx(0.7576, abs=1e-4)


def test_seeds_are_per_picture():
    student, _ = network()
    with torch.no_grad():
        many = one_step(student, seeded_noise([3, 4, 5], (4, 8, 8)), Condition(), StudentPreset())
        one = one_step(student, seeded_noise([4], (4, 8, 8)), Condition(), StudentPreset())
    torch.testing.assert_close(many[1:2], one, rtol=1e-5, atol=1e-5)  # float32 convolutions, times 1 / alpha = 14.6


def test_preset_round_trips_through_the_header(tmp_path):
    preset = StudentPreset("SD1.5", 625.0, "eps", "vp", 0.18215, 1.0, 2.0, (4, 64, 64), 4, 0.16, 0.01)
    assert StudentPreset.from_metadata(preset.to_metadata()) == preset
    save_file({"lora_unet_x.lora_down.weight": torch.ones(1)}, tmp_path / "s.safetensors", preset.to_metadata())
    assert read_student(tmp_path / "s.safetensors")[0] == preset
    assert PRESETS["DMD2 SDXL 1-step (UNet)"].timestep == 399


def test_clear_refusals(tmp_path):
    save_file({"lora_unet_x.lora_down.weight": torch.ones(1)}, tmp_path / "bare.safetensors")
    with pytest.raises(VitrineError, match="student preset: given none in bare"):
        read_student(tmp_path / "bare.safetensors")
    save_file({"unet.x.lora_A.weight": torch.ones(1)}, tmp_path / "peft.safetensors", StudentPreset().to_metadata())
    with pytest.raises(VitrineError, match="PEFT"):
        read_student(tmp_path / "peft.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"nonsense")
    with pytest.raises(VitrineError, match="cannot be read"):
        read_student(tmp_path / "broken.safetensors")
    with pytest.raises(VitrineError, match="distilled from SDXL"):
        check_base(StudentPreset("SDXL"), "SD1.5")
    for bad in ({"guidance": 7.5}, {"noise": "x"}, {"timestep": 2000.0}, {"prediction": "x"}):
        with pytest.raises(VitrineError):
            StudentPreset(**bad)
    with pytest.raises(VitrineError, match="colour"):
        StudentPreset.from_dict({"colour": 1})


def test_a_consistency_model_is_told_its_guidance():
    """Without the embedding its output was off by 3.3 %, and nothing said so."""
    from diffusers import LatentConsistencyModelPipeline, LCMScheduler
    from vitrine_tests import models

    unet = models.unet(time_cond_proj_dim=32)
    student = Denoiser.from_diffusers(unet, LCMScheduler())
    z, text = seeded_noise([1, 2], (4, 16, 16)), torch.randn(2, 5, models.TEXT)
    embedding = LatentConsistencyModelPipeline.get_guidance_scale_embedding
    for guidance, preset in ((8.5, StudentPreset()), (4.0, StudentPreset(trained_guidance=4.0))):
        with torch.no_grad():
            told = embedding(None, torch.full((2,), guidance - 1), 32)
            theirs = unet(z, torch.tensor([999, 999]), text, timestep_cond=told).sample
            untold = unet(z, torch.tensor([999, 999]), text).sample
            alpha, sigma = VP.scales(999)
            x0 = one_step(student, z, Condition(text), preset)
        assert (x0 - (z - float(sigma) * theirs) / float(alpha)).abs().max() / x0.abs().max() < 1e-5
        assert (theirs - untold).abs().max() > 1e-3
