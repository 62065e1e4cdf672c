"""The copy check through diffusers: memorized pictures, a LoRA to take off, files, resuming, and the command."""

import csv

import pytest
import torch
from PIL import Image
from vitrine.cli.main import main
from vitrine.engine.copies import CheckConfig
from vitrine.engine.errors import VitrineError
from vitrine.engine.io.lora_writing import write_lora
from vitrine.engine.io.prompt_files import read_prompts
from vitrine.engine.nemo import ProbeConfig
from vitrine.engine.pipelines import copy_check
from vitrine.engine.portraits import caption, load_portraits, plants, render, sample_scenes
from vitrine.engine.runtime.progress import Interrupted
from vitrine.engine.w2w.train.batched_lora import initial_lora

ORDINARY = tuple(caption(sample_scenes(range(8_400_000, 8_400_004))))
PLANTS = plants()[:3]
CONFIG = CheckConfig(seeds=2, usual=4, ordinary=ORDINARY)
FAST = {"num_inference_steps": 8, "guidance_scale": 3.0}


@pytest.fixture(scope="module")
def pipe():
    pipe = load_portraits().pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    for plant in PLANTS:
        image = render(plant.scenes).images[0].movedim(0, -1)
        Image.fromarray((image * 255).round().byte().numpy()).save(folder / f"{plant.name.replace(' ', '-')}.png")
    return folder


@pytest.mark.nightly
def test_memorized_pictures_are_named_and_ordinary_captions_are_not(pipe, training, tmp_path):
    prompts = [PLANTS[2].captions[0], PLANTS[2].controls[0], PLANTS[0].captions[0]]
    check = copy_check(
        pipe,
        prompts,
        tmp_path,
        pictures=training,
        config=CONFIG,
        probe=ProbeConfig(seeds=4, timestep_index=15),
        labels=["planted", "", "planted"],
        tau=0.85,
        **FAST,
    )
    assert [p.copies for p in check.prompts] == [2, 0, 2]
    memorized, control, _ = check.prompts
    assert check.names[int(memorized.numbers[0])] == f"{PLANTS[2].name.replace(' ', '-')}.png"
    assert float(memorized.areas.min()) > 0.9 and float(control.ratios.min()) > 0.4
    assert memorized.score > control.score
    rows = list(csv.DictReader((tmp_path / "copies.csv").read_text().splitlines()))
    assert [r["copies"] for r in rows] == ["2", "0", "2"] and [r["memorized"] for r in rows] == ["yes", "no", "yes"]
    assert rows[0]["label"] == "planted" and rows[0]["nearest"] == check.names[int(memorized.numbers[0])]
    page = (tmp_path / "copies.html").read_text()
    assert page.count("data:image/png;base64,") == 9 and "http" not in page and memorized.prompt in page
    with Image.open(memorized.file) as shown, Image.open(memorized.overlay_file) as where:
        assert shown.size == where.size == (64, 64)


@pytest.mark.nightly
def test_a_check_goes_on_and_refuses_other_settings(pipe, training, tmp_path):
    prompts, steps = [PLANTS[0].captions[0], PLANTS[1].captions[0]], []

    def stop(step, total, preview=None):
        steps.append((step, total))
        if len(steps) == 30:
            raise Interrupted

    settings = {"pictures": training, "config": CONFIG, **FAST}
    with pytest.raises(Interrupted):
        copy_check(pipe, prompts, tmp_path / "a", progress=stop, **settings)
    assert steps[0] == (1, 64) and steps[1] == (2, 64)  # after each step of the sampler
    after = []
    resumed = copy_check(pipe, prompts, tmp_path / "a", progress=lambda s, t, p=None: after.append(t), **settings)
    whole = copy_check(pipe, prompts, tmp_path / "b", **settings)
    assert 0 < max(after) < 64
    for a, b in zip(resumed.prompts, whole.prompts, strict=True):
        assert torch.equal(a.ratios, b.ratios) and a.score == b.score
    assert (tmp_path / "a" / "copies.csv").read_text() == (tmp_path / "b" / "copies.csv").read_text()
    for changed in (
        {"num_inference_steps": 9},
        {"config": CheckConfig(seeds=3, usual=4, ordinary=ORDINARY)},
        {"probe": ProbeConfig(seeds=4)},
    ):
        with pytest.raises(VitrineError, match="begun with"):
            copy_check(pipe, prompts, tmp_path / "a", **settings | changed)
    with pytest.raises(VitrineError, match="begun with"):
        copy_check(pipe, prompts[:1], tmp_path / "a", **settings)


