"""Cost of building a space, training its LoRAs, and of sampling, applying and inverting models."""

import copy

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from peft import LoraConfig
from safetensors.torch import load_file
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.network.condition import Condition
from vitrine.engine.w2w import (
    BatchedLora,
    InvertConfig,
    LoraTrainConfig,
    Manifest,
    PCAConfig,
    Subject,
    WeightSpace,
    initial_lora,
    invert,
    materialise,
    principal_components,
    sample,
    write_lora,
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


# --- models of a space --------------------------------------------------------------------------------------------
def denoiser_of(net):
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    return Denoiser.from_diffusers(net, DDIMScheduler(**betas))


def space_of(model, net, k=100):
    """The shipped people, or a random space of the paper's layers."""
    if model == "portraits":
        from vitrine.evidence.w2w.people import people_space

        return people_space()
    manifest = Manifest.of(initial_lora(net))
    d = manifest.size
    basis = torch.randn(k, d) / d**0.5
    return WeightSpace(manifest, torch.zeros(d), torch.full((d,), 1e-3), basis, torch.ones(k), torch.zeros(0, k), k + 1)


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


@pytest.mark.parametrize("model", ["portraits", "SD1.5"])
def test_a_sampled_model_against_a_lora_file(bench, model, tmp_path):
    """From a seed to a network that has the model, against a LoRA file loaded and taken out again by diffusers."""
    full = bench.model(model, 1, 32)
    space, other = space_of(model, full.net), copy.deepcopy(full.net)
    path = write_lora(tmp_path / "one.safetensors", materialise(space, sample(space, [0])[0]), "diffusers")

    def ours():
        with BatchedLora(full.net, space.manifest, space.decode(sample(space, [0]))):
            pass

    def theirs():
        other.load_lora_adapter(load_file(path), prefix="unet")
        other.unload_lora()

    bench.compare("W2W, sample a model and apply it", full.label, ours, {"loading a LoRA": theirs}, 5)


@pytest.mark.parametrize("model", ["portraits", "SD1.5"])
def test_a_forward_of_a_sampled_model(bench, model, tmp_path):
    """What each step of sampling costs while the model is applied."""
    full = bench.model(model, 1, 32)
    space, other = space_of(model, full.net), copy.deepcopy(full.net)
    weights = space.decode(sample(space, [0])).to(full.x)
    path = write_lora(tmp_path / "one.safetensors", materialise(space, sample(space, [0])[0]), "diffusers")
    other.load_lora_adapter(load_file(path), prefix="unet")

    def ours():
        with BatchedLora(full.net, space.manifest, weights):
            full()

    against = {"bare forward": full, "PEFT's forward": lambda: other(full.x, full.t, full.text)}
    bench.compare("W2W, forward with a model", full.label, ours, against, 10 if model == "portraits" else 3)


@pytest.mark.parametrize(("model", "steps", "rounds"), [("portraits", 10, 5), ("SD1.5", 1, 2)])
def test_a_step_of_inversion(bench, model, steps, rounds):
    """Clocked between steps, so that the check at the end stays out; the first step of a run does not count."""
    full = bench.model(model, 1, 32)
    space, marks, ours, theirs = space_of(model, full.net), [], [], []
    latents, cond, denoiser = torch.randn_like(full.x), Condition(full.text), denoiser_of(full.net)
    config = InvertConfig(steps=steps + 1, check_every=1000)

    def bare():
        x = full.x.detach().requires_grad_()
        full.net(x, full.t, full.text).sample.square().mean().backward()

    def run():
        marks.clear()
        invert(denoiser, space, latents, cond, config, progress=lambda *values: marks.append(bench.now()))
        ours.append((marks[-1] - marks[0]) / steps)
        theirs.append(min(bench.seconds(bare) for _ in range(steps)))

    bench.benchmark.pedantic(run, rounds=bench.rounds(rounds), warmup_rounds=0)
    bench.record("W2W, step of an inversion", "bare forward and backward", full.label, ours, theirs)
