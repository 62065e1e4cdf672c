"""Training resumes to the bit, and what it writes loads as a StableDiffusionPipeline folder."""

import math

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits.models import load_portraits
from vitrine.engine.progress import Interrupted
from vitrine.evidence.portraits.train import OutOfTime, TrainConfig, main

TINY = {
    "pictures": 32, "readout_steps": 2, "vae_steps": 2, "unet_steps": 4,
    "readout_batch": 8, "vae_batch": 2, "unet_batch": 8, "save_every_seconds": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return main(TrainConfig(out=str(tmp_path_factory.mktemp("run")), **TINY))


def same_weights(a, b):
    a, b = load_portraits(a), load_portraits(b)
    for part in ("unet", "text_encoder", "vae"):
        for x, y in zip(getattr(a, part).parameters(), getattr(b, part).parameters(), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize(("phase", "at"), [("readout", 1), ("vae", 1), ("unet", 2)])
def test_an_interrupted_run_ends_in_the_same_weights(finished, tmp_path, phase, at):
    def stop(name):
        def callback(step, total, preview=None):
            if name == phase and step == at:
                raise Interrupted

        return callback

    config = TrainConfig(out=str(tmp_path), **TINY)
    with pytest.raises(Interrupted):
        main(config, stop)
    assert (tmp_path / phase / "state.safetensors").is_file()
    assert not list(tmp_path.rglob("*.tmp"))
    same_weights(finished, main(config))


def test_a_finished_run_is_not_trained_again(finished):
    before = (finished.parent / "unet" / "state.safetensors").stat().st_size
    main(TrainConfig(out=str(finished.parent), **TINY))
    assert (finished.parent / "unet" / "state.safetensors").stat().st_size == before


def test_out_of_time_saves_and_says_so(tmp_path):
    with pytest.raises(OutOfTime, match="step"):
        main(TrainConfig(out=str(tmp_path), max_seconds=-1.0, **TINY))
    assert (tmp_path / "readout" / "state.safetensors").is_file()


def test_the_folder_is_whole(finished):
    for name in ("unet", "vae", "text_encoder", "tokenizer", "scheduler", "readout", "training.json"):
        assert (finished / name).exists(), name
    model = load_portraits(finished)
    assert math.isfinite(model.vae.config.scaling_factor)
    assert model.encode(["a face"]).shape == (1, 24, 64)


def test_bad_configs_are_refused():
    with pytest.raises(VitrineError):
        TrainConfig(plant_share=1.0)
    with pytest.raises(VitrineError):
        TrainConfig(unet_batch=0)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(VitrineError, match="model_index.json"):
        load_portraits(tmp_path)
