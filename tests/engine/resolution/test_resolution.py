"""Eq. 3 against its neighbours and real schedulers, plans and what they refuse."""

import json
import math

import pytest
import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeunDiscreteScheduler,
)
from safetensors.torch import save_file
from vitrine.engine.diffusion.schedule import NoiseSchedule
from vitrine.engine.errors import VitrineError
from vitrine.engine.resolution import (
    ModelFacts,
    Positions,
    ResolutionTransferConfig,
    plan_transfer,
    read_metadata,
    relabel,
    resample,
    scaled_guidance,
    shift_abar,
    shift_grid,
    shift_tau,
    size_ratio,
)
from vitrine.engine.resolution.schedulers import own_shift, transferred_scheduler
from vitrine.engine.resolution.shift import (
    betas_of,
    flux_shift,
    nearest_timestep,
    trained_betas,
)

pytestmark = pytest.mark.rounding
SD = NoiseSchedule.scaled_linear()
ABAR = 1 / (1 + (2 * SD.log_sigmas).exp())
SIGMA = SD.log_sigmas.exp()
SD_BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def config(target=(1024, 1024), train=(512, 512), **more):
    return ResolutionTransferConfig(target, train, **more)


# --- Eq. 3 --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("r", [1.5, 2.0, 4.0])
def test_eq3_multiplies_sigma(r):
    moved = shift_abar(ABAR, r)
    torch.testing.assert_close(torch.sqrt((1 - moved) / moved), r * SIGMA, rtol=1e-12, atol=0)
    gap = torch.log(moved / (1 - moved)) - torch.log(ABAR / (1 - ABAR))
    assert gap.std() < 1e-12 and abs(float(gap.mean()) + 2 * math.log(r)) < 1e-12
    torch.testing.assert_close(shift_abar(moved, 3.0), shift_abar(ABAR, 3 * r), rtol=1e-12, atol=0)
    torch.testing.assert_close(shift_abar(moved, 1 / r), ABAR, rtol=1e-12, atol=0)
    torch.testing.assert_close(relabel(SD, r).log_sigmas.exp(), r * SIGMA, rtol=1e-12, atol=0)


def test_eq3_at_one_is_the_identity_bit_for_bit():
    assert torch.equal(shift_abar(ABAR, 1.0), ABAR) and torch.equal(relabel(SD, 1.0).log_sigmas, SD.log_sigmas)
    tau = torch.linspace(0, 1, 101, dtype=torch.float64)
    assert torch.equal(shift_tau(tau, 1.0), tau)
    assert torch.equal(shift_grid(SIGMA, 1.0, float(SIGMA[-1])), SIGMA)


def test_eq3_table():
    rows = {
        0: (0.999150, 0.996609, 0.986571),
        100: (0.894223, 0.678815, 0.345707),
        250: (0.673793, 0.340536, 0.114336),
        500: (0.276333, 0.087144, 0.023309),
        750: (0.056170, 0.014660, 0.003706),
        999: (0.004660, 0.001169, 0.000293),
    }
    for t, wanted in rows.items():
        found = [ABAR[t], shift_abar(ABAR, 2.0)[t], shift_abar(ABAR, 4.0)[t]]
        assert all(abs(float(f) - w) < 5.1e-7 for f, w in zip(found, wanted, strict=True)), t
    assert abs(float(SIGMA[-1]) - 14.6146) < 5e-5 and abs(float(2 * SIGMA[500]) - 3.2366) < 5e-5


@pytest.mark.parametrize(("r", "low", "high"), [(2.0, 0.00339, 0.01204), (4.0, 0.00624, 0.01343)])
def test_betas_make_a_scheduler_that_has_the_table(r, low, high):
    betas = trained_betas(SD, r)
    assert abs(min(betas) - low) < 1e-5 and abs(max(betas) - high) < 1e-5
    for kind in (DDIMScheduler, EulerDiscreteScheduler):
        found = kind(trained_betas=betas).alphas_cumprod.double()
        torch.testing.assert_close(found, shift_abar(ABAR, r), rtol=1e-5, atol=0)
        assert bool((found.diff() < 0).all())
    with pytest.raises(VitrineError, match="abar table"):
        betas_of(ABAR.flip(0))


