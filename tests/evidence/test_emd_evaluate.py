"""``vitrine emd evaluate``: students against their teacher at equal seeds."""

import json

import pytest
import torch
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)
from vitrine.engine.cli.main import main
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits import load_portraits
from vitrine.engine.portraits.shipped import student_file
from vitrine.evidence.emd.clip_score import Clip, clip_scores
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


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    """A CLIP of random weights, both sides, with the portraits' tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("clip"), load_portraits().tokenizer
    sides = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = sides | {"vocab_size": len(tokenizer), "max_position_embeddings": 16, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    config = CLIPConfig(text_config=text, vision_config=sides | {"image_size": 28, "patch_size": 14}, projection_dim=8)
    CLIPModel(config).save_pretrained(folder)
    CLIPProcessor(CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=28), tokenizer).save_pretrained(folder)
    return str(folder)


def test_clip_score_is_clips_own(clip_folder):
    clip, pictures, prompts = Clip.load(clip_folder), torch.rand(3, 3, 64, 64), ["a face", "glasses", "long " * 40]
    found = clip_scores(clip.pictures(pictures), clip.texts(prompts))
    told = clip.processor(text=prompts, images=list(pictures), do_rescale=False, return_tensors="pt",
                          padding="max_length", truncation=True, max_length=16)  # fmt: skip
    with torch.no_grad():
        wanted = clip.model(**told).logits_per_image.diagonal() / clip.model.logit_scale.exp()
    torch.testing.assert_close(found, 100 * wanted.double().clamp(min=0), rtol=1e-4, atol=1e-4)
    assert float(clip_scores(clip.texts(["a face"]), -clip.texts(["a face"]))) == 0


def test_a_clip_scores_the_student_beside_its_teacher(tmp_path, clip_folder):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a smiling face\na pale face with glasses\na face with short hair\n")
    told = ["--prompts", str(prompts), "--seeds", "2", "--steps", "2", "--out", str(tmp_path / "figures.json")]
    assert main(["emd", "evaluate", str(student_file("student")), *told, "--clip", clip_folder]) == 0
    rows = json.loads((tmp_path / "figures.json").read_text())
    own, student = rows["teacher"]["CLIP score"], rows[str(student_file("student"))]
    assert 0 <= student["CLIP score"] <= 100 and student["+- (95 %)"] > 0
    assert student["CLIP score"] - own == pytest.approx(student["CLIP score over the teacher's"], abs=2e-3)
    assert set(rows["teacher, the next prompt's text"]) == {"CLIP score"}


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
    for folder in (str(tmp_path / "nowhere"), str(_image_side_only(tmp_path / "half"))):
        with pytest.raises(VitrineError, match="clip-vit-base-patch16"):
            Clip.load(folder)


def _image_side_only(folder):
    config = CLIPVisionConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    CLIPVisionModelWithProjection(config).save_pretrained(folder)
    CLIPImageProcessor().save_pretrained(folder)
    return folder
