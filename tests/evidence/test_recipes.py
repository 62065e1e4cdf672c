"""Recipes on the command line: help, flat settings, and bad input on one line before anything is written."""

import pytest
from vitrine.evidence.recipes.commands import RECIPES, main
from vitrine.evidence.recipes.settings import FlowTrainConfig, TrainConfig


def test_each_recipe_has_help(capsys):
    for name in RECIPES:
        with pytest.raises(SystemExit) as stop:
            main([name, "--help"])
        assert not stop.value.code and f"vitrine.evidence.recipes {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "options", "kind", "values"),
    [
        ("portraits", "--kl-weight 1e-6 --unet-steps 7 --max-seconds 60", TrainConfig,
         {"unet_steps": 7, "max_seconds": 60.0, "kl_weight": 1e-6, "vae_batch": 8}),
        ("flow", "--flow-steps 3 --edge-weight 0.25", FlowTrainConfig, {"flow_steps": 3, "edge_weight": 0.25}),
    ],
)  # fmt: skip
def test_settings_of_a_training_have_flat_flags(name, options, kind, values, monkeypatch):
    read = []
    monkeypatch.setattr(RECIPES[name], "run", lambda self: read.append(self) or 0)
    assert main([name, *options.split()]) == 0
    (recipe,) = read
    assert isinstance(recipe, kind)
    assert {key: getattr(recipe, key, getattr(recipe.advanced, key, None)) for key in values} == values


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("flow --out file", "out: given file; accepted: a folder"),
        ("identity none", "model folder"),
        ("students", "out: given none"),
        ("sizes --start none", "portraits transformer"),
        ("transfer --source none", "portraits transformer"),
        ("export --folder none", "one with a state"),
        ("plants --set later-plant", "Did you mean later-plants"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("recipes: ") and message in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