def test_pooling_argument():
    gen = torch.Generator().manual_seed(0)
    x0 = torch.randn(1, 1, 1000, 1000, generator=gen, dtype=torch.float64)
    big = x0.repeat_interleave(2, -1).repeat_interleave(2, -2)
    noisy = big + 2 * 0.7 * torch.randn(big.shape, generator=gen, dtype=torch.float64)
    rest = torch.nn.functional.avg_pool2d(noisy, 2) - x0
    assert abs(float(rest.std()) - 0.7) < 2e-3


@pytest.mark.parametrize("r", [0.5, 1.5, 2.0])
def test_neighbours(r):
    cascade = torch.sigmoid(torch.log(ABAR / (1 - ABAR)) + 2 * math.log(1 / r))
    torch.testing.assert_close(cascade, shift_abar(ABAR, r), rtol=1e-12, atol=0)
    cog = [CogVideoXDDIMScheduler(snr_shift_scale=k, **SD_BETAS).alphas_cumprod.double() for k in (1.0, r**2)]
    torch.testing.assert_close(cog[1], shift_abar(cog[0], r), rtol=1e-5, atol=0)
    tau = torch.linspace(0.01, 1, 100, dtype=torch.float64)
    ours, flow = shift_tau(tau, r), FlowMatchEulerDiscreteScheduler(shift=r)
    flow.set_timesteps(sigmas=tau.flip(0).tolist())
    torch.testing.assert_close(flow.sigmas[:-1].double(), ours.flip(0), rtol=1e-6, atol=0)
    inner = tau[:-1]  # simple diffusion: log-SNR + 2 ln(noise_d / image_d), image_d = r noise_d
    sigma = inner / (1 - inner)
    torch.testing.assert_close(ours[:-1] / (1 - ours[:-1]), r * sigma, rtol=1e-10, atol=0)


def test_variance_variable_needs_the_square():
    v, moved = (s**2 / (1 + s**2) for s in (SIGMA, 2 * SIGMA))
    torch.testing.assert_close(shift_tau(v, 4.0), moved, rtol=1e-10, atol=0)
    assert (shift_tau(v, 2.0) - moved).abs().max() > 0.1


# --- relabel and resample -----------------------------------------------------------------------------------------
def test_what_the_network_is_told():
    scaled, t = relabel(SD, 2.0), torch.arange(1000, dtype=torch.float64)
    assert torch.equal(nearest_timestep(scaled, 2 * SIGMA), t)
    assert torch.equal(nearest_timestep(SD, SIGMA), t)


def test_resampling_keeps_both_ends():
    grid = torch.cat([SIGMA[torch.arange(999, -1, -37)], torch.zeros(1)])
    sigmas, timesteps = resample(SD, grid, 2.0)
    assert float(sigmas[0]) == float(SIGMA[-1]) and float(sigmas[-1]) == 0 and len(sigmas) == len(grid)
    assert bool((sigmas.diff() < 0).all()) and bool((sigmas[1:-1] > 1.05 * grid[1:-1]).all())
    assert abs(float(sigmas[-2] / (2 * grid[-2])) - 1) < 0.01, "far below the top it is r sigma"
    assert torch.equal(timesteps, nearest_timestep(SD, sigmas))
    with pytest.raises(VitrineError, match="falling"):
        resample(SD, grid.flip(0), 2.0)


