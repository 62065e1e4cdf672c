"""Cost of building a space, and of training its LoRAs."""

import copy

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from peft import LoraConfig
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.network.condition import Condition
from vitrine.engine.w2w import (
    LoraTrainConfig,
    PCAConfig,
    Subject,
    principal_components,
)
from vitrine.engine.w2w.space.principal_components import Matrix
from vitrine.engine.w2w.train.lora_trainer import BatchedTrainer


# --- building -----------------------------------------------------------------------------------------------------
def lowrank(n, d, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 60, generator=g) @ torch.randn(60, d, generator=g) + 0.3 * torch.randn(n, d, generator=g)


def test_gram_route_equals_scikit_learn_and_is_faster(bench):
    from sklearn.decomposition import PCA

    n, d, k = (200, 4_000, 100) if bench.tiny else (500, 100_000, 100)
    rows, found = lowrank(n, d), {}

    def ours():
        found["ours"] = principal_components(Matrix(rows), PCAConfig(k))

    ours()
    z = ((rows - found["ours"].mean) / found["ours"].scale).double().numpy()

    def theirs():
        found["theirs"] = PCA(k, svd_solver="full").fit(z)

    row = bench.compare("W2W, PCA with 100 components", f"matrix {n} x {d}", ours, {"scikit-learn PCA": theirs}, 1, 0)
    plain, made = found["theirs"], found["ours"]
    cosines = np.linalg.svd(made.basis.double().numpy()[:60] @ plain.components_[:60].T, compute_uv=False)
    angle = float(np.arccos(np.clip(cosines.min(), -1, 1)))
    bench.say(f"angle of the leading 60 components {angle:.1e}")
    np.testing.assert_allclose(made.singular_values.numpy(), plain.singular_values_, rtol=1e-4)
    assert angle < 1e-4
    bench.at_most("time", row["scikit-learn PCA"].ratio, 1 / 5)


# --- training -----------------------------------------------------------------------------------------------------
def denoiser_of(net):
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    return Denoiser.from_diffusers(net, DDIMScheduler(**betas))


RECIPE = LoraTrainConfig(alpha=4.0, batch=1, lr=1e-2)
"""The paper's batch of one picture a step."""


def pictures(count, shape, text):
    return [Subject(str(i), torch.randn(4, *shape), Condition(text), i) for i in range(count)]


def peft_step(net, subject):
    """A function: one step of a PEFT adapter, as diffusers' DreamBooth script does it with what it encodes kept."""
    unet = copy.deepcopy(net)
    unet.add_adapter(LoraConfig(r=1, lora_alpha=4, target_modules=list(RECIPE.targets)))
    learnt = [p for n, p in unet.named_parameters() if ".lora_" in n]
    adam, random, denoiser = torch.optim.AdamW(learnt, RECIPE.lr), torch.Generator().manual_seed(0), denoiser_of(unet)
    device = next(unet.parameters()).device

    def step():
        x0, t, noise, cond = (v.to(device) for v in subject.sample(1, random))
        found = denoiser.predict(denoiser.network_input(x0, noise, t), t, cond).eps
        (found - noise).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(learnt, RECIPE.clip)
        adam.step()
        adam.zero_grad()

    return step


@pytest.mark.parametrize(("model", "count", "rounds"), [("portraits", 16, 10), ("SD1.5", 4, 1)])
def test_batched_training_in_one_process(bench, model, count, rounds):
    """Models together, against PEFT adapters one after another."""
    full = bench.model(model, 1, 32)
    if full.x.dtype != torch.float32:
        pytest.skip("adapters train in float32")
    made = pictures(count, full.x.shape[1:], full.text.cpu())
    trainer = BatchedTrainer(denoiser_of(full.net), made, RECIPE)
    method, name = f"W2W, one step of {count} LoRAs together", "PEFT, one after another"
    bench.compare(method, full.label, trainer.step, {name: (peft_step(full.net, made[0]), count)}, rounds, grad=True)
