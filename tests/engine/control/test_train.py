"""Training of control embeddings: loss, resumption, what stays frozen, what is drawn, and the records' augmentation."""

import json

import pytest
import torch
from safetensors.torch import load_file
from vitrine.engine.control import (
    AugmentConfig,
    ControlEmbedder,
    ControlMetadata,
    ControlRecord,
    ControlSpec,
    ControlTrainConfig,
    ControlTrainer,
    GammaConfig,
    TrainSetup,
    augment,
    control_width,
    injected,
    load_control,
)
from vitrine.engine.diffusion.schedule import NoiseSchedule
from vitrine.engine.errors import VitrineError
from vitrine_tests import models

pytestmark = pytest.mark.rounding


TEXTS = torch.randn(5, 5, models.TEXT, generator=torch.Generator().manual_seed(2))
"""States of five prompts; the last is the empty one."""


def tiny_pixart():
    return models.pixart(in_channels=3, out_channels=3, sample_size=8)


def run_of(net):
    return lambda x, t, prompts: net(x, encoder_hidden_states=TEXTS[prompts], timestep=t).sample


def embedder():
    torch.manual_seed(1)
    return ControlEmbedder(ControlSpec(), 16)


def records():
    ramp = torch.linspace(-1, 1, 12)
    images = [torch.stack([ramp[:, None].expand(12, 12), ramp.expand(12, 12), s * torch.ones(12, 12)]) for s in (-1, 1)]
    return (ControlRecord(x * (0.5 + 0.5 * i), torch.tensor(i), 64, 96) for i, x in enumerate(images))


def trainer(folder, full=True, steps=6, **how):
    pixart = tiny_pixart().requires_grad_(full)
    net = ControlEmbedder(ControlSpec(), control_width(pixart), zero_init=not full)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(4)) * (0.02 if full else p.abs()))
    network = injected(pixart, run_of(pixart))
    config = ControlTrainConfig.from_dict({"steps": steps, "batch": 8, "lr": 3e-3, "augment": AugmentConfig(8)} | how)
    schedule = NoiseSchedule.scaled_linear()
    mine = dict(pixart.named_parameters()) if full else {}
    about = ControlMetadata("PixArtTransformer2DModel", net.dim, base_model="tiny")
    trainee = TrainSetup(network, net, schedule, torch.tensor(4), mine)
    return ControlTrainer(trainee, records(), config, folder, about)


def held_out(run):
    with torch.no_grad():
        return sum(float(run.loss(run.sample_batch(10**6 + i))) for i in range(16)) / 16


def test_training_lowers_the_loss(tmp_path):
    run = trainer(tmp_path, steps=50)
    before = held_out(run)
    loaded = load_control(run.run())
    assert run.done == 50 and run.skipped == 0
    assert held_out(run) < 0.85 * before
    assert loaded.metadata.steps == 50 and loaded.metadata.crop == (0.5, 1.0)
    assert any(k.startswith("base.") for k in loaded.extra)
    raw = load_control(tmp_path / "control_raw.safetensors").embedder
    assert torch.equal(raw.h[0].weight, run.embedder.h[0].weight)
    assert not torch.equal(raw.h[0].weight, loaded.embedder.h[0].weight)


def test_training_resumes_to_the_bit(tmp_path):
    trainer(tmp_path / "whole").run()
    trainer(tmp_path / "parts").run(until=3)
    second = trainer(tmp_path / "parts")
    assert second.done == 3
    second.run()
    whole, parts = (load_file(tmp_path / n / "state.safetensors") for n in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[k], parts[k]) for k in whole)
    with pytest.raises(VitrineError, match="begun with advanced.drop_control 0.1 .now 0.2"):
        trainer(tmp_path / "parts", drop_control=0.2)


def test_the_frozen_network_stays_and_the_adapter_starts_at_nothing(tmp_path):
    run = trainer(tmp_path, full=False, steps=3)
    batch = run.sample_batch(0)
    x = run.schedule.add_noise(batch.x0, batch.noise, batch.t)
    with torch.no_grad():
        start = run.network(x, batch.t.float(), batch.semantics, torch.zeros(8, run.embedder.dim))
        assert torch.equal(start, run_of(tiny_pixart())(x, batch.t.float(), batch.semantics))
        assert float(run.loss(batch)) == float((start - batch.noise).square().mean())
    old = {k: p.detach().clone() for k, p in run.parameters.items()}
    run.run()
    assert set(old) == {f"ctrl.{k}" for k in run.embedder.state_dict()}
    assert not torch.equal(old["ctrl.l.2.weight"], run.parameters["ctrl.l.2.weight"])


def test_rows_are_dropped_at_the_given_rates(tmp_path):
    run = trainer(tmp_path, full=False, batch=400, drop_control=0.3, drop_semantics=0.1, drop_together=False)
    batch = run.sample_batch(0)
    assert abs(float(batch.drop.float().mean()) - 0.3) < 0.08
    assert abs(float((batch.semantics == 4).float().mean()) - 0.1) < 0.05
    assert abs(float(batch.values[:, 0].mean()) - 0.5) < 0.08  # half of them are flipped
    again = run.sample_batch(0)
    assert all(torch.equal(a, b) for a, b in zip(batch, again, strict=True))