def test_sizes_and_guidance():
    assert abs(size_ratio((1024, 1024), (1024, 1536)) - 1.2247) < 5e-5
    assert abs(3 * size_ratio((1024, 1024), (1024, 1536)) - 3.674) < 5e-4
    assert scaled_guidance(1.5, 2.0) == 2.0 and scaled_guidance(5.0, 1.0) == 5.0 and scaled_guidance(1.0, 3.0) == 1.0
    assert abs(flux_shift(4096) - 3.158) < 5e-4 and abs(flux_shift(6144) - 4.467) < 1e-3
    assert abs(flux_shift(1024) - 1.88) < 5e-3 and abs(flux_shift(16384) - 25.3) < 0.05
    for bad in ((0, 512), (512,), (512.0, 512), "512", (True, 512)):
        with pytest.raises(VitrineError, match="size"):
            size_ratio(bad, (512, 512))
    for ratio in (0.0, -1.0, math.inf, math.nan, 17.0):
        with pytest.raises(VitrineError, match="ratio"):
            shift_grid(SIGMA, ratio, 14.6)
    with pytest.raises(VitrineError, match="flow"):
        relabel(NoiseSchedule.flow(), 2.0)


# --- plans --------------------------------------------------------------------------------------------------------
def test_config_round_trips_and_refuses():
    made = config((768, 512), schedule="relabel", override=True, guidance_law=True, guidance=5.0)
    assert ResolutionTransferConfig.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    for bad in (
        {"schedule": "both"},
        {"pos_embed": "ntk"},
        {"guidance": -1.0},
        {"guidance_law": True},
        {"target": (0, 8)},
        {"train": (8, 8)},
    ):
        with pytest.raises(VitrineError):
            config(**bad)
    with pytest.raises(VitrineError, match="settings"):
        ResolutionTransferConfig.from_dict(made.to_dict() | {"size": 3})


def test_relabel_needs_metadata(tmp_path):
    facts = ModelFacts("unet", SD, (512, 512), convolutional=True)
    wanted = config(schedule="relabel")
    with pytest.raises(VitrineError, match="without it in its header"):
        plan_transfer(facts, wanted)
    assert plan_transfer(facts, config(schedule="relabel", override=True)).schedule == "relabel"
    path, said = tmp_path / "m.safetensors", {"mode": "relabel", "s_pre": 512, "s_now": 1024}
    save_file({"x": torch.zeros(1)}, path, {"ccs_format": "1", "schedule": json.dumps(said)})
    assert plan_transfer(facts, wanted, read_metadata(path)).schedule == "relabel"
    for changed, message in (
        ({"s_now": 768}, "as trained"),
        ({"mode": "none"}, "in its header"),
        ({"s_pre": 0}, "JSON"),
    ):
        with pytest.raises(VitrineError, match=message):
            plan_transfer(facts, wanted, {"ccs_format": "1", "schedule": json.dumps(said | changed)})
    with pytest.raises(VitrineError, match="ccs_format"):
        plan_transfer(facts, wanted, {"ccs_format": "2"})
    with pytest.raises(VitrineError, match="flow"):
        plan_transfer(ModelFacts("f", NoiseSchedule.flow(), (512, 512)), config(schedule="relabel", override=True))
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    with pytest.raises(VitrineError, match="safetensors"):
        read_metadata(tmp_path / "bad.safetensors")


def test_reports_say_the_numbers():
    unet = plan_transfer(
        ModelFacts("unet", SD, (512, 512), convolutional=True), config(guidance_law=True, guidance=7.5)
    )
    assert unet.guidance == 14 and unet.positions == "keep" and "repeating objects" in unet.summary
    assert "r = 2.0000, log-SNR -1.3863" in unet.summary and "14.61" in unet.summary
    law = (256, 4096, 0.5, 1.15)
    flux = ModelFacts("flux", NoiseSchedule.flow(), (1024, 1024), 8, 2, flux_shift(4096), law, Positions("rope"))
    found = plan_transfer(flux, ResolutionTransferConfig((1024, 1536)))
    assert found.positions == "rope_pi" and "3.868" in found.summary and "4.467" in found.summary
    sd3 = plan_transfer(
        ModelFacts("sd3", NoiseSchedule.flow(), (1024, 1024), shift=3.0), ResolutionTransferConfig((1024, 1536))
    )
    assert abs(sd3.shift - 3.674) < 5e-4
    still = plan_transfer(ModelFacts("unet", SD, (512, 512)), ResolutionTransferConfig((512, 512)))
    assert still.schedule == "none" and still.guidance is None and "unchanged (r = 1)" in still.summary
    for side, said in ((1024, "to more noise"), (256, "to less noise")):  # it said more, whichever way sigma went
        moved = plan_transfer(ModelFacts("unet", SD, (512, 512)), ResolutionTransferConfig((side, side))).summary
        assert said in moved
    with pytest.raises(VitrineError, match="train size"):
        plan_transfer(ModelFacts("x", SD), ResolutionTransferConfig((512, 512)))
    with pytest.raises(VitrineError, match="multiples of 8"):
        plan_transfer(ModelFacts("x", SD, (512, 512)), ResolutionTransferConfig((500, 512)))
    with pytest.raises(VitrineError, match="auto takes what suits"):
        plan_transfer(ModelFacts("x", SD, (512, 512)), config(pos_embed="grid"))


