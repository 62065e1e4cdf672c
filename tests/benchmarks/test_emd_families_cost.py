"""One-step pictures and training steps of every family beside the network calls they are made of.

Networks are the tiny ones of the real classes with latents of twice their size, and as many rows as make a forward of
``LONG`` seconds: at a full-size network's length Python's own share, some 0.2 ms a call, is small here as it is there.
"""

import copy

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from vitrine.engine.condition import Condition
from vitrine.engine.denoiser import Denoiser
from vitrine.engine.emd import EStepConfig, StudentContract, one_step
from vitrine.engine.emd.roles import GENERATOR, SCORE
from vitrine.engine.emd.train import Trainer
from vitrine.engine.emd.train_config import EMDAdvancedConfig, EMDTrainConfig
from vitrine_tests import models
from vitrine_tests.families.twin import network, twin

LONG, MOST = 0.06, 64
TWINS = {"SD3, SD3.5 medium": "sd35", "Flux": "flux", "Z-Image": "z_image", "Qwen-Image": "qwen_image",
         "Chroma": "chroma", "Flux.2 Klein": "klein", "Krea 2": "krea2", "Lumina 2": "lumina2",
         "Wan": "wan"}  # fmt: skip
UNETS = {"SD2, predicting v": models.unet_v, "SDXL": models.unet_xl}
WIDE = {"sample_size": 32, "block_out_channels": (32, 64)}
FAMILIES = [*UNETS, "PixArt", *TWINS]
STEPS = 2


def ddim(prediction="epsilon"):
    return DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
                         prediction_type=prediction)  # fmt: skip


def small(family):
    """(denoiser, shape of a latent, condition of one row)."""
    g = torch.Generator().manual_seed(2)
    if family in TWINS:
        module, net = twin(TWINS[family]), copy.deepcopy(network(TWINS[family]))
        frames, (height, width) = module.SIZE[:-2], module.SIZE[-2:]
        shape = (getattr(module, "CHANNELS", 16), *frames, 2 * height, 2 * width)
        return Denoiser.from_diffusers(net, FlowMatchEulerDiscreteScheduler()), shape, module.prompt(g, 1)
    text = torch.randn(1, 7, models.TEXT, generator=g)
    if family == "PixArt":
        net = models.pixart(sample_size=32, attention_head_dim=24, cross_attention_dim=48)
        mask = torch.ones(1, 7).long()
        return (
            Denoiser.from_diffusers(net, ddim()),
            (4, 32, 32),
            Condition(text, None, {"encoder_attention_mask": mask}),
        )
    cond = Condition(text)
    if family == "SDXL":
        sizes = {"time_ids": torch.tensor([[256.0, 256, 0, 0, 256, 256]])}
        cond = Condition(text, torch.randn(1, models.POOLED, generator=g), sizes)
    prediction = "epsilon" if family == "SDXL" else "v_prediction"
    return Denoiser.from_diffusers(UNETS[family](**WIDE), ddim(prediction)), (4, 32, 32), cond


def long_enough(bench, net, shape, cond):
    """(rows, x, t, condition) of a forward of about ``LONG`` seconds."""
    rows = 1
    while True:
        x, t = torch.randn(rows, *shape), torch.full((rows,), float(net.schedule.last))
        repeated = cond.take(torch.zeros(rows).long())
        with torch.no_grad():
            took = min(bench.seconds(lambda: net.forward(x, t, repeated)) for _ in range(2))  # noqa: B023
        if bench.tiny or took >= LONG or rows >= MOST:
            return rows, x, t, repeated
        rows = min(MOST, max(rows + 1, round(rows * LONG / max(took, 1e-4))))


def case(bench, family, share=1):
    if bench.device != "cpu" or bench.dtype != torch.float32:
        pytest.skip("tiny networks are measured on the CPU")
    net, shape, cond = small(family)
    net.backbone.requires_grad_(False)
    rows, x, t, repeated = long_enough(bench, net, shape, cond)
    rows = max(1, rows // share)
    label = f"{'tiny ' if bench.tiny else ''}{family}, {' x '.join(map(str, shape[1:]))}, batch {rows}"
    return net, shape, x[:rows], t[:rows], repeated.take(torch.arange(rows)), label


@pytest.mark.parametrize("family", FAMILIES)
def test_one_step_costs_one_forward_in_every_family(bench, family):
    net, _, z, t, cond, label = case(bench, family)
    contract = StudentContract(timestep=float(net.schedule.last))
    found = bench.compare(
        "EMD, one-step picture", label, lambda: one_step(net, z, cond, contract),
        {"bare forward": lambda: net.forward(z, t, cond)}, 15,
    )  # fmt: skip
    bench.at_most("forwards", found["bare forward"].ratio, 1.05)


def calls_alone(trainer, x, t, cond):
    """The forwards and backwards of one step, adapters switched between them; no chain, noise, losses or optimisers."""
    roles = trainer.roles

    def learn(name):
        roles.train_only(name)
        output = getattr(roles, name).forward(x, t, cond)
        torch.autograd.grad(output.sum(), list(roles.parameters(name).values()), allow_unused=True)

    def run():
        with torch.no_grad():
            roles.generator.forward(x, t, cond)
        learn(SCORE)
        roles.train_only(None)
        for _ in range(STEPS):
            leaf = x.clone().requires_grad_(True)
            output = roles.generator.forward(leaf, t, cond)
            with torch.no_grad():
                roles.teacher.forward(x, t, cond)
                roles.score.forward(x, t, cond)
            torch.autograd.grad(output.sum(), leaf)
        learn(GENERATOR)

    return run


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "PixArt"])
def test_a_training_step_costs_its_calls_in_every_family(bench, family, tmp_path):
    net, shape, x, t, cond, label = case(bench, family, 4)
    config = EMDTrainConfig(
        batch=len(x), rank=4, chain=EStepConfig(STEPS), advanced=EMDAdvancedConfig(auto_gz=False, log_every=0)
    )  # fmt: skip
    trainer = Trainer(net, cond.take(torch.zeros(1).long()), shape, config, tmp_path)
    found = bench.compare(
        f"EMD, training step with a chain of {STEPS}", label, trainer.step,
        {"its forwards and backwards": calls_alone(trainer, x, t, cond)}, 5, grad=True,
    )  # fmt: skip
    bench.at_most("of its counted cost", found["its forwards and backwards"].ratio, 1.15)
