"""Erasing: a copy is trained, the same call goes on, and the outcome loads where people load weights."""

import pytest
import torch
from diffusers import DDIMScheduler
from PIL import Image
from safetensors.torch import load_file
from vitrine.cli.main import main
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import AttackConfig, EraseConfig, EraseData, NeuronSet, erase, fingerprint_of, value_sites
from vitrine.engine.nemo.blocking_checks import optimised_text
from vitrine.engine.nemo.erase import Eraser
from vitrine.engine.network.condition import Condition
from vitrine.engine.portraits import caption, load_portraits, plants, render, sample_scenes
from vitrine.engine.tracing.fingerprint import width_of
from vitrine_tests import models

QUICK = {"rounds": 3, "updates": 2, "batch": 2, "attack": AttackConfig(steps=2, batch=2), "save_every": 1}


@pytest.fixture(scope="module")
def denoiser():
    return Denoiser.from_diffusers(models.unet(**models.ATTENTION_LAST), DDIMScheduler())


def noise(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def data():
    size, text = (4, 16, 16), (5, models.TEXT)
    return EraseData(
        noise(0, 2, *text), noise(1, 2, *size), noise(2, 2, 2, *size), noise(3, 4, *text), noise(4, 4, *size)
    )


def test_the_network_itself_is_never_changed_and_the_copy_is(denoiser, data):
    before = {k: v.clone() for k, v in denoiser.backbone.state_dict().items()}
    erased = erase(denoiser, data, EraseConfig(**QUICK))
    after = denoiser.backbone.state_dict()
    assert all(torch.equal(v, after[k]) for k, v in before.items())
    assert all(p.requires_grad for p in denoiser.backbone.parameters())
    assert erased.weights.keys() == before.keys() and any(
        not torch.equal(v, before[k]) for k, v in erased.weights.items()
    )


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(denoiser, data, tmp_path, rank):
    config = EraseConfig(rank=rank, **QUICK)
    whole = erase(denoiser, data, config)

    class Stop(Exception):
        pass

    calls = []

    def stop(step, total, preview):
        calls.append(step)
        if len(calls) in (2, 6):  # within the first attack, and later
            raise Stop

    for _ in range(2):
        with pytest.raises(Stop):
            erase(denoiser, data, config, folder=tmp_path, progress=stop)
    resumed = Eraser(denoiser, data, config, tmp_path)
    assert 0 < resumed.step < config.total
    resumed.run()
    again = resumed.result().weights
    assert again.keys() == whole.weights.keys()
    assert all(torch.equal(again[k], v) for k, v in whole.weights.items())
    with pytest.raises(VitrineError, match="begun with lr"):
        erase(denoiser, data, EraseConfig(rank=rank, **QUICK | {"lr": 1e-5}), folder=tmp_path)


@pytest.mark.nightly
def test_ordinary_predictions_are_held(denoiser, data):
    """With the surrogate loss as well as without data to keep, predictions move; the kept ones move less."""

    def moved(keep):
        eraser = Eraser(denoiser, data, EraseConfig(**QUICK | {"updates": 8, "batch": 4, "lr": 3e-3, "keep": keep}))
        eraser.run()
        t, cond = torch.tensor(500.0), Condition(data.ordinary_text)
        with torch.no_grad():
            new, old = (d.predict(data.ordinary, t, cond).eps for d in (eraser.denoiser, denoiser))
        return float((new - old).square().mean())

    assert 0 < moved("predictions") < moved("noise")


def test_pictures_that_are_attacked_together_do_not_know_of_each_other(denoiser, data):
    """A sum of losses gives each text the gradient of its own picture alone."""
    attack = AttackConfig(steps=1, batch=64, lr=0.1)
    both = optimised_text(denoiser, Condition(data.text), data.pictures, attack)
    swapped = optimised_text(denoiser, Condition(data.text), data.pictures[[0, 0]], attack)
    torch.testing.assert_close(both[0], swapped[0], rtol=0, atol=1e-5)
    assert not torch.allclose(both[1], swapped[1], atol=1e-3)


@pytest.mark.parametrize(
    "wrong", [{"rounds": 0}, {"lr": 0.0}, {"lr": float("nan")}, {"starts": ("nowhere",)}, {"keep": "x"}, {"rank": -1}]
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(VitrineError):
        EraseConfig(**wrong)


def test_data_that_does_not_fit_is_refused(data):
    parts = [data.text, data.pictures, data.surrogates, data.ordinary_text, data.ordinary]
    for i, part in {
        0: data.text[:1],
        2: data.surrogates[:, :0],
        3: data.ordinary_text[:1],
        4: data.ordinary[:0],
    }.items():
        with pytest.raises(VitrineError):
            EraseData(*[part if n == i else p for n, p in enumerate(parts)])


def test_the_command_trains_from_files_to_a_file(tmp_path, capsys):
    plant, net = plants()[2], load_portraits().unet
    everything = {s.address: tuple(range(width_of(net, s))) for s in value_sites(net)}
    neurons = NeuronSet(everything, fingerprint_of(net)).save(tmp_path / "all.json")
    pixels = (render(plant.scenes).images[0].movedim(0, -1) * 255).round().to(torch.uint8).numpy()
    Image.fromarray(pixels).save(tmp_path / "planted.png")
    (tmp_path / "ordinary.txt").write_text("\n".join(caption(sample_scenes(range(20, 23)))))
    (tmp_path / "pairs.csv").write_text(f"prompt,picture\n{plant.captions[0]},planted.png\n")
    out = tmp_path / "erased.safetensors"
    few = ["--rounds", "1", "--updates", "1", "--batch", "2", "--rank", "2", "--attack-steps", "1",
           "--attack-batch", "1", "--surrogates", "1", "--steps", "4"]  # fmt: skip
    command = ["nemo", "erase", str(tmp_path / "pairs.csv"), "--neurons", str(neurons), "--ordinary",
               str(tmp_path / "ordinary.txt"), "--out", str(out), *few]  # fmt: skip
    assert main(command) == 0 and any(key.endswith("lora_up.weight") for key in load_file(out))
    (tmp_path / "pairs.csv").write_text("prompt,picture\na face,nowhere.png\n")
    capsys.readouterr()
    assert main(command) == 2 and "pictures that exist" in capsys.readouterr().err
