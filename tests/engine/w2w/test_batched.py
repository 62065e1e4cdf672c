"""Many LoRAs at once: the batched forward against PEFT, the batched trainer against one-at-a-time PEFT (check 20)."""

import copy

import pytest
import torch
from diffusers import DDIMScheduler
from peft import LoraConfig
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.schedule import NoiseSchedule
from vitrine.engine.errors import VitrineError
from vitrine.engine.network.condition import Condition
from vitrine.engine.portraits.models import SCHEDULER_CONFIG
from vitrine.engine.w2w import (
    BatchedLora,
    BatchedTrainer,
    LoraLayer,
    LoraTrainConfig,
    Manifest,
    Subject,
    initial_lora,
    read_header,
    read_lora,
    train_loras,
)
from vitrine_tests.lanes import nightly_but

pytestmark = pytest.mark.rounding


def scheduler():
    return DDIMScheduler(**SCHEDULER_CONFIG)


def denoiser(unet):
    return Denoiser.from_diffusers(unet, scheduler())


def subjects(count, scale=1.0):
    out = []
    for i in range(count):
        g = torch.Generator().manual_seed(i)
        latents, text = torch.randn(3, 4, 8, 8, generator=g), torch.randn(3, 5, 12, generator=g)
        out.append(Subject(f"s{i}", latents * (scale if i == 1 else 1.0), Condition(text), i))
    return out


def random_lora(unet, seed, conv=False):
    g = torch.Generator().manual_seed(seed)
    out = {
        p: LoraLayer(layer.down, torch.randn(layer.up.shape, generator=g) * 0.1, 27.0)
        for p, layer in initial_lora(unet, rank=2, seed=seed).items()
    }
    if conv:
        shape = unet.conv_in.weight.shape
        down = torch.randn(2, *shape[1:], generator=g) * 0.1
        out["conv_in"] = LoraLayer(down, torch.randn(shape[0], 2, 1, 1, generator=g) * 0.1, 2.0)
    return out


def run(unet, x, text):
    t = torch.linspace(10, 900, len(x))
    return unet(x, t, text).sample


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("conv", [False, True])
def test_each_block_of_rows_sees_its_own_model(unet, tiled, conv):
    loras = [random_lora(unet, i, conv) for i in range(3)]
    manifest = Manifest.of(loras[0])
    weights = torch.stack([manifest.flatten(x) for x in loras])
    x, text = torch.randn(6, 4, 8, 8), torch.randn(6, 5, 12)
    bare = run(unet, x, text)
    with BatchedLora(unet, manifest, weights, tiled):
        found = run(unet, x, text)
    assert torch.equal(run(unet, x, text), bare)  # closing leaves the module as it was
    for row in range(6):
        model = row % 3 if tiled else row // 2
        merged = copy.deepcopy(unet)
        for path, layer in loras[model].items():
            merged.get_submodule(path).weight += layer.delta()
        alone = run(merged, x, text)[row]
        torch.testing.assert_close(found[row], alone, atol=2e-5, rtol=1e-4)
    assert (found - bare).abs().max() > 1e-2


def one_at_a_time(subject, config, unet, optimizer_of):
    """The plain way: PEFT adapter, an optimiser of torch, clip_grad_norm_, one model, the same draws."""
    unet = copy.deepcopy(unet)
    start = initial_lora(unet, config.targets, config.rank, config.alpha, config.seed)
    unet.add_adapter(LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=list(config.targets)))
    for path, layer in start.items():
        module = unet.get_submodule(path)
        module.lora_A["default"].weight.data.copy_(layer.down)
        module.lora_B["default"].weight.data.copy_(layer.up)
    learnt = [p for n, p in unet.named_parameters() if ".lora_" in n]
    optimizer = optimizer_of(learnt)
    abar = scheduler().alphas_cumprod
    random = torch.Generator().manual_seed(config.seed * 1_000_003 + subject.number)
    for _ in range(config.steps):
        x0, t, noise, cond = subject.sample(config.batch, random)
        a = abar[t].view(-1, 1, 1, 1)
        eps = unet(a.sqrt() * x0 + (1 - a).sqrt() * noise, t, cond.text).sample
        (eps - noise).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(learnt, config.clip)
        optimizer.step()
        optimizer.zero_grad()
    return {
        p: (unet.get_submodule(p).lora_A["default"].weight, unet.get_submodule(p).lora_B["default"].weight)
        for p in start
    }


