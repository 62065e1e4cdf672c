"""Distillation runs of a tiny teacher, for several test files."""

import torch
from diffusers import DDIMScheduler
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.emd import EStepConfig
from vitrine.engine.emd.emd_trainer import Trainer
from vitrine.engine.emd.train_config import EMDTrainConfig
from vitrine.engine.network.condition import Condition
from vitrine_tests import models

SMALL = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "cross_attention_dim": 8,
    "attention_head_dim": 2,
}
FAST = {"batch": 2, "rank": 2, "save_every": 1, "guidance": 2.0}


def teacher():
    scheduler = DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    return Denoiser.from_diffusers(models.unet(**SMALL), scheduler)


def texts(count=4):
    return Condition(torch.randn(count, 5, 8, generator=torch.Generator().manual_seed(9)))


def trainer(folder, base=None, **how):
    config = EMDTrainConfig.from_dict({"steps": 4, "chain": EStepConfig(2)} | FAST | how)
    return Trainer(base or teacher(), texts(), (4, 8, 8), config, folder, texts(1))
