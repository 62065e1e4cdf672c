"""One-step pictures and training steps of every family beside the network calls they are made of.

Networks of the real classes, as narrow as the tests' own and as deep as makes a forward of about ``LONG`` seconds: what
a step does beside its calls is then as small a share as it is of a full-size network's, which has as many blocks.
"""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.emd import EStepConfig, StudentPreset, one_step
from vitrine.engine.emd.emd_trainer import Trainer
from vitrine.engine.emd.networks import GENERATOR
from vitrine.engine.emd.train_config import EMDAdvancedConfig, EMDTrainConfig
from vitrine.engine.families import call_of
from vitrine.engine.network.condition import Condition
from vitrine_tests import models
from vitrine_tests.families.twin import network, twin

LONG, ROWS = 0.06, 2
DEPTH = ("num_layers", "num_single_layers", "n_layers")
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


def deep_enough(bench, net, shape, cond):
    """(denoiser, x, t, condition): rows of a UNet, blocks of a transformer until a forward takes ``LONG`` seconds."""
    kind, config = type(net.backbone), dict(net.backbone.config)
    blocks, rows, factor = {k: config[k] for k in DEPTH if config.get(k)}, ROWS, 1
    while True:
        x, t = torch.randn(rows, *shape), torch.full((rows,), float(net.schedule.last))
        repeated = cond.take(torch.zeros(rows).long())
        net.backbone.eval().requires_grad_(False)
        with torch.no_grad():
            took = min(bench.seconds(partial(net.forward, x, t, repeated)) for _ in range(3))
        if bench.tiny or took >= 0.8 * LONG or factor > 100:
            return net, x, t, repeated
        factor = max(factor + 1, round(factor * LONG / max(took, 1e-3)))
        if "conv_in" in dict(net.backbone.named_children()):
            rows = ROWS * factor
        else:
            deeper = kind.from_config(config | {k: v * factor for k, v in blocks.items()})
            net = replace(net, backbone=deeper, call=call_of(deeper))


def case(bench, family):
    if bench.device != "cpu" or bench.dtype != torch.float32:
        pytest.skip("narrow networks are measured on the CPU")
    net, shape, cond = small(family)
    net, x, t, repeated = deep_enough(bench, net, shape, cond)
    label = f"{'tiny ' if bench.tiny else ''}{family}, narrow, {' x '.join(map(str, shape[1:]))}"
    return net, shape, x, t, repeated, label


@pytest.mark.parametrize("family", FAMILIES)
def test_one_step_costs_one_forward_in_every_family(bench, family):
    net, _, z, t, cond, label = case(bench, family)
    preset = StudentPreset(timestep=float(net.schedule.last))
    found = bench.compare(
        "EMD, one-step picture", label, lambda: one_step(net, z, cond, preset),
        {"bare forward": lambda: net.forward(z, t, cond)}, 40,
    )  # fmt: skip
    bench.at_most("forwards", found["bare forward"].ratio, 1.05)


def calls_alone(trainer, x, t, cond):
    """The forwards and backwards of one step and nothing else, in an order in which adapters are switched but twice."""
    roles = trainer.roles

    def call(rows=x):
        return roles.base.call(rows, t, cond)

    def learn():
        roles.train_only(GENERATOR)
        torch.autograd.grad(call().sum(), list(roles.parameters(GENERATOR).values()), allow_unused=True)

    def run():
        with torch.no_grad():
            roles.switch(None)
            for _ in range(STEPS):  # the teacher
                call()
            roles.switch(GENERATOR)
            for _ in range(1 + STEPS):  # the generator for the score's sample, the score in the chain
                call()
        learn()  # the score: its adapter is of the generator's rank
        roles.train_only(None)
        for _ in range(STEPS):
            leaf = x.clone().requires_grad_(True)
            torch.autograd.grad(call(leaf).sum(), leaf)
        learn()

    return run


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "PixArt"])
def test_a_training_step_costs_its_calls_in_every_family(bench, family, tmp_path):
    net, shape, x, t, cond, label = case(bench, family)
    advanced = EMDAdvancedConfig(auto_gz=False)
    config = EMDTrainConfig(batch=len(x), rank=4, chain=EStepConfig(STEPS), advanced=advanced)
    trainer = Trainer(net, cond.take(torch.zeros(1).long()), shape, config, tmp_path)
    found = bench.compare(
        f"EMD, training step with a chain of {STEPS}", label, trainer.step,
        {"its forwards and backwards": calls_alone(trainer, x, t, cond)}, 10, grad=True,
    )  # fmt: skip
    bench.at_most("of its counted cost", found["its forwards and backwards"].ratio, 1.15)