def together(model, people, config, optimizer_of=None):
    """A trainer after its steps; its own AdamW unless another optimiser is given."""
    trainer = BatchedTrainer(model, people, config)
    if optimizer_of is not None:
        trainer.optimizer = optimizer_of([trainer.weights])
    for _ in range(config.steps):
        trainer.step()
    return trainer


@pytest.mark.parametrize(("count", "scale"), nightly_but([(3, 1.0), (3, 1000.0), (6, 1.0)], [(3, 1.0)]))
def test_batched_gradients_equal_pefts_one_at_a_time(unet, count, scale):
    """Five SGD steps, clipped or not; one model with huge gradients must not scale the others.

    SGD, as AdamW divides gradients near zero by themselves and so magnifies rounding; its own step is tested below.
    """
    lr, clip = (1e3, 1e-4) if scale > 1 else (3.0, 1.0)  # all models are clipped, or none
    config = LoraTrainConfig(rank=2, alpha=4.0, steps=5, batch=2, lr=lr, clip=clip)
    trainer = together(denoiser(unet), subjects(count, scale), config, lambda p: torch.optim.SGD(p, config.lr))
    start = initial_lora(unet, config.targets, config.rank, config.alpha, config.seed)
    for subject, lora in zip(subjects(count, scale), trainer.loras(), strict=True):
        alone = one_at_a_time(subject, config, unet, lambda p: torch.optim.SGD(p, config.lr))
        for path, (down, up) in alone.items():
            torch.testing.assert_close(lora[path].down, down, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(lora[path].up, up, atol=1e-6, rtol=1e-5)
        assert max(float((up.detach() - start[p].up).abs().max()) for p, (_, up) in alone.items()) > 1e-3


@pytest.mark.parametrize("weighting", ["uniform", "debiased"])
@pytest.mark.parametrize("prediction", ["eps", "v", "x0", "flow"])
def test_the_loss_is_of_what_the_network_puts_out(unet, prediction, weighting):
    """Of v, x0 and a flow's velocity too: in eps, a velocity's error counted (1 - s)^2 times, 0.01 at t = 900."""
    schedule = NoiseSchedule.flow() if prediction == "flow" else NoiseSchedule.scaled_linear()
    model = Denoiser(unet, schedule, prediction, lambda x, t, c: torch.zeros_like(x))
    config = LoraTrainConfig(batch=4, weighting=weighting)
    found = BatchedTrainer(model, subjects(2), config).losses()
    for k, person in enumerate(subjects(2)):
        x0, t, noise, _ = person.sample(4, torch.Generator().manual_seed(config.seed * 1_000_003 + person.number))
        signal, level = (s.float().view(-1, 1, 1, 1) for s in schedule.scales(t))
        right = {"eps": noise, "v": signal * noise - level * x0, "x0": x0, "flow": noise - x0}[prediction]
        error = right.square()
        if weighting == "debiased":  # the error in eps, whatever the network predicts
            predicted = model.predict(model.network_input(x0, noise, t), t, Condition()).eps
            error = (predicted - noise).square() * (level / signal).clamp(max=4.0)
        torch.testing.assert_close(found[k], error.mean(), rtol=1e-4, atol=1e-5)


def test_one_adamw_on_all_models_is_an_adamw_for_each(unet, monkeypatch):
    """From the gradients that the trainer itself had: rate, decay and moments of each model by itself."""
    config = LoraTrainConfig(rank=2, alpha=4.0, steps=5, batch=2, lr=1e-3, schedule="cosine", weight_decay=0.5)
    trainer = BatchedTrainer(denoiser(unet), subjects(3, 1000.0), config)
    start, gradients, step = trainer.weights.detach().clone(), [], trainer.optimizer.step
    monkeypatch.setattr(trainer.optimizer, "step", lambda: gradients.append(trainer.weights.grad.clone()) or step())
    for _ in range(config.steps):
        trainer.step()
    for model in range(3):
        weights = start[model].clone().requires_grad_()
        adam = torch.optim.AdamW([weights], config.lr, weight_decay=config.weight_decay)
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(adam, config.steps)
        for gradient in gradients:
            assert float(gradient[model].norm()) <= config.clip * (1 + 1e-4)
            weights.grad = gradient[model].clone()
            adam.step()
            rates.step()
        torch.testing.assert_close(trainer.weights[model], weights, atol=1e-6, rtol=0)


@pytest.mark.nightly
def test_the_papers_recipe_on_the_shipped_model_equals_peft():
    """Its rate, alpha and batch on portraits, where heads of 8 numbers go through plain products."""
    from vitrine.engine.portraits import load_portraits

    unet = load_portraits().unet.requires_grad_(False)
    config = LoraTrainConfig(steps=5)
    latents = torch.randn(8, 2, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    people = [Subject(str(i), x, Condition(x[:1, 0, :6].repeat(1, 4, 4)), i) for i, x in enumerate(latents)]
    trainer = together(denoiser(unet), people, config)
    apart = []
    for subject, lora in zip(people, trainer.loras(), strict=True):
        alone = one_at_a_time(
            subject, config, unet, lambda p: torch.optim.AdamW(p, config.lr, weight_decay=config.weight_decay)
        )
        for path, (down, up) in alone.items():
            apart += [(lora[path].down - down).abs().flatten(), (lora[path].up - up).abs().flatten()]
    apart = torch.cat(apart).detach()
    # where a gradient is nearly zero its sign is rounding, and AdamW moves by the whole rate either way
    assert float((apart <= 1e-6).float().mean()) > 0.999 and float(apart.max()) <= 2 * config.steps * config.lr


def test_a_folder_resumes_where_it_was_stopped(unet, tmp_path):
    config = LoraTrainConfig(steps=2, lr=1e-3)
    every = subjects(5)
    names, made = [s.name for s in every], [lambda s=s: s for s in every]

    class Stop(Exception):
        pass

    def stop(step, total, preview=None):
        if step == 6:
            raise Stop

    with pytest.raises(Stop):
        train_loras(denoiser(unet), made, names, tmp_path / "a", config, together=2, progress=stop)
    kept = {p.name: p.read_bytes() for p in (tmp_path / "a").glob("*.safetensors")}
    assert set(kept) == {"s0.safetensors", "s1.safetensors"}
    files = train_loras(denoiser(unet), made, names, tmp_path / "a", config, together=3)
    alone = train_loras(denoiser(unet), made, names, tmp_path / "b", config, together=1)
    assert (tmp_path / "a" / "s0.safetensors").read_bytes() == kept["s0.safetensors"]
    for one, other in zip(files, alone, strict=True):
        a, b = read_lora(read_header(one)), read_lora(read_header(other))
        for path in a:
            torch.testing.assert_close(a[path].up, b[path].up, atol=1e-6, rtol=0)
    with pytest.raises(VitrineError, match="begun with steps 2 .now 3"):
        train_loras(denoiser(unet), made, names, tmp_path / "a", LoraTrainConfig(steps=3, lr=1e-3))


@pytest.mark.parametrize(
    "name", ["../evil", "a/b", "a\\b", "..", "", ".hidden", "nul", "a:b", "bell\x07", "x" * 300, 7]
)
def test_a_name_that_is_no_file_name_is_refused_before_any_work(tmp_path, name):
    def fail():
        pytest.fail("a subject was made")

    folder = tmp_path / "loras"
    with pytest.raises(VitrineError, match="name of a LoRA"):
        train_loras(None, [fail, fail], ["good", name], folder, LoraTrainConfig(steps=1))
    assert not folder.exists() and not list(tmp_path.iterdir())


def test_targets_that_match_nothing_are_named(unet):
    with pytest.raises(VitrineError, match="to_q"):
        initial_lora(unet, ("query",))


def test_it_adds_to_a_lora_that_diffusers_has_loaded():
    """PEFT wraps the layers; the adapters of both add up, and the layer is itself again afterwards."""
    from vitrine.engine.pipelines.emd import one_step_pipeline
    from vitrine.engine.w2w import BatchedLora
    from vitrine.evidence.w2w.people import people_space

    pipe, _ = one_step_pipeline()
    space, path = people_space(), "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    layer, x = pipe.unet.get_submodule(path), torch.randn(1, 3, 96, generator=torch.Generator().manual_seed(0))
    weights = space.decode(space.coefficients[:1])
    with torch.no_grad():
        student, base = layer(x), layer.base_layer(x)
        with BatchedLora(pipe.unet, space.manifest, weights):
            both = layer(x)
        again = layer(x)
        pipe.unload_lora_weights()
        with BatchedLora(pipe.unet, space.manifest, weights):
            person = pipe.unet.get_submodule(path)(x)
    assert torch.equal(again, student) and not torch.allclose(person, base)
    torch.testing.assert_close(both - student, person - base, atol=1e-5, rtol=1e-4)
