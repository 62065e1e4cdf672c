"""``vitrine w2w``: folders of pictures to LoRAs to a space to new LoRA files."""

import numpy as np
import pytest
import torch
from PIL import Image
from vitrine.cli.main import main
from vitrine.cli.w2w_commands import TrainLoras
from vitrine.engine.w2w import load_space, read_header, read_lora


@pytest.fixture
def pictures(tmp_path):
    for i in range(3):
        folder = tmp_path / "people" / f"p{i}"
        folder.mkdir(parents=True)
        for k in range(2):
            pixels = np.random.default_rng(10 * i + k).integers(0, 255, (70, 90, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{k}.png")
    return tmp_path / "people"


def test_from_pictures_to_new_models(pictures, tmp_path, capsys):
    loras, space = tmp_path / "loras", tmp_path / "space.w2w.safetensors"
    train = [
        "w2w",
        "train-loras",
        str(pictures),
        "--out",
        str(loras),
        "--steps",
        "2",
        "--lr",
        "0.01",
        "--together",
        "2",
    ]
    assert main([*train, "--prompt", "a face"]) == 0
    assert len(list(loras.glob("*.safetensors"))) == 3
    made = [read_lora(read_header(p)) for p in sorted(loras.glob("*.safetensors"))]
    assert any(not torch.equal(made[0][path].up, made[1][path].up) for path in made[0])
    labels = tmp_path / "labels.csv"
    labels.write_text("name,old\np0,1\np1,0\np2,1\n")
    assert main(["w2w", "build", str(loras), "--out", str(space), "--labels", str(labels)]) == 0
    assert "old" in load_space(space).directions
    plain = load_space(space).directions["old"]
    build = ["w2w", "build", str(loras), "--out", str(space), "--labels", str(labels), "--method", "joint"]
    assert main(build) == 0
    assert not torch.equal(load_space(space).directions["old"], plain)
    assert main([*build, "--exclusive", "old,odd"]) == 2 and "odd" in capsys.readouterr().err
    assert main([*build[:-2], "--exclusive", "old"]) == 2 and "--method joint" in capsys.readouterr().err
    out = tmp_path / "new"
    assert main(["w2w", "sample", str(space), "--seeds", "1", "2", "--edits", "old=1", "--out", str(out)]) == 0
    assert len(list(out.glob("model-*.safetensors"))) == 4  # a LoRA and its coefficients each
    assert "nearest" in capsys.readouterr().out


@pytest.mark.nightly
def test_two_workers_make_what_one_makes(pictures, tmp_path, capsys):
    train = ["w2w", "train-loras", str(pictures), "--steps", "2", "--together", "2", "--out"]
    assert main([*train, str(tmp_path / "one"), "--workers", "1"]) == 0
    assert main([*train, str(tmp_path / "two"), "--workers", "2"]) == 0
    assert capsys.readouterr().out.count("3 LoRAs in") == 2
    files = [sorted((tmp_path / n).glob("*.safetensors")) for n in ("one", "two")]
    assert len(files[0]) == 3 and [p.name for p in files[0]] == [p.name for p in files[1]]
    for alone, shared in zip(*files, strict=True):
        a, b = read_lora(read_header(alone)), read_lora(read_header(shared))
        for path in a:
            torch.testing.assert_close(a[path].up, b[path].up, atol=1e-6, rtol=0)
            torch.testing.assert_close(a[path].down, b[path].down, atol=1e-6, rtol=0)
    assert main([*train, str(tmp_path / "none"), "--workers", "0"]) == 2
    other = [*train, str(tmp_path / "two"), "--rank", "2", "--workers", "2"]
    assert main(other) == 2  # what a worker refuses is one line here too
    assert "begun with" in capsys.readouterr().err


def test_workers_are_started_once(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["w2w", "train-loras", "--workers", "2", "--out", str(tmp_path)]) == 2
    assert "torchrun" in capsys.readouterr().err


def test_an_interrupt_is_one_line(monkeypatch, tmp_path, capsys):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainLoras, "_train", stop)
    assert main(["w2w", "train-loras", "--workers", "1", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "w2w train-loras: loading\nvitrine: interrupted\n"


def test_bad_input_is_one_line(tmp_path, capsys):
    assert main(["w2w", "train-loras", str(tmp_path), "--out", str(tmp_path / "x")]) == 2
    assert main(["w2w", "import-official", str(tmp_path)]) == 2
    assert main(["w2w", "sample", "--edits", "beard"]) == 2
    lines = [line for line in capsys.readouterr().err.strip().splitlines() if not line.endswith(": loading")]
    assert len(lines) == 3 and "one folder for each subject" in lines[0] and "mean.pt" in lines[1]
