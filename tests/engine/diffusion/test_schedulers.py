"""What a diffusers scheduler says of the network it samples: as its own step reveals it, or refused."""

import copy
import functools

import diffusers
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DEISMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    SASolverScheduler,
    UniPCMultistepScheduler,
)
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.schedule import convention_of
from vitrine.engine.errors import VitrineError
from vitrine.engine.resolution.schedulers import own_shift
from vitrine_tests import models
from vitrine_tests.families import twin

OTHER_DATA = {"AmusedScheduler", "VQDiffusionScheduler", "RFD4ProteinaScheduler"}
"""Of tokens and proteins: they take arguments of such a model."""
ALL = sorted({n for n in dir(diffusers) if n.endswith("Scheduler")} - OTHER_DATA)
"""Where a class needs a package that is absent here (torchsde), diffusers exports a stand-in with ``_backends``."""
TABLES = [kind.__name__ for kind in DDIMScheduler()._get_compatibles()] + ["LCMScheduler", "TCDScheduler"]
WITHOUT = {"DPMSolverSDEScheduler", "EDMEulerScheduler"}
"""Of the compatible ones: the first steps with torchsde, the second has no table and scales its network otherwise."""
TABLES = sorted(set(TABLES) - WITHOUT | {"DDPMParallelScheduler", "DDIMParallelScheduler", "UnCLIPScheduler"})
FLOWS = [
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "FlowMatchLCMScheduler",
    "LTXEulerAncestralRFScheduler",
]
MULTISTEP = [
    "UniPCMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "DEISMultistepScheduler",
    "SASolverScheduler",
]
AS_FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
TRANSFORMERS = [*twin.NAMES, "models.sd3", "models.flux"]

# Some of diffusers' schedulers warn 12,000 times a step that NumPy will change how it wraps tensors.
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")


def made(name, **config):
    return getattr(diffusers, name)(**config)


def table(name, **config):
    return made(name, **({} if name == "UnCLIPScheduler" else SD) | config)


@functools.cache
def net(name):
    if name.startswith("models."):
        return models.shared(getattr(models, name.removeprefix("models.")))
    return twin.network(name)


def agrees(denoiser, fresh):
    """The network's input, sigma and x0 at two of the run's times are those of the scheduler's own functions."""
    g = torch.Generator().manual_seed(0)
    x0, noise, output = (torch.randn(2, 4, 6, 6, generator=g) for _ in range(3))
    fresh.set_timesteps(5)
    for t in fresh.timesteps[[2, 4]]:  # those between are half steps, where a step has two
        scheduler = copy.deepcopy(fresh)
        whole = not torch.is_floating_point(scheduler.timesteps)
        x_t = noised(scheduler, x0, noise, t)
        ours = denoiser.network_input(x0, noise, float(t))
        loose = 2e-3 if denoiser.prediction == "flow" and whole else 2e-4  # UniPC cuts 1000 s to a whole timestep
        given = scaled(scheduler, x_t, t)
        torch.testing.assert_close(ours, given, atol=6 * loose, rtol=loose)
        theirs = clean(scheduler, output, t, x_t)
        if theirs is not None:
            mine = denoiser.split(output, given, float(t)).x0
            torch.testing.assert_close(mine, theirs, atol=6 * loose, rtol=6 * loose)


def noised(scheduler, x0, noise, t):
    own = not (isinstance(scheduler, SASolverScheduler) and scheduler.config.use_flow_sigmas)  # it reads its table
    if hasattr(scheduler, "add_noise") and own:
        return scheduler.add_noise(x0, noise, t.reshape(1))
    if hasattr(scheduler, "scale_noise"):
        return scheduler.scale_noise(x0, t.reshape(1), noise)
    sigma = scheduler.sigmas[scheduler.timesteps.tolist().index(t)]
    return (1 - sigma) * x0 + sigma * noise


def scaled(scheduler, x, t):
    scheduler._step_index = None
    return scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x


def clean(scheduler, output, t, x_t):
    """x0 as the scheduler itself takes it from the network's output; None where no function of it says so."""
    name = type(scheduler).__name__
    if hasattr(scheduler, "convert_model_output"):
        scheduler._step_index = None
        scheduler._init_step_index(t)
        converted = scheduler.convert_model_output(output, sample=x_t)
        if not isinstance(scheduler, DEISMultistepScheduler):
            return converted
        signal, noise = scheduler._sigma_to_alpha_sigma_t(scheduler.sigmas[scheduler.step_index])
        return (x_t - noise * converted) / signal
    scheduler._step_index = None
    if name == "FlowMatchEulerDiscreteScheduler":  # a straight line to s = 0
        s = scheduler.sigmas[scheduler.timesteps.tolist().index(t)]
        after = scheduler.step(output, t, x_t).prev_sample
        return x_t + (after - x_t) * s / (s - scheduler.sigmas[scheduler.timesteps.tolist().index(t) + 1])
    done = scheduler.step(output, t, x_t)
    return getattr(done, "pred_original_sample", getattr(done, "denoised", None))


