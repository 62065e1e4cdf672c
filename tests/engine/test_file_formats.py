"""The formats of 0.1.0: files made by hand here load, and are written with the same header."""

import json

import torch
from safetensors.torch import save_file
from vitrine.engine.control import ControlEmbedder, ControlSpec, GammaConfig, PaddingConfig, load_control
from vitrine.engine.emd import StudentPreset, read_student

KOHYA = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"


CONTROL = {
    "base_hash": "", "base_model": "tiny", "crop": [1.0, 1.0], "dim": 16, "family": "DiTTransformer2DModel",
    "gamma": {"alpha": 2.0, "clock": "native", "form": "power_cos", "step_at": 0.5, "steps": 1000}, "licence": "",
    "null": "zero", "padding": {"axis": "channel", "beta_txt": 0.01, "mode": "replicate", "scope": "copies"},
    "pos_embed": {}, "prediction": "eps", "schedule": {"T": 1000, "kind": "scaled_linear"},
    "spec": {"fields": [
        {"group": "high", "kind": "flag", "least": 0.0, "most": 1.0, "name": "flip", "ref": 0.0, "scale": 1000.0},
        {"group": "high", "kind": "scalar", "least": 0.0, "most": 1.0, "name": "crop_top", "ref": 0.0, "scale": 1000.0},
        {"group": "high", "kind": "scalar", "least": 0.0, "most": 1.0, "name": "crop_left", "ref": 0.0,
         "scale": 1000.0},
        {"group": "high", "kind": "log_scalar", "least": 0.0625, "most": 16.0, "name": "aspect", "ref": 1.0,
         "scale": 1000.0},
        {"group": "low", "kind": "scalar", "least": 16.0, "most": 16384.0, "name": "height", "ref": 256.0,
         "scale": 1.0},
        {"group": "low", "kind": "scalar", "least": 16.0, "most": 16384.0, "name": "width", "ref": 256.0, "scale": 1.0},
    ]},
    "steps": 7,
}  # fmt: skip


def test_control_checkpoint(tmp_path):
    path = tmp_path / "control.safetensors"
    shapes = {"h.0": (16, 1024), "h.2": (16, 16), "l.0": (16, 512), "l.2": (16, 16)}
    weights = {f"ctrl.{k}.weight": torch.full(v, 0.5) for k, v in shapes.items()}
    weights |= {f"ctrl.{k}.bias": torch.zeros(16) for k in shapes}
    header = {"ccs_format": "1", "ccs": json.dumps(CONTROL, sort_keys=True)}
    save_file(weights | {"base.conv_out.bias": torch.ones(4)}, path, metadata=header)
    read = load_control(path)
    assert set(read.extra) == {"base.conv_out.bias"} and isinstance(read.embedder, ControlEmbedder)
    assert read.metadata.spec == ControlSpec() and read.metadata.padding == PaddingConfig("replicate")
    assert read.metadata.gamma == GammaConfig(alpha=2.0) and read.metadata.steps == 7
    assert read.metadata.to_dict() == CONTROL, "and is written as it was read"


def test_student_preset(tmp_path):
    path = tmp_path / "student.safetensors"
    preset = {
        "base": "portraits", "betas": [], "ge": 0.0, "guidance": 1.0, "gz": 0.0, "latent_scale": 0.0, "noise": "unit",
        "prediction": "model", "shape": [4, 16, 16], "steps": 0, "timestep": 999.0, "trained_guidance": 0.0,
        "version": 1,
    }  # fmt: skip
    tensors = {f"{KOHYA}.lora_down.weight": torch.ones(2, 8), f"{KOHYA}.lora_up.weight": torch.ones(8, 2)}
    save_file(tensors, path, metadata={"vitrine.student": json.dumps(preset)})
    read, weights = read_student(path)
    assert read == StudentPreset("portraits", shape=(4, 16, 16)) and set(weights) == set(tensors)
    assert json.loads(read.to_metadata()["vitrine.student"]) == preset
