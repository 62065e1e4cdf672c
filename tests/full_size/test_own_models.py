"""The templates "... your model" on full-size checkpoints: nothing is edited but what the template itself asks for.

The files they name lie where a user has them: checkpoint, folder of LoRAs, student, and ComfyUI's example picture.
They are made small: steps, batches, seeds, and by one factor for all the sides of pictures.
"""

import json
import os

import pytest
from PIL import Image
from vitrine_tests.full_size.conftest import SIDE, families
from vitrine_tests.full_size.material import checkpoint, loras
from vitrine_tests.full_size.measure import measuring
from vitrine_tests.templates import FOLDER, ON_YOUR_MODEL

OWN_SIDES = {"sd15": 512, "sdxl": 1024}
"""What the families were trained at."""
FEW = {"steps": 2, "sample_steps": 2, "batch_size": 1, "seeds": 4, "samples": 2, "ensemble": 1, "prompts": 4, "seed": 0}
"""Numbers of which fewer cost less time."""
FEWER = {
    "VitrineTapDuringSampling": {"record_steps": "0 1"},
    "VitrineCollectTaps": {"step": 1},
    # what random weights copy hangs on thousands of neurons
    "VitrineNEMOFindNeurons": {"effect_fraction": 0.01, "mode": "fast"},
    # 0 is the family's side, which is not SIDE
    "VitrineResolutionTransferLoader": {"train_width": SIDE, "train_height": SIDE},
}
"""Inputs of single nodes that do the same."""
SIZES = ("width", "height", "target_width", "target_height", "reference_width", "reference_height")


def graph_of(workflow):
    return json.loads((FOLDER / "api" / workflow.name).read_text(encoding="utf-8"))


def family_of(graph):
    """The family of the file that the template names."""
    (name,) = [n["inputs"]["ckpt_name"] for n in graph.values() if n["class_type"] == "CheckpointLoaderSimple"]
    return "sdxl" if "xl" in name else "sd15"


def for_family(graph, family):
    """What the note says for SDXL: its file, and twice the sides."""
    own, factor = family_of(graph), OWN_SIDES[family] // OWN_SIDES[family_of(graph)]
    for node in graph.values() if own != family else ():
        given = node["inputs"]
        given.update({k: given[k] * factor for k in SIZES if isinstance(given.get(k), int)})
        if "ckpt_name" in given:
            given["ckpt_name"] = "sd_xl_base_1.0.safetensors"
        if "student" in given:
            given["student"] = given["student"].replace("SD15", "SDXL")


def made_small(graph, family):
    """The same graph in less time."""
    factor = OWN_SIDES[family] // SIDE
    for node in graph.values():
        inputs, kind = node["inputs"], node["class_type"]
        inputs.update({k: min(v, FEW[k]) for k, v in inputs.items() if k in FEW and isinstance(v, int)})
        fewer = FEWER.get(kind, {})
        assert fewer.keys() <= inputs.keys(), f"{kind} has no such inputs"
        inputs.update(fewer)
        if kind in ("VitrineResolutionTransferLoader", "EmptyLatentImage"):
            sides = {"width", "height", "target_width", "target_height"} & inputs.keys()
            inputs.update({k: inputs[k] // factor // 32 * 32 for k in sides})
        few_lines = {k: "\n".join(v.splitlines()[:4]) for k, v in inputs.items() if isinstance(v, str)}
        inputs.update({k: few_lines[k] for k in ("prompts", "ordinary") if k in few_lines})


def runs_on(workflow, family):
    """The report on a LoRA samples for half an hour with SDXL, and shows there nothing that SD1.5 does not."""
    return family_of(graph_of(workflow)) in ("sd15", family) and (
        family == "sd15" or "LoRA overfitted" not in workflow.stem
    )


def test_each_number_that_is_made_smaller_is_an_input_of_a_template():
    inputs = [node["inputs"] for workflow in ON_YOUR_MODEL for node in graph_of(workflow).values()]
    assert {k for k in FEW if any(isinstance(i.get(k), int) for i in inputs)} == FEW.keys()


CASES = [(w, f) for w in ON_YOUR_MODEL for f in families() if runs_on(w, f)]


@pytest.fixture
def users_files(comfy, held, tmp_path_factory):
    """family -> the files that the templates name are there, of that family."""
    import folder_paths

    def place(family):
        held.release()
        if family in held.__dict__.setdefault("placed", set()):
            return
        held.placed.add(family)
        folder = tmp_path_factory.mktemp(f"user-{family}")
        names = {"sd15": "v1-5-pruned-emaonly-fp16.safetensors", "sdxl": "sd_xl_base_1.0.safetensors"}
        (folder / "checkpoints").mkdir()
        os.link(checkpoint(family), folder / "checkpoints" / names[family])
        student = loras(family, folder / "loras" / "my_loras", 3)[0]
        (folder / "loras" / f"Hyper-{family.upper()}-1step-lora.safetensors").write_bytes(student.read_bytes())
        (folder / "loras" / "my_lora.safetensors").write_bytes(student.read_bytes())
        for kind in ("checkpoints", "loras"):
            folder_paths.add_model_folder_path(kind, str(folder / kind), is_default=True)
        Image.new("RGB", (SIDE, SIDE), "olive").save(folder / "example.png")
        folder_paths.set_input_directory(str(folder))
        folder_paths.filename_list_cache.clear()

    return place


@pytest.mark.parametrize(("workflow", "family"), CASES, ids=lambda v: getattr(v, "stem", v))
def test_the_template_runs_on_your_model(workflow, family, comfy, users_files, precision):
    graph = graph_of(workflow)
    for_family(graph, family)
    users_files(family)
    made_small(graph, family)
    precision(family)
    with measuring("own", workflow.stem, family):
        history, error = comfy.run(graph)
        assert error is None, error
    shown = [i for i, node in graph.items() if node["class_type"] == "PreviewImage"]
    assert shown and all(history["outputs"][i]["images"] for i in shown)
