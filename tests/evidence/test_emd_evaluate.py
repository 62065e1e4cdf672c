"""``vitrine emd evaluate``: students against their teacher at equal seeds."""

import json
import math
from dataclasses import replace

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)
from vitrine.cli.main import main
from vitrine.engine.emd import StudentPreset, small_pixels
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits import load_portraits
from vitrine.engine.portraits.shipped import student_file
from vitrine.evidence.emd.clip_score import Clip, clip_scores
from vitrine.evidence.emd.evaluate import (
    Judges,
    Protocol,
    _without_dynamic_shift,
    best,
    checkpoints,
    evaluate,
    features_of,
)


@pytest.mark.nightly
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


def changed(net, share):
    """A whole student: the teacher's weights, a little smaller."""
    return {name: value * (1 - share) for name, value in net.state_dict().items()}


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["portraits", "flow portraits"])
def test_whole_networks_and_transformers_are_judged_too(model, tmp_path):
    from vitrine.engine.emd.export import export, export_full
    from vitrine.engine.emd.targets import part_of
    from vitrine.engine.pipelines.loading import load_pipeline

    pipe = load_pipeline(model, None)
    net = pipe.unet if model == "portraits" else pipe.transformer
    before, part = {k: v.clone() for k, v in net.state_dict().items()}, part_of(net)
    told = StudentPreset(model, 999.0 if part == "unet" else 1000.0)
    path = "mid_block.attentions.0.proj_in" if part == "unet" else "transformer_blocks.0.attn.to_q"
    layer, g = net.get_submodule(path), torch.Generator().manual_seed(1)
    into, out = layer.weight.shape[1], layer.weight.shape[0]
    conv = (1, 1) if layer.weight.ndim == 4 else ()
    lora = {f"{path}.lora_A.generator.weight": torch.randn(2, into, *conv, generator=g) * 0,
            f"{path}.lora_B.generator.weight": torch.randn(out, 2, *conv, generator=g)}  # fmt: skip
    still = export(tmp_path / "step_1", lora, "generator", told, part=part)[0]
    export_full(tmp_path / "step_2", changed(net, 0.0), "generator", told, half=False, part=part)
    export_full(tmp_path / "step_3", changed(net, 0.2), "generator", told, half=False, part=part)
    files = checkpoints(tmp_path)
    assert files[0] == still and [f.name for f in files[1:]] == [f"generator_{part}.safetensors"] * 2
    judges, protocol = (
        Judges(features_of("readout") if part == "unet" else small_pixels),
        Protocol(["a smiling face", "a pale face with glasses"], 3, 2, 2.0),
    )
    rows = evaluate(pipe, files, judges, protocol, base=model)
    same, own, other = rows["teacher, 1 step"], rows[str(files[1])], rows[str(files[2])]
    assert rows[str(files[0])] == same and own == same, "a LoRA that changes nothing, and the teacher's own weights"
    assert other != same and all(math.isfinite(v) for row in rows.values() for v in row.values())
    after = (pipe.unet if part == "unet" else pipe.transformer).state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[k], before[k]) for k in before)
    if part == "transformer":
        bigger = evaluate(pipe, files[1:2], judges, replace(protocol, size=(64, 64)), base=model)
        assert bigger["teacher, 1 step"] == bigger[str(files[1])] != same, "pictures of another size"


def test_the_shift_of_a_transformers_levels_is_its_pipelines():
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15)
    still = _without_dynamic_shift(scheduler, (16, 64, 64), 2)
    sigmas = [1 - i / 4 for i in range(4)]
    still.set_timesteps(sigmas=sigmas)
    scheduler.set_timesteps(sigmas=sigmas, mu=calculate_shift(32 * 32))
    torch.testing.assert_close(still.sigmas, scheduler.sigmas)


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
