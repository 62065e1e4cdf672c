"""A user of a transformer family: small files of it, and the templates on it, made small."""

import torch
from PIL import Image
from safetensors.torch import save_file
from vitrine.engine.emd import StudentPreset
from vitrine_tests.comfy.test_family_models import lora_of, written
from vitrine_tests.comfy.tiny_checkpoints import checkpoint
from vitrine_tests.families.twin import network, twin
from vitrine_tests.templates import FOLDER, read, without_boxes

FILE, LORAS, STUDENT = "mine.safetensors", "my_loras", "student.safetensors"
PICTURE = "picture.png"
FEW = {"steps": 2, "batch_size": 1, "seeds": 4, "attack_steps": 1, "most": 2, "count": 2}


def side_of(name):
    """A small picture of eight latent cells or sixteen; the copy check's windows want more than eight."""
    return 256 if hasattr(twin(name), "CHANNELS") else 128


class Tiny:
    """A user with a family's files: a checkpoint, a picture, LoRAs of one kind, a student."""

    def __init__(self, name, folder, comfy):
        import folder_paths

        self.name, self.comfy, self.parts = name, comfy, checkpoint(name, folder / "text")
        self.side = side_of(name)
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / FILE).write_bytes(b"")
        for kind in ("checkpoints", "loras"):
            folder_paths.add_model_folder_path(kind, str(folder / kind), is_default=True)
        folder_paths.set_input_directory(str(folder / "input"))
        self.loras(folder / "loras" / LORAS)
        folder_paths.filename_list_cache.clear()
        (folder / "input").mkdir()
        Image.new("RGB", (self.side, self.side), "olive").save(folder / "input" / PICTURE)

    def loras(self, folder):
        folder.mkdir(parents=True)
        for i in range(6):
            g = torch.Generator().manual_seed(i)
            tensors = written(lora_of(network(self.name)), "transformer.")
            tensors = {
                k: v if k.endswith("alpha") else v + torch.randn(v.shape, generator=g) for k, v in tensors.items()
            }
            save_file(tensors, folder / f"{i}.safetensors")
        preset = StudentPreset("tiny", 1000.0).to_metadata()  # in its header, as of one trained here
        save_file(tensors, folder.parent / STUDENT, metadata=preset)

    def template(self, workflow):
        """The template's graph with the user's files, and what its note sets for transformers."""
        graph = without_boxes(read(FOLDER / "api" / f"{workflow}.json"))
        files = {"ckpt_name": FILE, "lora": STUDENT, "student": STUDENT, "image": PICTURE}
        positions = "auto" if self.name == "sd35" else "rope_yarn"
        for node in graph.values():
            inputs = node["inputs"]
            inputs.update({k: v for k, v in files.items() if isinstance(inputs.get(k), str)})
            if isinstance(inputs.get("layers"), str):
                inputs["layers"] = "auto"
            if "pos_embed" in inputs:
                inputs.update(pos_embed=positions, receptive_field="none")
        return graph

    def run(self, graph):
        """(what is shown, None) or (None, the error), made small first."""
        for node in graph.values():
            made_small(node, self.name, self.side)
        return self.comfy.run(graph)


def made_small(node, name, side):
    """Fewer steps and smaller sides; where a model is moved to another size, it was trained at half of it."""
    given = node["inputs"]
    given.update({k: min(v, FEW[k]) for k, v in given.items() if k in FEW and type(v) is int})
    sides = ("width", "height", "target_width", "target_height")
    given.update({k: max(side, given[k] // 8) for k in sides if type(given.get(k)) is int and given[k] > side})
    if "train_width" in given:
        given.update(train_width=side // 2, train_height=side // 2)
    if node["class_type"] == "ImageScaleBy":
        given["scale_by"] = 1.0  # sides above are the target's already
    if node["class_type"] == "VitrineTapDuringSampling":
        given["record_steps"] = "0 1"
    if node["class_type"] == "VitrineCollectTaps":
        given["step"] = min(given["step"], 1)
    if isinstance(given.get("prompts"), str):
        given["prompts"] = "\n".join(given["prompts"].splitlines()[:4])
    if node["class_type"] == "VitrineRankActivations":
        given.update(noise=0.0, granularity=0.0)  # random weights make noise of pictures: all would be dropped
    if node["class_type"] == "VitrineLoRAReport":
        given.update(prompts=1, seeds=2, captions="a face", ordinary="a\nb")
    if node["class_type"] in ("VitrineNEMOCopyCheck", "VitrineLoRAReport"):
        given["name"] = f"template_{name}"
