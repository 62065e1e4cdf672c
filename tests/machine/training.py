"""The trainers on small models: a few steps of each, on the device of the pipeline they are given."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from vitrine.engine.control import (
    AugmentConfig,
    ControlEmbedder,
    ControlMetadata,
    ControlRecord,
    ControlSpec,
    ControlTrainConfig,
    ControlTrainer,
    TrainSetup,
    control_width,
    injected,
)
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.schedule import NoiseSchedule
from vitrine.engine.emd import EStepConfig
from vitrine.engine.emd.emd_trainer import Trainer
from vitrine.engine.emd.train_config import EMDAdvancedConfig, EMDTrainConfig
from vitrine.engine.network.condition import Condition
from vitrine.engine.w2w import BatchedTrainer, LoraTrainConfig, Subject


@contextmanager
def accelerated(device: torch.device) -> Iterator[None]:
    """accelerate's state says this device, as on a machine that has it."""
    _forget()
    PartialState(cpu=True).device = device
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state(reset_partial_state=True) if state is AcceleratorState else state._reset_state()


def _text(pipe: Any, prompt: str, rows: int) -> torch.Tensor:
    with torch.no_grad():
        return pipe.encode_prompt([prompt] * rows, pipe._execution_device, 1, False)[0]


def _latents(rows: int) -> torch.Tensor:
    return torch.randn(rows, 4, 16, 16, generator=torch.Generator().manual_seed(2))


def emd_training(pipe: Any, prompt: str, steps: int) -> list[torch.Tensor]:
    """What the generator draws after some steps; conditions stay on the CPU, as many prompts would."""
    told = {"steps": steps + 1, "batch": 2, "rank": 2, "guidance": 2.0, "chain": EStepConfig(2)}
    told["advanced"] = EMDAdvancedConfig(auto_gz=False)
    conditions, null = (Condition(_text(pipe, p, n).cpu().float()) for p, n in ((prompt, 4), ("", 1)))
    with accelerated(pipe._execution_device), tempfile.TemporaryDirectory() as folder:
        config = EMDTrainConfig.from_dict(told)
        run = Trainer(Denoiser.from_diffusers(pipe), conditions, (4, 16, 16), config, folder, null)
        try:
            for _ in range(steps):
                run.step()
            with torch.no_grad():
                drawn = run.generate(_latents(2).to(run.device), conditions.take(torch.arange(2)).to(run.device))
            return [drawn.cpu()]
        finally:
            run.roles.remove()


def lora_training(pipe: Any, prompt: str, steps: int) -> list[torch.Tensor]:
    """The losses of two subjects after some steps."""
    cond = Condition(_text(pipe, prompt, 1).cpu().float())
    subjects = [Subject(f"s{i}", _latents(3), cond, i) for i in range(2)]
    run = BatchedTrainer(Denoiser.from_diffusers(pipe), subjects, LoraTrainConfig(steps=8, lr=1e-3))
    for _ in range(steps):
        run.step()
    return [run.losses().detach().cpu()]


def control_training(pipe: Any, prompt: str, steps: int) -> list[torch.Tensor]:
    """The loss after some steps."""
    unet, device = pipe.unet, pipe._execution_device
    torch.manual_seed(1)
    embedder = ControlEmbedder(ControlSpec(), control_width(unet), zero_init=True)
    text = _text(pipe, prompt, 1).cpu().float()[0]
    pictures = torch.rand(2, 4, 16, 16, generator=torch.Generator().manual_seed(5)) * 2 - 1
    records = [ControlRecord(p, text, 64, 96) for p in pictures]
    network = injected(unet, lambda x, t, s: unet(x.to(unet.dtype), t, s.to(unet.dtype)).sample)
    trainee = TrainSetup(network, embedder, NoiseSchedule.scaled_linear(), torch.zeros_like(text), {})
    told = {"steps": steps + 1, "batch": 2, "lr": 1e-3, "augment": AugmentConfig(16)}
    about = ControlMetadata("UNet2DConditionModel", embedder.dim, base_model="tiny")
    with accelerated(device), tempfile.TemporaryDirectory() as folder:
        run = ControlTrainer(trainee, records, ControlTrainConfig.from_dict(told), folder, about)
        for _ in range(steps):
            run.step()
        return [run.loss(run.sample_batch(99)).detach().cpu()]