def test_semantics_are_dropped_with_controls(tmp_path):
    """The rows that Eq. 2 needs are (c, s), (0, s) and (0, 0); none is trained with controls alone."""
    settings = {"full": False, "batch": 400, "drop_control": 0.1, "drop_semantics": 0.1}
    together, apart = (trainer(tmp_path, **settings, drop_together=on).sample_batch(0) for on in (True, False))
    unsaid = together.semantics == 4
    assert bool(together.drop[unsaid].all()) and 0 < int(unsaid.sum()) < int(together.drop.sum()) < 400
    assert torch.equal(apart.semantics, together.semantics) and not bool(apart.drop[unsaid].all())
    assert torch.equal(apart.drop | unsaid, together.drop), "nothing else is drawn otherwise"


def test_the_gradient_at_full_noise_passes_the_network(tmp_path):
    run = trainer(tmp_path)
    batch = run.sample_batch(0)._replace(drop=torch.zeros(8, dtype=torch.bool))
    # u = 1 lies one step above the table's last timestep
    added = run.embedder(batch.values, torch.ones(8, dtype=torch.float64), run.config.gamma)
    found = run.network(batch.noise, torch.full((8,), 1000.0), batch.semantics, added)
    (found - batch.noise).square().mean().backward()
    assert all(bool((p.grad == 0).all()) for p in run.embedder.l.parameters())
    assert all(bool((p.grad != 0).any()) for p in run.embedder.h.parameters())


def test_gamma_is_inside_the_loss(tmp_path):
    run = trainer(tmp_path, gamma=GammaConfig(alpha=50.0))
    batch = run.sample_batch(0)._replace(drop=torch.zeros(8, dtype=torch.bool))
    other = batch._replace(values=batch.values + torch.tensor([0, 0, 0, 0, 300, 700]))
    early, late = torch.full((8,), 900), torch.full((8,), 10)
    with torch.no_grad():
        assert torch.equal(run.loss(batch._replace(t=early)), run.loss(other._replace(t=early)))
        assert not torch.equal(run.loss(batch._replace(t=late)), run.loss(other._replace(t=late)))
        dropped = [row._replace(t=late, drop=~batch.drop) for row in (batch, other)]
        assert torch.equal(run.loss(dropped[0]), run.loss(dropped[1]))
        assert not torch.equal(run.loss(dropped[0]), run.loss(batch._replace(t=late)))


@pytest.mark.parametrize("prediction", ["eps", "v", "x0", "flow"])
def test_targets_are_those_of_the_prediction(tmp_path, prediction):
    schedule = NoiseSchedule.flow() if prediction == "flow" else NoiseSchedule.scaled_linear()
    seen = {}

    def network(x, t, semantics, added):
        seen.update(x=x, t=t)
        return torch.zeros_like(x) + 0 * added.sum()

    network.inputs = prediction  # what a resumed job compares
    config, net = ControlTrainConfig(prediction=prediction, batch=4, augment=AugmentConfig(8)), embedder()
    run = ControlTrainer(TrainSetup(network, net, schedule, torch.tensor(4)), records(), config, tmp_path)
    batch = run.sample_batch(3)
    loss = run.loss(batch)
    signal, level = (s.reshape(-1, 1, 1, 1) for s in schedule.scales(batch.t))
    x0, noise = batch.x0.double(), batch.noise.double()
    target = {"eps": noise, "x0": x0, "v": signal * noise - level * x0, "flow": noise - x0}[prediction]
    assert torch.allclose(loss.double(), target.square().mean(), rtol=1e-5)
    assert torch.allclose(seen["x"].double(), signal * x0 + level * noise, atol=1e-5)
    if prediction != "flow":
        with pytest.raises(VitrineError, match="flow with flow"):
            ControlTrainer(TrainSetup(network, net, NoiseSchedule.flow(), torch.tensor(4)), records(), config, tmp_path)


def test_settings_round_trip_and_bad_ones_are_refused():
    config = ControlTrainConfig(gamma=GammaConfig(alpha=2.0), augment=AugmentConfig(64, size_from="crop"))
    assert ControlTrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    for bad in ({"steps": 0}, {"ema": 1.0}, {"prediction": "x"}, {"drop_control": 2}, {"save_every": 0}):
        with pytest.raises(VitrineError):
            ControlTrainConfig.from_dict(bad)
    for bad in ({"crop": (0.0, 1.0)}, {"aspect": 0.5}, {"size_from": "x"}):
        with pytest.raises(VitrineError):
            AugmentConfig(**bad)


def test_augmentation_tells_what_it_did():
    random = torch.Generator().manual_seed(0)
    x = torch.arange(12 * 20).float().reshape(1, 12, 20)
    record = ControlRecord(x, torch.tensor(0))
    same, told = augment(record, AugmentConfig(12, flip=1.0, crop=(1.0, 1.0)), random)
    left = round(told["crop_left"] * 20)
    assert told["flip"] == 1 and told["crop_top"] == 0 and (told["height"], told["width"]) == (12, 20)
    assert torch.equal(same, x.flip(-1)[..., left : left + 12])
    config = AugmentConfig(8, flip=0.0, crop=(0.5, 0.6), aspect=2.0, size_from="crop")
    found = [augment(record, config, random)[1] for _ in range(40)]
    assert {t["aspect"] > 1 for t in found} == {True, False}
    assert all(0.4 < t["aspect"] < 2.5 and t["aspect"] == t["width"] / t["height"] and t["height"] < 12 for t in found)
