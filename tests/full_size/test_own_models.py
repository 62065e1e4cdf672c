"""The templates "... your model" on full-size checkpoints: nothing is edited but what the template itself asks for.

The files they name lie where a user has them: checkpoint, folder of LoRAs, student, and ComfyUI's example picture.
As in test_notes.py they are made small: steps, batches, seeds, and by one factor for all the sides of pictures.
"""

import json
import os

import pytest
from PIL import Image
from vitrine_tests.full_size.conftest import SIDE, families
from vitrine_tests.full_size.material import checkpoint, loras
from vitrine_tests.full_size.measure import measuring
from vitrine_tests.full_size.notes import OWN_SIDES
from vitrine_tests.full_size.test_notes import made_small
from vitrine_tests.templates import FOLDER, ON_YOUR_MODEL

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


CASES = [(w, f) for w in ON_YOUR_MODEL for f in families() if family_of(graph_of(w)) in ("sd15", f)]


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
