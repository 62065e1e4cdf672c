"""A user of a transformer family: small files of it, and graphs made small, for the notes of the workflows."""

import torch
from safetensors.torch import save_file
from vitrine.engine.activations import Preset
from vitrine.engine.activations.presets import FeaturePreset
from vitrine.engine.emd.student_preset import StudentPreset
from vitrine.engine.nemo import NeuronSet, value_sites
from vitrine.engine.tracing.addresses import resolve
from vitrine.engine.tracing.fingerprint import fingerprint_of
from vitrine_tests.comfy.test_family_models import lora_of, written
from vitrine_tests.comfy.tiny_checkpoints import checkpoint
from vitrine_tests.families.twin import network, twin
from vitrine_tests.full_size.notes import Following, for_transformers, note
from vitrine_tests.full_size.scene import Scene
from vitrine_tests.full_size.test_notes import painted

FILE, LORAS, STUDENT = "mine.safetensors", "my_loras", "student.safetensors"
FEW = {"steps": 2, "batch_size": 1, "seeds": 4, "attack_steps": 1, "most": 2, "count": 2}


def side_of(name):
    """A small picture of eight latent cells or sixteen; the copy check's windows want more than eight."""
    return 256 if hasattr(twin(name), "CHANNELS") else 128


class Tiny:
    """A user with a family's files: a checkpoint, pictures with painted masks, LoRAs of one kind."""

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
        self.own = {"checkpoint": FILE, "pictures": painted(folder / "input", self.side)} | self.kept()

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

    def kept(self):
        """Files that the nodes wrote, of this model; by kind."""
        name, call = f"tiny_{self.name}", lambda *a, **k: Scene.call(self, *a, **k)
        model, clip, vae = self.parts
        backbone = model.model.diffusion_model
        labels = "\n".join(f"{i} {i % 2}" for i in range(6))
        space = call("VitrineBuildW2WSpace", folder=LORAS, name=name)[0]
        trained = call("VitrineTrainW2WDirection", space=space, label="slider", labels=labels, components=2,
                       save_as=name)[0]  # fmt: skip
        person = call("VitrineW2WSample", space=trained, seed=3)[0]
        call("VitrineSaveW2WLora", space=trained, w2w_model=person, name=name)
        site = value_sites(backbone)[0]
        self.reads_text_alone = not site.joint
        neurons = NeuronSet({site.address: tuple(range(8))}, fingerprint_of(backbone))
        call("VitrineSaveNeurons", neurons=neurons, name=name)
        places = Preset(name, (resolve(backbone, "auto")[0].address,), 50.0, self.name, self.side, "chosen by hand")
        call("VitrineSaveFeaturePreset", preset=FeaturePreset(places, fingerprint_of(backbone)), name=name)
        with torch.inference_mode():
            positive = clip.encode_from_tokens_scheduled(clip.tokenize("a face"))
        pictures = torch.rand(2, self.side, self.side, 3, generator=torch.Generator().manual_seed(1))
        taps = call("VitrineActivationTap", model=model, vae=vae, image=pictures, positive=positive)[0]
        call("VitrineSaveActivations", activations=taps, name=name)
        return {
            "folder": LORAS, "labels": labels, "student": STUDENT, "preset": "auto", "slider": "slider",
            "space": f"{name}.w2w.safetensors", "person": f"{name}.w2wmodel.safetensors", "neurons": f"{name}.json",
            "places": f"{name}.json", "taps": f"{name}.safetensors",
        }  # fmt: skip

    def following(self, workflow, words=note):
        """Its graph after all that its note says, and then what it says to whoever has a transformer."""
        following = Following.start(workflow, self.name, self.own)
        for sentence in (words(workflow), for_transformers(workflow)):
            if sentence:
                following.follow(sentence)
        return following

    def template(self, workflow):
        """The template's graph with the user's file names, after what its note says of transformers."""
        graph = self.following(workflow, words=lambda _: "").graph
        names = {"ckpt_name": FILE, "lora": STUDENT, "image": self.own["pictures"][0]}
        for node in graph.values():
            node["inputs"].update({k: v for k, v in names.items() if isinstance(node["inputs"].get(k), str)})
        return graph

    def run(self, graph):
        """(what is shown, None) or (None, the error), made small first."""
        compared = any(node["class_type"] == "VitrineEMDVariety" for node in graph.values())
        for node in graph.values():
            made_small(node, self.name, self.side)
            if compared and "batch_size" in node["inputs"]:
                node["inputs"]["batch_size"] = 3  # fewer cannot be compared
        return self.comfy.run(graph)


def made_small(node, name, side):
    """Fewer steps and smaller sides; where a model is moved to another size, it was trained at half of it."""
    given = node["inputs"]
    given.update({k: min(v, FEW[k]) for k, v in given.items() if k in FEW and type(v) is int})
    sides = ("width", "height", "target_width", "target_height")
    given.update({k: max(side, given[k] // 8) for k in sides if type(given.get(k)) is int and given[k] > side})
    if "train_width" in given:
        given.update(train_width=side // 2, train_height=side // 2)
    if node["class_type"] == "VitrineTapDuringSampling":
        given["steps"] = "0 1"
    if node["class_type"] == "VitrineCollectTaps":
        given["step"] = min(given["step"], 1)
    if isinstance(given.get("prompts"), str):
        given["prompts"] = "\n".join(given["prompts"].splitlines()[:4])
    if node["class_type"] == "VitrineRankActivations":
        given.update(noise=0.0, granularity=0.0)  # random weights make noise of pictures: all would be dropped
    if node["class_type"] == "VitrineLoRAReport":
        given.update(prompts=1, seeds=2, captions="a face", ordinary="a\nb")
    if node["class_type"] in ("VitrineNEMOCopyCheck", "VitrineLoRAReport"):
        given["name"] = f"notes_{name}"
