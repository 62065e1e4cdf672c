"""One-step generation costs one bare forward; a training step costs what its forwards and backwards cost."""

import copy

import pytest
import torch
from diffusers import DDIMScheduler
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.noise import seeded_noise
from vitrine.engine.emd import EStepConfig, StudentPreset, one_step
from vitrine.engine.emd.emd_trainer import Trainer
from vitrine.engine.emd.train_config import EMDAdvancedConfig, EMDTrainConfig
from vitrine.engine.network.condition import Condition


def ddim():
    return DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False)


@pytest.mark.parametrize(("model", "batch", "rounds"), [("portraits", 16, 20), ("SD1.5", 1, 3)])
def test_one_step_costs_one_forward(bench, model, batch, rounds):
    full, scheduler = bench.model(model, batch), ddim()
    student, preset, cond = Denoiser.from_diffusers(full.net, scheduler), StudentPreset(), Condition(full.text)
    z = seeded_noise(list(range(batch)), tuple(full.x.shape[1:])).to(full.x)
    t = torch.full((batch,), 999.0, device=z.device)
    scheduler.set_timesteps(50)

    def ddim_step():
        scheduler.step(full.net(z, 980, full.text).sample, 980, z)

    against = {"bare forward": lambda: full.net(z, t, full.text), "50 DDIM steps": (ddim_step, 50)}
    found = bench.compare(
        "EMD, one-step picture", full.label, lambda: one_step(student, z, cond, preset), against, rounds
    )
    bench.at_most("forwards", found["bare forward"].ratio, 1.05)
    bench.at_most("share of 50 steps", found["50 DDIM steps"].ratio, 1 / 40)


@pytest.mark.parametrize(("model", "batch", "chain", "rounds"), [("portraits", 8, 8, 3), ("SD1.5", 1, 4, 1)])
def test_a_training_step_in_forwards(bench, model, batch, chain, rounds, tmp_path):
    """The ratio to a bare forward is the cost in forward-equivalents: 9 expected for Diff-Instruct, 23 for four steps
    of the chain, 39 for eight, where a backward pass costs as much as a forward for activations and again for weights.
    """
    full = bench.model(model, batch, 32)
    if full.x.dtype != torch.float32:
        pytest.skip("adapters train in float32")
    teacher = Denoiser.from_diffusers(copy.deepcopy(full.net), ddim())  # adapters are added to it
    config = EMDTrainConfig(batch=batch, chain=EStepConfig(steps=chain), advanced=EMDAdvancedConfig(auto_gz=False))
    trainer = Trainer(teacher, Condition(full.text[:1].cpu()), tuple(full.x.shape[1:]), config, tmp_path)

    def step(kind):
        trainer.chain = kind
        trainer.step()

    def bare():
        with torch.no_grad():
            full()

    against = {"bare forward": bare, "Diff-Instruct step": lambda: step(EStepConfig.diff_instruct())}
    method = f"EMD, training step with a chain of {chain}"
    bench.compare(method, full.label, lambda: step(config.chain), against, rounds, grad=True)
