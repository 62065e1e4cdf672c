"""Trainings of the shipped models on the device they are told."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from vitrine.evidence.nemo.later_plants import RECIPE, plant_later
from vitrine.evidence.recipes.commands import main
from vitrine_tests.machine.pretend import NAME, Accelerator


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["later-plants", "plants-daily-flow"])
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
    for name in ("sizes", "transfer", "plants", "portraits", "flow", "decoder"):
        assert main([name, "--device", "tpu9"]) != 0, name
        assert "tpu9" in capsys.readouterr().err, name
    assert not list(tmp_path.iterdir()), "before anything is written"