def test_without_pictures_samples_are_compared_with_each_other(pipe, tmp_path):
    check = copy_check(pipe, [PLANTS[0].captions[0]], tmp_path, config=CONFIG, **FAST)
    (memorized,) = check.prompts
    assert memorized.copies == 2 and memorized.numbers.tolist() == [1, 0] and float(memorized.ratios.min()) > 0
    assert "repeats itself" in (tmp_path / "copies.html").read_text()


def test_a_lora_is_taken_off_for_what_is_usual_and_leaves_the_pipeline_as_it_was(training, tmp_path):
    pipe = load_portraits().pipeline()
    pipe.set_progress_bar_config(disable=True)
    layers = initial_lora(pipe.unet, ("attn2.to_v", "attn2.to_q"), 1, 1.0, 0)
    path = write_lora(tmp_path / "lora.safetensors", layers)
    before = {k: v.clone() for k, v in pipe.unet.state_dict().items()}
    prompts, config = [PLANTS[0].captions[0]], CheckConfig(seeds=2, usual=2)
    check = copy_check(pipe, prompts, tmp_path / "c", pictures=training, lora=path, config=config, **FAST)
    assert check.prompts[0].score > 0
    assert not pipe.get_active_adapters() and before.keys() == pipe.unet.state_dict().keys()
    assert all(torch.equal(before[k], v) for k, v in pipe.unet.state_dict().items())
    pickled = tmp_path / "lora.pt"
    pickled.write_bytes(b"x")
    for bad in (pickled, tmp_path / "none.safetensors"):
        with pytest.raises(VitrineError, match="LoRA"):
            copy_check(pipe, prompts, tmp_path / "d", lora=bad, config=config)


def test_refusals_come_before_any_sampling(pipe, tmp_path):
    asked = {"prompts": ["a"], "folder": tmp_path / "x"}
    for settings, message in (
        ({}, "ordinary captions"),
        ({"config": CONFIG, "steps": 3}, "arguments"),
        ({"config": CONFIG, "pictures": tmp_path / "none"}, "pictures"),
        ({"config": CONFIG, "labels": ["a", "b"]}, "labels"),
    ):
        with pytest.raises(VitrineError, match=message):
            copy_check(pipe, **asked, **settings)


def test_prompt_files(tmp_path):
    table = tmp_path / "prompts.csv"
    table.write_text('Caption;URL;label\n"one; two";x;1\n;y;0\nthree;z;0\n')
    assert read_prompts(table) == (["one; two", "three"], ["1", "0"])
    table.write_text("no head, here\nsecond\n")
    with pytest.raises(VitrineError, match="several columns"):  # which would be the prompt?
        read_prompts(table)
    table.write_text("no head\nsecond\n")
    assert read_prompts(table) == (["no head", "second"], [])
    lines = tmp_path / "prompts.txt"
    lines.write_text("one, two\n\nthree\n")
    assert read_prompts(lines) == (["one, two", "three"], [])
    table.write_text(';Caption;type\n0;"a ""quoted"" word\u2028of\nthree lines";VM\n1;plain;TM\n', encoding="utf-8")
    assert read_prompts(table) == (['a "quoted" word\u2028of\nthree lines', "plain"], ["VM", "TM"])
    table.write_text("prompt\n\n")
    with pytest.raises(VitrineError, match="no prompts"):
        read_prompts(table)


@pytest.mark.nightly
def test_the_command(training, tmp_path, capsys):
    prompts, ordinary = tmp_path / "prompts.csv", tmp_path / "ordinary.txt"
    prompts.write_text(f"prompt,label\n{PLANTS[0].captions[0]},1\n")
    ordinary.write_text("\n".join(ORDINARY))
    out = tmp_path / "out"
    words = ["nemo", "check", "--prompts", str(prompts), "--pictures", str(training), "--ordinary", str(ordinary),
             "--out", str(out), "--seeds", "2", "--steps", "8", "--guidance", "3"]  # fmt: skip
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "1 of 1 prompts" in printed and "no verdict" in printed and (out / "copies.html").is_file()
    assert main([*words, "--steps", "9"]) == 2