# --- diffusers schedulers -----------------------------------------------------------------------------------------
def scheduler_for(scheduler, **more):
    facts = ModelFacts("unet", NoiseSchedule.from_diffusers(scheduler), (512, 512), shift=own_shift(scheduler, 1024)[0])
    return transferred_scheduler(scheduler, facts, plan_transfer(facts, config(**more)))


@pytest.mark.parametrize("kind", [EulerDiscreteScheduler, DPMSolverMultistepScheduler, DDIMScheduler])
def test_resampled_schedulers(kind):
    base = kind(**SD_BETAS)
    made = scheduler_for(base)
    made.set_timesteps(10)
    assert isinstance(made, EulerDiscreteScheduler if kind is DDIMScheduler else kind) and made is not base
    plain = type(made).__mro__[1].from_config(base.config)
    plain.set_timesteps(10)
    wanted, told = resample(SD, plain.sigmas.double(), 2.0)
    torch.testing.assert_close(made.sigmas.double(), wanted, rtol=1e-6, atol=0)
    assert torch.equal(made.timesteps.double(), told[:-1]) and len(made.timesteps) == len(made.sigmas) - 1
    x = torch.ones(1, 4, 2, 2)
    for t in made.timesteps:
        x = (
            made.step(torch.zeros_like(x), t, x).prev_sample
            if kind is DPMSolverMultistepScheduler
            else made.step(torch.zeros_like(made.scale_model_input(x, t)), t, x).prev_sample
        )
    assert made.step_index == len(made.timesteps), "every step is taken, also where timesteps repeat"
    assert bool(torch.isfinite(x).all())


def test_relabelled_and_refused_schedulers():
    made = scheduler_for(DDIMScheduler(**SD_BETAS), schedule="relabel", override=True)
    assert type(made) is DDIMScheduler
    torch.testing.assert_close(made.alphas_cumprod.double(), shift_abar(ABAR, 2.0), rtol=1e-5, atol=0)
    same = DDIMScheduler(**SD_BETAS)
    assert scheduler_for(same, schedule="none") is same and scheduler_for(same, target=(512, 512)) is same
    with pytest.raises(VitrineError, match="first-order"):
        scheduler_for(HeunDiscreteScheduler(**SD_BETAS))


def test_flow_schedulers_shift_once():
    made = scheduler_for(FlowMatchEulerDiscreteScheduler(shift=3.0))
    made.set_timesteps(sigmas=[1, 0.75, 0.5, 0.25])
    once = FlowMatchEulerDiscreteScheduler(shift=6.0)
    once.set_timesteps(sigmas=[1, 0.75, 0.5, 0.25])
    torch.testing.assert_close(made.sigmas, once.sigmas, rtol=1e-6, atol=0)
    torch.testing.assert_close(made.timesteps, once.timesteps, rtol=1e-6, atol=0)
    dynamic = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    made = scheduler_for(dynamic)
    made.set_timesteps(sigmas=[1, 0.5], mu=99.0)
    wanted = shift_tau(torch.tensor([1, 0.5], dtype=torch.float64), 2 * flux_shift(1024))
    torch.testing.assert_close(made.sigmas[:-1].double(), wanted, rtol=1e-6, atol=0)
