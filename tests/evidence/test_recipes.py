"""Recipes on the command line: help, flat settings, and bad input on one line before anything is written."""

import pytest
from vitrine.engine.portraits.shipped import PEOPLE_SPACE
from vitrine.engine.w2w.space.space import WeightSpace
from vitrine.evidence.recipes.commands import RECIPES, main
from vitrine.evidence.recipes.settings import FlowTrainConfig, TrainConfig
from vitrine.evidence.w2w import pair_sliders


def test_each_recipe_has_help(capsys):
    for name in RECIPES:
        with pytest.raises(SystemExit) as stop:
            main([name, "--help"])
        assert not stop.value.code and f"vitrine.evidence.recipes {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "options", "kind", "values"),
    [
        (
            "portraits",
            "--kl-weight 1e-6 --unet-steps 7 --max-seconds 60",
            TrainConfig,
            {"unet_steps": 7, "max_seconds": 60.0, "kl_weight": 1e-6, "vae_batch": 8},
        ),
        ("flow", "--flow-steps 3 --edge-weight 0.25", FlowTrainConfig, {"flow_steps": 3, "edge_weight": 0.25}),
    ],
)
def test_settings_of_a_training_have_flat_flags(name, options, kind, values, monkeypatch):
    read = []
    monkeypatch.setattr(RECIPES[name], "run", lambda self: read.append(self) or 0)
    assert main([name, *options.split()]) == 0
    (recipe,) = read
    assert isinstance(recipe, kind)
    assert {key: getattr(recipe, key, getattr(recipe.advanced, key, None)) for key in values} == values


def test_sliders_from_pairs_are_trained_into_the_file_that_is_named(monkeypatch, tmp_path, capsys):
    taken = []

    def train(labels, work, file, progress):
        taken.append((labels, work, file))
        return WeightSpace.load(PEOPLE_SPACE)

    monkeypatch.setattr(pair_sliders, "train_shipped_sliders", train)
    file = tmp_path / "people.w2w.safetensors"
    assert main(["pair-sliders", "--labels", "bald", "--file", str(file), "--work", str(tmp_path / "work")]) == 0
    assert taken == [(("bald",), tmp_path / "work", file)] and str(file) in capsys.readouterr().out


def test_the_shipped_people_have_each_slider_of_the_recipe(tmp_path):
    """The whole recipe on the shipped file has nothing left to train, and leaves the file as it is."""
    file = tmp_path / "people.w2w.safetensors"
    file.write_bytes(PEOPLE_SPACE.read_bytes())
    assert main(["pair-sliders", "--file", str(file), "--work", str(tmp_path / "work")]) == 0
    assert file.read_bytes() == PEOPLE_SPACE.read_bytes()


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
        ("pair-sliders --labels glases", "Did you mean glasses"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("recipes: ") and message in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
