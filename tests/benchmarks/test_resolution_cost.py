"""A transfer to another size is planned and applied in a small part of one forward; its steps are stock steps."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import DDIMScheduler
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.network.condition import Condition
from vitrine.engine.pipelines import ResolutionTransferPipeline
from vitrine.engine.resolution import ResolutionTransferConfig, apply


def planned(pipe, config):
    with apply(pipe, config):
        pass


@pytest.mark.parametrize("model", ["portraits", "SD1.5"])
def test_plan_of_a_unet(bench, model):
    full = bench.model(model, 1, 32)
    scheduler = DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    pipe = SimpleNamespace(unet=full.net, scheduler=scheduler, vae_scale_factor=8)
    trained = 8 * full.net.config.sample_size
    config = ResolutionTransferConfig((2 * trained, 2 * trained), (trained, trained))
    bound = 0.5 if model == "portraits" else 0.02
    found = bench.compare("resolution, plan and apply", full.label, lambda: planned(pipe, config),
                          {"bare forward": full}, 5)  # fmt: skip
    bench.at_most("share of a forward", found["bare forward"].ratio, bound)


def test_plan_of_a_transformer_with_a_table(bench):
    from vitrine.engine.portraits.shipped import load_transformer

    net, base = load_transformer(), bench.portraits()
    pipe = SimpleNamespace(transformer=net, scheduler=base.scheduler, vae=base.vae)
    denoiser, cond = Denoiser.from_diffusers(net, base.scheduler), Condition(torch.zeros(1, 24, 64))
    config, x = ResolutionTransferConfig((128, 128)), torch.randn(1, 4, 32, 32)
    bench.compare("resolution, plan and apply", "portraits transformer", lambda: planned(pipe, config),
                  {"bare forward": lambda: denoiser.forward(x, 500, cond)}, 10)  # fmt: skip


def test_sampling_against_the_stock_pipeline(bench):
    stock = bench.portraits().pipeline()
    stock.set_progress_bar_config(disable=True)
    ours = ResolutionTransferPipeline.from_pipe(stock, ResolutionTransferConfig((128, 128)))
    how = {"num_inference_steps": 8, "guidance_scale": 2.0, "output_type": "latent"}
    against = {"stock pipeline": lambda: stock("a face", height=128, width=128, **how)}
    bench.compare("resolution, sampling 8 steps at twice the size", "portraits", lambda: ours("a face", **how),
                  against, 5)  # fmt: skip
