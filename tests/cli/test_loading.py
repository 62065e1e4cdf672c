"""How commands load a model: precision, device, version, folders and single files."""

import dataclasses

import pytest
import torch
from vitrine.cli.main import Group, _tree, main
from vitrine.engine.errors import VitrineError
from vitrine.engine.io.files import save_safetensors
from vitrine.engine.nemo import Calibration
from vitrine.engine.pipelines.emd_training import training_parts
from vitrine.engine.pipelines.loading import LoadConfig, load_backbone, load_pipeline, pipeline_of
from vitrine.engine.portraits import load_portraits


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_precision_of_the_shipped_model_and_of_a_folder(dtype, tmp_path):
    load_portraits().pipeline().save_pretrained(tmp_path / "model")
    for model in ("portraits", str(tmp_path / "model")):
        pipe = load_pipeline(model, None, LoadConfig(device="cpu", dtype=dtype))
        assert pipe.unet.dtype == pipe.vae.dtype == getattr(torch, dtype)


def test_a_variant_is_another_set_of_files(tmp_path):
    load_portraits().pipeline().save_pretrained(tmp_path / "model", variant="fp16")
    assert load_backbone(str(tmp_path / "model"), LoadConfig(variant="fp16")) is not None
    with pytest.raises(VitrineError, match="model: given"):
        load_pipeline(str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"dtype": "int8"}, "dtype: given int8"), ({"device": "tpu9"}, "device: given tpu9")],
)
def test_what_is_not_there_is_refused(settings, said):
    with pytest.raises(VitrineError, match=said):
        load_pipeline("portraits", None, LoadConfig(**settings))


@pytest.mark.parametrize("setting", ["revision", "variant", "config"])
def test_what_would_change_nothing_is_refused(setting, tmp_path):
    """The version of a local folder, and the variant of a file or a shipped model, were dropped without a word."""
    file = tmp_path / "model.safetensors"
    unread = {"portraits": {"revision", "variant", "config"}, "flow portraits": {"revision", "variant", "config"}}
    unread |= {str(file): {"revision", "variant"}, str(tmp_path): {"revision", "config"}, "who/what": {"config"}}
    for model in (model for model, names in unread.items() if setting in names):
        with pytest.raises(VitrineError, match=f"with --{setting} fp16.*it would change nothing"):
            load_pipeline(model, None, LoadConfig(**{setting: "fp16"}))


def test_a_version_of_the_shipped_model_is_refused_by_commands(capsys):
    assert main(["addresses", "portraits", "--revision", "main"]) == 2
    assert "given a model that ships with the pack with --revision main" in capsys.readouterr().err


def test_a_device_that_this_machine_lacks():
    if torch.cuda.is_available():
        pytest.skip("it has one")
    with pytest.raises(VitrineError, match="cpu always works"):
        load_pipeline("portraits", None, LoadConfig(device="cuda"))


def test_a_file_that_is_no_model(tmp_path):
    with pytest.raises(VitrineError, match=r"a \.safetensors file"):
        load_pipeline(str(tmp_path / "none.safetensors"))


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("conditioner.embedders.1.model.logit_scale", "StableDiffusionXLPipeline"),
        ("cond_stage_model.transformer.text_model.final_layer_norm.bias", "StableDiffusionPipeline"),
    ],
)
def test_a_single_file_says_which_family_it_is(key, kind, tmp_path):
    """Also where the caller does not: whole files of both are loaded in tests/full_size."""
    path = save_safetensors(tmp_path / "model.safetensors", {key: torch.zeros(2)})
    assert pipeline_of(path).__name__ == kind


def test_flags_have_no_prefix(tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a face\na smiling face\n")
    command = [
        "nemo",
        "calibrate",
        str(prompts),
        "--out",
        str(tmp_path / "c.safetensors"),
        "--dtype",
        "bfloat16",
        "--device",
        "cpu",
    ]
    assert main(command) == 0
    assert 0 < Calibration.load(tmp_path / "c.safetensors").score.tau <= 1
    assert not (tmp_path / "c.state").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["--steps", "3"], "given steps without a folder"),
        (["--dtype", "float16", "--model", "my/model"], "given load without a folder"),
    ],
)
def test_settings_that_people_of_the_portraits_world_do_not_read(settings, said, tmp_path, capsys):
    """They trained the shipped model by its own recipe, whatever was asked for."""
    assert main(["w2w", "train-loras", "--people", "1", "--out", str(tmp_path), *settings]) == 2
    assert said in capsys.readouterr().err


def test_a_distillation_is_told_where_and_in_which_precision(tmp_path, capsys):
    """Any device passed unread, and the shipped model was always float32."""
    parts = training_parts(prompts=["a face"], load=LoadConfig(device="cpu", dtype="bfloat16"))
    assert parts.pipeline.unet.dtype == torch.bfloat16
    for device, said in (("meta", "this process's"), ("tpu9", "device: given tpu9")):
        assert main(["emd", "train", "--out", str(tmp_path), "--device", device]) == 2
        assert said in capsys.readouterr().err


def test_every_command_that_loads_a_model_is_told_how():
    """Claims of ``reproduce`` are measured as they were published; ``emd train`` names its model in a JSON file."""
    commands = {name: entry for name, entry in _tree().items() if isinstance(entry, type)}
    for word, entry in _tree().items():
        commands |= {f"{word} {n}": c for n, c in entry.commands.items()} if isinstance(entry, Group) else {}
    fields = {name: {f.name: f.type for f in dataclasses.fields(c)} for name, c in commands.items()}
    loading = {name for name, known in fields.items() if "model" in known}
    assert {name for name in loading if "load" not in fields[name]} == {"reproduce"}
    assert {name for name in fields if "load" in fields[name]} - loading == {"emd train", "lora report"}
    assert {f.name for f in dataclasses.fields(LoadConfig)} >= {"device", "dtype", "revision", "variant"}
