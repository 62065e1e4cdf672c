"""LoRA Report in real ComfyUI: what the pipeline measures, its files, and what core's loader drops."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vitrine.engine.copies import Material, ReportConfig, lora_report
from vitrine.engine.io.lora_writing import write_lora
from vitrine.engine.pipelines import PipelineModel
from vitrine.engine.portraits import load_portraits
from vitrine.engine.portraits.shipped import PEOPLE_LORAS
from vitrine.engine.w2w import read_lora
from vitrine_tests.comfy.test_lora_files import loras_in

FILE = PEOPLE_LORAS / "person-0003.safetensors"
CAPTION, ORDINARY = "a smiling face with navy shirt on blue", ("a pale face", "a dark face with curly hair on pink")
FEW = {"seeds": 2, "steps": 2, "cfg": 3.0, "first_seed": 2000, "prompts": 1, "minutes": 0.0}


@pytest.fixture(scope="module")
def inputs(comfy):
    model, clip, vae = comfy.call("VitrineLoadPortraits", model="portraits, 64 px")[:3]
    texts = {"captions": CAPTION, "trigger": "", "ordinary": "\n".join(ORDINARY)}
    return {"model": model, "clip": clip, "vae": vae, "latent": {"samples": torch.zeros(1, 4, 16, 16)}, **texts, **FEW}


def test_a_lora_that_is_not_there_is_named_before_anything_runs(comfy):
    """The template opens with a name that stands for one's own."""
    from vitrine.nodes.comfy.saved import lora_files

    node = comfy.nodes.NODE_CLASS_MAPPINGS["VitrineLoRAReport"]
    said = node.validate_inputs(lora="my_lora.safetensors")
    assert said.startswith("lora: there is no my_lora.safetensors") and "models/loras" in said
    assert node.validate_inputs(lora=None) is True and node.validate_inputs(lora=lora_files()[0]) is True


def test_the_node_measures_what_the_pipeline_measures(comfy, inputs, tmp_path):
    with loras_in(PEOPLE_LORAS):
        report, shown, folder = comfy.call("VitrineLoRAReport", **inputs, lora=FILE.name, compare=True, name="person")
        assert comfy.call("VitrineLoRAReport", **inputs, lora=FILE.name, compare=True, name="person")[0] == report
        with pytest.raises(ValueError, match="begun with"):
            comfy.call("VitrineLoRAReport", **inputs | {"cfg": 4.0}, lora=FILE.name, compare=False, name="person")
    ours = json.loads((Path(folder) / "report.json").read_text())["loras"][0]
    assert (Path(folder) / "report.html").is_file() and shown.shape == (1, 64, 128, 3) and "what it copies" in report
    config = ReportConfig(seeds=2, steps=2, prompts=1)
    material = Material(captions=(CAPTION,), ordinary=ORDINARY, folder=PEOPLE_LORAS)
    pipe = load_portraits().pipeline()
    (found,) = lora_report([FILE], tmp_path / "pipe", lambda: PipelineModel(pipe), material, config).loras
    theirs = json.loads(json.dumps(found.to_dict()))
    assert ours["loading"][0]["library"] == "ComfyUI" and theirs["loading"][0]["library"] == "diffusers"
    assert ours["loading"][0]["loaded"] == theirs["loading"][0]["loaded"] == 28
    assert ours["neighbours"] == theirs["neighbours"] and ours["what_it_is"] == theirs["what_it_is"]
    for name in ("what_it_copies", "what_it_costs", "where_it_acts"):
        alike(ours[name], theirs[name])


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_checkpoints_of_a_run_are_found_and_sampled_when_asked(comfy, inputs, tmp_path, whole):
    lora, folder = read_lora(FILE), tmp_path / "loras"
    for step in (1, 2, 3):
        scaled = {path: replace(layer, alpha=layer.alpha * step / 3) for path, layer in lora.items()}
        write_lora(folder / f"style-{step:06d}.safetensors", scaled)
    few = inputs | {"lora": "style-000002.safetensors", "steps": 1}
    with loras_in(folder):
        out = comfy.call("VitrineLoRAReport", **few, compare=True, name=f"run-{whole}", whole_run=whole)
    assert out[0].startswith("style: a run of 3 checkpoints, steps 1 to 3\n  Still learning [fine]")
    (found,) = json.loads((Path(out[2]) / "report.json").read_text())["runs"]
    assert ["agreement" in row for row in found["checkpoints"]] == [whole, True, whole]
    assert out[1].shape == (1, 64, 128, 3), "the one that was asked for"


def alike(a, b):
    """Equal but for rounding of pixels to eight bits."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            alike(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for first, second in zip(a, b, strict=True):
            alike(first, second)
    else:
        assert a == (pytest.approx(b, abs=3e-3) if isinstance(a, float) else b)


def test_what_core_does_not_load_is_named(comfy, inputs, tmp_path):
    tensors = load_file(FILE)
    lost = next(k for k in tensors if "attn2_to_v.lora_up" in k).split(".")[0]
    (tmp_path / "loras").mkdir()
    renamed = {k.replace(lost, "lora_unet_down_blocks_9_attentions_0_proj_in"): v for k, v in tensors.items()}
    save_file(renamed, tmp_path / "loras" / "odd.safetensors")
    with loras_in(tmp_path / "loras"):
        report, _, folder = comfy.call(
            "VitrineLoRAReport", **inputs | {"minutes": 1e-6}, lora="odd.safetensors", compare=False, name="odd"
        )
    (lora,) = json.loads((Path(folder) / "report.json").read_text())["loras"]
    assert lora["loading"][0]["loaded"] == 27 and lora["loading"][0]["dropped"] == [
        "down_blocks.9.attentions.0.proj_in"
    ]
    assert lora["summary"][0]["verdict"] == "look" and "ComfyUI drops 1 of 28 layers" in report
    assert lora["left_out_for_the_budget"] and lora["summary"][2]["verdict"] == "not measured"
