"""Training resumes to the bit, and what it writes loads as a StableDiffusionPipeline folder."""

import json
import math
import shutil

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits.models import WEIGHTS, load_portraits
from vitrine.engine.runtime.progress import Interrupted
from vitrine.evidence.recipes.commands import main as recipe
from vitrine.evidence.recipes.portraits import AUTOENCODER, CLASSIFIER, UNET, main
from vitrine.evidence.recipes.settings import AdvancedTrainConfig, TrainConfig

TINY = {
    "pictures": 32,
    "readout_steps": 2,
    "vae_steps": 2,
    "unet_steps": 4,
    "advanced": AdvancedTrainConfig(readout_batch=8, vae_batch=2, unet_batch=8, save_every_seconds=0.0),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return main(TrainConfig(out=str(tmp_path_factory.mktemp("run")), **TINY))


def same_weights(a, b):
    a, b = load_portraits(a), load_portraits(b)
    for part in ("unet", "text_encoder", "vae"):
        for x, y in zip(getattr(a, part).parameters(), getattr(b, part).parameters(), strict=True):
            assert torch.equal(x, y)


@pytest.mark.nightly
@pytest.mark.parametrize(("phase", "at"), [("readout", 1), ("vae", 1), ("unet", 2)])
def test_an_interrupted_run_ends_in_the_same_weights(finished, tmp_path, phase, at):
    stage = {"readout": CLASSIFIER, "vae": AUTOENCODER, "unet": UNET}[phase]

    def stop(name):
        def callback(step, total, preview=None):
            if name == stage and step == at:
                raise Interrupted

        return callback

    for earlier in ("readout", "vae", "unet"):  # what is trained before it is as in the whole run
        if earlier == phase:
            break
        shutil.copytree(finished.parent / earlier, tmp_path / earlier)
    config = TrainConfig(out=str(tmp_path), **TINY)
    with pytest.raises(Interrupted):
        main(config, stop)
    assert (tmp_path / phase / "state.safetensors").is_file()
    assert not list(tmp_path.rglob("*.tmp"))
    same_weights(finished, main(config))


@pytest.mark.nightly
def test_the_folder_is_whole(finished):
    for name in ("unet", "vae", "text_encoder", "tokenizer", "scheduler", "readout", "training.json"):
        assert (finished / name).exists(), name
    model = load_portraits(finished)
    assert math.isfinite(model.vae.config.scaling_factor)
    assert model.encode(["a face"]).shape == (1, 24, 64)


def test_bad_configs_are_refused():
    with pytest.raises(VitrineError):
        AdvancedTrainConfig(plant_share=1.0)
    with pytest.raises(VitrineError):
        AdvancedTrainConfig(unet_batch=0)
    with pytest.raises(VitrineError):
        TrainConfig(pictures=0)


@pytest.mark.nightly
def test_the_record_of_a_run_is_flat_and_still_loads(finished):
    """The shipped training.json is from before the settings were split."""
    for folder in (finished, None):
        settings = json.loads(((folder or WEIGHTS) / "training.json").read_text())["settings"]
        config = TrainConfig.from_dict(settings)
        assert config.advanced.plant_share == settings["plant_share"] and math.isinf(config.max_seconds)
        assert set(settings) == {*config.to_dict(), *config.advanced.to_dict()} - {"out", "device", "advanced"}


@pytest.mark.nightly
def test_the_command_trains_and_says_when_it_stopped(finished, tmp_path, capsys):
    flags = (
        "--pictures 32 --readout-steps 2 --vae-steps 2 --unet-steps 4 --readout-batch 8 --vae-batch 2 --unet-batch 8"
    )
    command = ["portraits", "--out", str(tmp_path), *flags.split()]
    assert recipe([*command, "--max-seconds", "-1"]) == 0
    assert "readout: stopped at step" in capsys.readouterr().out
    assert recipe(command) == 0
    same_weights(finished, tmp_path / "portraits")


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(VitrineError, match="model_index.json"):
        load_portraits(tmp_path)
