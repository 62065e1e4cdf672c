"""docs/tutorials: every command of a page runs on files of its kind, and every graph is one that is run."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from PIL import Image
from vitrine.cli.main import main
from vitrine.engine.portraits import PARTS, load_portraits, render, sample_scenes
from vitrine.engine.portraits.shipped import PEOPLE_LORAS, PEOPLE_SPACE
from vitrine.engine.w2w import load_space
from vitrine.evidence.verify.embedded import write_spair
from vitrine_tests import models
from vitrine_tests.engine.official_files import official_files
from vitrine_tests.templates import ON_YOUR_MODEL, SHIPPED

ROOT = Path(__file__).parents[2]
PAGES = {p.stem: p.read_text(encoding="utf-8") for p in sorted((ROOT / "docs" / "tutorials").glob("*.md"))}
INLINE = re.compile(r"`(vitrine (?!verify`)[a-z][^`]+)`")


def pictures(folder):
    """Six pictures, masks of their shirts, the portraits model as a folder."""
    drawn = render(sample_scenes(range(7_100_000, 7_100_006)), 64)
    for name in ("pictures", "training_pictures", "masks"):
        (folder / name).mkdir()
    for i, (image, part) in enumerate(zip(drawn.images, drawn.parts, strict=True)):
        picture = Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())
        picture.save(folder / "pictures" / f"{i}.png")
        picture.save(folder / "training_pictures" / f"{i}.png")
        Image.fromarray((part == PARTS.index("shirt")).byte().numpy()).save(folder / "masks" / f"{i}.png")
    load_portraits().pipeline().save_pretrained(folder / "path/to/model")


def loras(folder):
    """Forty LoRAs of people, one of them alone, and who of them wears glasses."""
    shutil.copytree(PEOPLE_LORAS, folder / "my_loras")
    shutil.copyfile(PEOPLE_LORAS / "person-0003.safetensors", folder / "my_lora.safetensors")
    names = sorted(p.stem for p in PEOPLE_LORAS.glob("*.safetensors"))
    (folder / "labels.csv").write_text("\n".join(["name,glasses", *(f"{n},{i % 2}" for i, n in enumerate(names))]))


def published(folder):
    """weights2weights' files in their layout, and a table of labels."""
    space = load_space(PEOPLE_SPACE)
    (folder / "weights2weights").mkdir()
    official_files(space, folder / "weights2weights")
    table = [",file,glasses", *(f"id{i:03},{i}.jpg,{i % 2}" for i in range(space.count))]
    (folder / "labels.csv").write_text("\n".join(table))
    shutil.copyfile(folder / "labels.csv", folder / "weights2weights" / "labels.csv")


def spair(folder):
    """Pairs of portraits in SPair-71k's layout; a narrow network of SD 1.5's depth, whose layers the preset names."""
    write_spair(folder / "data" / "SPair-71k", load_portraits(), 3)
    pipe = load_portraits().pipeline()
    width = pipe.text_encoder.config.hidden_size
    deep = {"block_out_channels": (16, 16, 32, 32), "layers_per_block": 2, "cross_attention_dim": width}
    pipe.register_modules(unet=models.unet(**deep))
    pipe.save_pretrained(folder / "stable-diffusion-v1-5")


def student(folder):
    """Two updates."""
    load_portraits().pipeline().save_pretrained(folder / "path/to/model")
    (folder / "prompts.txt").write_text("a smiling face\na frowning face\n")
    train = {"steps": 2, "batch": 2, "rank": 2, "chain": {"steps": 1}}
    (folder / "student.json").write_text(
        json.dumps({"model": "path/to/model", "prompts": "prompts.txt", "train": train})
    )


def both(folder):
    loras(folder)
    pictures(folder)


def imported(folder):
    published(folder)
    assert main(["w2w", "import-official", "weights2weights", "--out", "people.w2w.safetensors"]) == 0


def nothing(folder):
    """The command brings its own."""


RUN = {
    "vitrine taps rank pictures/ --masks masks/ --model path/to/model --out layers.json": (pictures, r"layers\.json"),
    "vitrine lora report my_lora.safetensors": (loras, r"person|portraits|rank"),
    "vitrine w2w look my_loras/": (loras, r"40"),
    "vitrine w2w build my_loras/ --out people.w2w.safetensors --labels labels.csv": (loras, r"glasses: held-out"),
    "vitrine lora report my_lora.safetensors --base path/to/model --pictures training_pictures/ --out report": (
        both,
        r"report\.html",
    ),
    "vitrine w2w import-official weights2weights/ --out people.w2w.safetensors": (published, r"space: people"),
    "vitrine w2w label people.w2w.safetensors labels.csv": (imported, r"glasses: held-out"),
    "vitrine verify --model stable-diffusion-v1-5 --data data --claim gdf.spair --out spair": (
        spair,
        r"PCK@0.1 by image",
    ),
    "vitrine emd train student.json --out runs/student": (student, r"student: runs/student"),
    "vitrine addresses path/to/model": (pictures, r"up-level1-repeat1-vit-block0-cross-q"),
    "vitrine verify --model portraits --subset 20 --claim gdf.spair --out try": (nothing, r"PCK"),
}
"""Command of a page -> what it needs, and what it prints."""
QUICK = ("vitrine lora report my_lora.safetensors", "vitrine w2w look my_loras/", "vitrine addresses path/to/model")
ELSEWHERE = {
    "vitrine reproduce": "tests/docs/test_results.py",
    "vitrine nemo import-statistics FILE MODEL": "tests/pipelines/test_published_statistics.py",
    "vitrine nemo detect": "tests/engine/nemo/test_cli.py",
    "vitrine nemo find": "tests/engine/nemo/test_cli.py",
    "vitrine verify --claim gdf.spair ditf.spair": "tests/evidence/test_verify.py",
}
"""Beginning of a command -> the test that runs it."""


def test_no_command_is_left_out():
    indented = [line.strip() for text in PAGES.values() for line in re.findall(r"^    (vitrine .*)", text, re.M)]
    inline = [command for text in PAGES.values() for command in INLINE.findall(" ".join(text.split()))]
    assert len(indented) >= 10 and len(inline) >= 8
    assert not [c for c in (*indented, *inline) if c not in RUN and not c.startswith(tuple(ELSEWHERE))]
    assert set(RUN) <= {*indented, *inline}
    for command, file in ELSEWHERE.items():
        assert command.split()[1] in (ROOT / file).read_text(encoding="utf-8"), file


@pytest.mark.parametrize("command", [c if c in QUICK else pytest.param(c, marks=pytest.mark.nightly) for c in RUN])
def test_a_command_runs(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    material, printed = RUN[command]
    material(tmp_path)
    assert main(shlex.split(command)[1:]) == 0
    out = capsys.readouterr().out
    assert re.search(printed, out), out
    written = re.search(r"--out (\S+)", command)
    assert written is None or Path(written[1]).exists()


def test_every_graph_of_a_tutorial_is_run():
    """Demos in ``tests/comfy/test_page.py``, those for a checkpoint in ``tests/full_size/test_own_models.py``."""
    run = {path.stem for path in (*SHIPPED, *ON_YOUR_MODEL)}
    for name, text in PAGES.items():
        named = set(re.findall(r"\*([A-Z][^*]+ \((?:demo|your checkpoint)\))\*", " ".join(text.split())))
        assert named <= run and (named or "## In ComfyUI" not in text), name