NOT_THEIRS = {
    ("EulerAncestralDiscreteScheduler", "sample"),
    ("KDPM2AncestralDiscreteScheduler", "sample"),
    ("KDPM2DiscreteScheduler", "sample"),
    ("HeunDiscreteScheduler", "sample"),
    ("PNDMScheduler", "sample"),
    ("UnCLIPScheduler", "v_prediction"),
}
"""Their own step raises."""
PAIRS = [(n, p) for n in TABLES for p in ("epsilon", "v_prediction", "sample") if (n, p) not in NOT_THEIRS]


@pytest.mark.parametrize(("name", "prediction"), PAIRS)
def test_a_scheduler_over_a_table_means_what_its_step_does(name, prediction):
    clip = {"clip_sample": False} if "clip_sample" in made(name).config else {}
    scheduler = table(name, prediction_type=prediction, **clip)
    denoiser = Denoiser.from_diffusers(models.shared(models.unet), scheduler)
    assert (denoiser.schedule.kind, denoiser.prediction) == (
        "vp",
        {"epsilon": "eps", "v_prediction": "v", "sample": "x0"}[prediction],
    )
    agrees(denoiser, scheduler)


@pytest.mark.parametrize("name", [*FLOWS, *MULTISTEP])
@pytest.mark.parametrize("network", TRANSFORMERS)
def test_a_flow_scheduler_on_every_flow_family(network, name):
    scheduler = made(name, **(AS_FLOW if name in MULTISTEP else {}))
    denoiser = Denoiser.from_diffusers(net(network), scheduler)
    assert (denoiser.schedule.kind, denoiser.schedule.steps, denoiser.prediction) == ("flow", 1000, "flow")
    if network == TRANSFORMERS[0]:
        agrees(denoiser, scheduler)


@pytest.mark.parametrize("name", ALL)
def test_every_scheduler_of_diffusers_is_read_or_refused(name):
    """On a UNet, by its convention; on flow families, all but those of flows are refused."""
    if needed := getattr(getattr(diffusers, name), "_backends", None):
        pytest.skip(f"diffusers builds {name} with {needed}")
    scheduler = made(name)
    try:
        schedule, prediction = convention_of(scheduler, models.shared(models.unet))
    except VitrineError as error:
        assert name not in {*TABLES, *FLOWS}
        assert "scheduler" in str(error)
    else:
        assert (schedule.kind == "flow") == (prediction == "flow") == (name in FLOWS)
    for network in ("models.sd3", "models.flux", "wan") if name not in FLOWS else ():
        with pytest.raises(VitrineError, match="scheduler"):
            Denoiser.from_diffusers(net(network), scheduler)


@pytest.mark.parametrize("name", sorted({*TABLES, *FLOWS} - {"LTXEulerAncestralRFScheduler", "UnCLIPScheduler"}))
def test_settings_that_a_class_does_not_read_are_not_believed(name):
    """``from_config`` keeps the other class's settings in ``config``."""
    source = UniPCMultistepScheduler(**SD, **AS_FLOW).config
    scheduler = getattr(diffusers, name).from_config(source)
    if name in FLOWS or name in MULTISTEP:
        assert convention_of(scheduler)[0].kind == "flow"
        assert own_shift(scheduler, 64)[0] == (3.0 if name in MULTISTEP else 1.0)
    else:
        with pytest.raises(VitrineError, match="scheduler"):
            convention_of(scheduler)


CONTRADICTIONS = {
    "flow sigmas, noise predicted": lambda: UniPCMultistepScheduler(use_flow_sigmas=True),
    "flow predicted, table": lambda: UniPCMultistepScheduler(prediction_type="flow_prediction"),
    "flow and Karras's sigmas": lambda: UniPCMultistepScheduler(**AS_FLOW, use_karras_sigmas=True),
    "ten times, and no setting to invert": lambda: FlowMatchHeunDiscreteScheduler(num_train_timesteps=100),
    "ten times": lambda: FlowMatchEulerDiscreteScheduler(num_train_timesteps=100),
    "inverted": lambda: FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
    "log sigma": lambda: EulerDiscreteScheduler(timestep_type="continuous"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_scheduler_that_contradicts_itself_is_refused(case):
    with pytest.raises(VitrineError, match="scheduler"):
        convention_of(CONTRADICTIONS[case]())
