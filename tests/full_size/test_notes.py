"""The notes "Your own model" of all workflows on full-size checkpoints: what they say is done, and the graph runs.

What a note does not speak of is made small: steps, batches, seeds, and by one factor for all the sides of pictures,
also those that a model is fitted to, all of which networks take.
"""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from vitrine_tests.full_size.conftest import SIDE, families
from vitrine_tests.full_size.material import pictures, teacher_folder
from vitrine_tests.full_size.measure import measuring
from vitrine_tests.full_size.notes import OWN_SIDES, Following, families_of, note
from vitrine_tests.full_size.scene import STUDENT
from vitrine_tests.templates import SHIPPED

WORKFLOWS = [p.stem for p in SHIPPED if note(p.stem)]
FEW = {
    "steps": 2, "batch_size": 1, "seeds": 4, "samples": 2, "attack_steps": 1, "ensemble": 1, "batch": 1, "K": 1,
    "rank": 2, "most": 2, "seed": 0,
}  # fmt: skip
"""Numbers of which fewer cost less time."""


def made_small(graph, family):
    """The same graph in less time."""
    factor = OWN_SIDES[family] // SIDE
    compared = any(node["class_type"] == "VitrineEMDVariety" for node in graph.values())
    few = FEW | ({"batch_size": 3} if compared else {})  # fewer cannot be compared
    for node in graph.values():
        given = node["inputs"]
        given.update({k: min(v, few[k]) for k, v in given.items() if k in few and isinstance(v, int)})
        if node["class_type"] == "VitrineResolutionTransferLoader":
            given.update(train_width=SIDE, train_height=SIDE)  # 0 is the family's side, which is not SIDE
        if node["class_type"] in ("VitrineResolutionTransferLoader", "EmptyLatentImage"):
            sides = {"width", "height", "target_width", "target_height"} & given.keys()
            given.update({k: given[k] // factor // 32 * 32 for k in sides})
        if node["class_type"] == "VitrineTapDuringSampling":
            given["steps"] = "0 1"
        if node["class_type"] == "VitrineCollectTaps":
            given["step"] = min(given["step"], 1)
        few_lines = {k: "\n".join(v.splitlines()[:4]) for k, v in given.items() if isinstance(v, str)}
        given.update({k: few_lines[k] for k in ("prompts", "ordinary") if k in few_lines})
        if node["class_type"] == "VitrineW2WInvert":
            given["steps"] = 1
        if node["class_type"] == "VitrineNEMOFindNeurons":
            given.update(effect_fraction=0.01, mode="fast")  # what random weights copy hangs on thousands of neurons
        if node["class_type"] == "VitrineRankActivations":
            given.update(
                noise=0.0, granularity=0.0
            )  # no bounds: random weights make noise of pictures: all would be dropped


class Owned:
    """What a user has of a checkpoint: files that the nodes wrote, LoRAs, pictures with painted masks."""

    def __init__(self, scene, folder, family):
        import folder_paths

        s, name = scene(family), f"full-{family}"
        s.call("VitrineSaveNeurons", neurons=s.neurons, name=name)
        s.call("VitrineSaveW2WLora", space=s.trained, w2w_model=s.person, name=name)
        s.call("VitrineSaveFeaturePreset", preset=s.ranking[0], name=name)
        s.call("VitrineSaveActivations", activations=s.taps[0], name=name)
        labels = "\n".join(f"{family}-{i} {i % 2}" for i in range(6))
        trained = {"label": "slider", "labels": labels, "components": 2, "save_as": f"own_{family}"}
        s.call("VitrineTrainW2WDirection", space=s.space, **trained)
        folder_paths.set_input_directory(str(folder / "input"))
        self.names = {
            "checkpoint": s.checkpoint, "pictures": painted(folder / "input", SIDE), "labels": labels,
            "student": f"people-{family}/{family}-0.safetensors", "preset": STUDENT[family], "slider": "slider",
            "folder": f"people-{family}", "space": f"own_{family}.w2w.safetensors", "neurons": f"{name}.json",
            "person": f"{name}.w2wmodel.safetensors", "places": f"{name}.json", "taps": f"{name}.safetensors",
        }  # fmt: skip
        if family == "sd15":
            folder_paths.add_model_folder_path("diffusers", str(folder / "diffusers"))
            self.names["teacher"] = teacher_folder(folder / "diffusers", SIDE).name
        folder_paths.filename_list_cache.clear()


def painted(folder, side):
    """Names of four pictures whose mask is their transparency, as ComfyUI's mask editor saves them."""
    folder.mkdir(parents=True, exist_ok=True)
    images, masks = pictures(4, side)
    names = [f"painted-{i}.png" for i in range(4)]
    for name, image, mask in zip(names, images, masks, strict=True):
        pixels = np.concatenate([image.numpy(), 1 - mask.numpy()[..., None]], -1)
        Image.fromarray((pixels * 255).astype(np.uint8)).save(Path(folder) / name)
    return names


@pytest.fixture(scope="module")
def batches(comfy):
    """Whether core's *Batch Images* and *Batch Masks* load here; their file needs kornia.

    nodes_latent.py comes first, as when ComfyUI starts: the two import each other.
    """
    from vitrine_tests.full_size.material import COMFYUI

    files = [COMFYUI / "comfy_extras" / f"{name}.py" for name in ("nodes_latent", "nodes_post_processing")]
    load = comfy.nodes.load_custom_node
    return all([comfy.loop.run_until_complete(load(str(file), module_parent="comfy_extras")) for file in files])


@pytest.fixture
def owned(scene, held, tmp_path_factory):
    """family -> names of what a user has; the checkpoint itself is let go of."""
    kept = held.__dict__.setdefault("owned", {})

    def get(family):
        if family not in kept:
            kept[family] = Owned(scene, tmp_path_factory.mktemp("owned"), family).names
        held.release()
        return kept[family]

    return get


@pytest.mark.parametrize(("workflow", "family"), [(w, f) for w in WORKFLOWS for f in families_of(w) if f in families()])
def test_the_note_can_be_followed(workflow, family, owned, comfy, precision, batches):
    following = Following.start(workflow, family, owned(family))
    following.follow(note(workflow))
    if not batches and "BatchImagesNode" in {node["class_type"] for node in following.graph.values()}:
        pytest.skip("ComfyUI's Batch Images does not load here")
    made_small(following.graph, family)
    precision(family)
    with measuring("note", workflow, family):
        history, error = comfy.run(following.graph)
        assert error is None, error
    shown = [i for i, node in following.graph.items() if node["class_type"] == "PreviewImage"]
    assert shown and all(history["outputs"][i]["images"] for i in shown)
