"""``vitrine emd evaluate``: students against their teacher at equal seeds."""

import json

import pytest
import torch
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection
from vitrine.engine.cli.main import main
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits.shipped import student_file
from vitrine.evidence.emd.evaluate import Protocol, best, checkpoints, features_of


def test_the_shipped_student_is_nearer_than_the_teachers_single_step(tmp_path, capsys):
    prompts, run = tmp_path / "prompts.txt", tmp_path / "checkpoints"
    prompts.write_text("a smiling face\n\na pale face with glasses\na face with short hair\n")
    for step, name in ((100, "student"), (20, "diff-instruct")):
        folder = run / f"step_{step}"
        folder.mkdir(parents=True)
        (folder / "generator_kohya.safetensors").symlink_to(student_file(name))
    told = ["--prompts", str(prompts), "--seeds", "2", "--steps", "4", "--out", str(tmp_path / "figures.json")]
    assert main(["emd", "evaluate", str(run), *told]) == 0
    rows = json.loads((tmp_path / "figures.json").read_text())
    files = checkpoints(run)
    assert [f.parent.name for f in files] == ["step_20", "step_100"]
    assert list(rows) == ["teacher, other seeds", "teacher, 1 step", *map(str, files)]
    near, far = rows[str(files[1])], rows["teacher, 1 step"]
    assert near["from the teacher's picture"] < far["from the teacher's picture"]
    assert near["Frechet distance"] < far["Frechet distance"] and 1 <= near["Vendi"] <= 2
    assert f"best: {best(rows, files)}" in capsys.readouterr().out


def test_features_of_a_folder(tmp_path):
    config = CLIPVisionConfig(hidden_size=16, intermediate_size=32, projection_dim=8, num_hidden_layers=1,
                              num_attention_heads=2, image_size=28, patch_size=14)  # fmt: skip
    torch.manual_seed(0)
    CLIPVisionModelWithProjection(config).save_pretrained(tmp_path)
    CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=28).save_pretrained(tmp_path)
    pictures = torch.rand(3, 3, 64, 64)
    features = features_of(str(tmp_path))(pictures)
    assert features.shape == (3, 16)
    torch.testing.assert_close(features_of(str(tmp_path))(pictures[1:2])[0], features[1], rtol=1e-4, atol=1e-4)


def test_what_cannot_be_judged_is_refused(tmp_path):
    with pytest.raises(VitrineError, match="more seeds"):
        Protocol(["a face"], 4)
    with pytest.raises(VitrineError, match="keep = 3"):
        checkpoints(tmp_path)
    with pytest.raises(VitrineError, match="preprocessor_config"):
        features_of(str(tmp_path / "nowhere"))
