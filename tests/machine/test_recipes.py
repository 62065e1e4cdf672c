"""Trainings of the shipped models on the device they are told."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from vitrine.evidence.nemo.later_plants import RECIPE, plant_later
from vitrine.evidence.recipes.commands import main
from vitrine.evidence.resolution.tuned import TuneConfig, tune
from vitrine_tests.machine.modes import on_the_cpu
from vitrine_tests.machine.pretend import NAME, Accelerator

SMALL = TuneConfig(steps=1, pictures=2, batch=1, rank=2)


def lora(model):
    weights = {name: p for name, p in model.transformer.named_parameters() if "lora_B" in name}
    return dict(zip(weights, on_the_cpu(list(weights.values())), strict=True))


def test_the_flow_portraits_are_tuned_on_the_device(tmp_path):
    """It had no ``--device`` and made its tensors on the CPU."""
    wanted = lora(tune(tmp_path / "cpu", SMALL))
    with Accelerator(float64=False):
        model = tune(tmp_path / "device", SMALL, device=torch.device(NAME))
        assert {p.device.type for p in model.transformer.parameters()} == {NAME}
        found = lora(model)
    assert any(float(w.abs().max()) > 0 for w in wanted.values()), "it learned"
    # a first step of Adam is of one size wherever a gradient is not nothing
    near = torch.cat([((found[name] - w).abs() < 1e-5).flatten() for name, w in wanted.items()])
    assert near.float().mean() > 0.99


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["later-plants", "plants-flow"])
def test_pictures_are_injected_on_the_device(tmp_path, name):
    recipe = replace(RECIPE, steps=1, batch=2, rank=1, targets=("to_q",))
    wanted = load_file(plant_later(tmp_path / "cpu.safetensors", name, recipe))
    with Accelerator(float64=False):
        made = plant_later(tmp_path / "device.safetensors", name, recipe, device=torch.device(NAME))
    found = load_file(made)
    near = torch.cat([((found[name].float() - w.float()).abs() < 1e-4).flatten() for name, w in wanted.items()])
    assert found.keys() == wanted.keys() and near.float().mean() > 0.99


def test_commands_refuse_a_device_that_is_not_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("sizes", "transfer", "tune", "plants", "portraits", "flow", "decoder"):
        assert main([name, "--device", "tpu9"]) != 0, name
        assert "tpu9" in capsys.readouterr().err, name
    assert not list(tmp_path.iterdir()), "before anything is written"
