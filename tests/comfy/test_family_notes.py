"""The notes "Your own model" and the templates "... your model" on small models of the transformer families.

What a note says is done word for word, as on full-size UNets in tests/full_size, then what it says of transformers.
Without that, words for UNets (a published selection, `up-*`) are refused plainly. LTX-2 is refused with its reason
(test_ltx2.py): it has no note to follow.
"""

import re

import pytest
import torch
from safetensors.torch import save_file
from vitrine_tests.comfy.test_family_models import lora_of, written
from vitrine_tests.comfy.tiny_checkpoints import WIDTHS, checkpoint
from vitrine_tests.families.twin import network, twin
from vitrine_tests.full_size.material import COMFYUI
from vitrine_tests.full_size.notes import Following, for_transformers, note
from vitrine_tests.full_size.test_notes import painted

FILE, LORAS = "mine.safetensors", "my_loras"
FEW = {"steps": 2, "batch_size": 1, "seeds": 4, "attack_steps": 1, "most": 2, "count": 2}
RUN = ("Draw at twice the size", "Leave the trained size", "Stop the model copying a picture",
       "Check a model for copies", "Turn a folder of LoRAs into sliders")  # fmt: skip
"""Notes whose words serve every family as they are."""
UNET_WORDS = {
    "See what the model sees": "address: given up-level",
    "Find the same part in every picture": r"address: given up-\*",
}
"""Notes whose first sentence is for UNets -> what is said of it; a second one is for transformers."""
TEMPLATES = ("See what your model sees", "Find the same part with your model", "Draw at twice the size with your model",
             "Stop your model copying a picture", "Turn your LoRAs into a space")  # fmt: skip


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
        labels = "\n".join(f"{i} {i % 2}" for i in range(6))
        self.own = {
            "checkpoint": FILE,
            "pictures": painted(folder / "input", self.side),
            "folder": LORAS,
            "labels": labels,
        }

    def loras(self, folder):
        folder.mkdir(parents=True)
        for i in range(6):
            g = torch.Generator().manual_seed(i)
            tensors = written(lora_of(network(self.name)), "transformer.")
            tensors = {
                k: v if k.endswith("alpha") else v + torch.randn(v.shape, generator=g) for k, v in tensors.items()
            }
            save_file(tensors, folder / f"{i}.safetensors")

    def followed(self, workflow, words=note):
        """The graph after all that its note says, and then what it says to whoever has a transformer."""
        following = Following.start(workflow, self.name, self.own)
        for sentence in (words(workflow), for_transformers(workflow)):
            if sentence:
                following.follow(sentence)
        return following.graph

    def template(self, workflow):
        """The template's graph with the user's file names, after what its note says of transformers."""
        graph = self.followed(workflow, words=lambda _: "")
        names = {"ckpt_name": FILE, "image": self.own["pictures"][0]}
        for node in graph.values():
            node["inputs"].update({k: v for k, v in names.items() if isinstance(node["inputs"].get(k), str)})
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
    if node["class_type"] == "VitrineTapDuringSampling":
        given["steps"] = "0 1"
    if node["class_type"] == "VitrineCollectTaps":
        given["step"] = min(given["step"], 1)
    if isinstance(given.get("prompts"), str):
        given["prompts"] = "\n".join(given["prompts"].splitlines()[:4])
    if node["class_type"] == "VitrineRankActivations":
        given.update(noise=0.0, granularity=0.0)  # random weights make noise of pictures: all would be dropped
    if node["class_type"] == "VitrineNEMOCopyCheck":
        given["name"] = f"notes_{name}"


@pytest.fixture(scope="module")
def batches(comfy):
    """Core's *Batch Images* and *Batch Masks*; nodes_latent.py comes first, as when ComfyUI starts."""
    load = comfy.nodes.load_custom_node
    files = [COMFYUI / "comfy_extras" / f"{name}.py" for name in ("nodes_latent", "nodes_post_processing")]
    return all([comfy.loop.run_until_complete(load(str(file), module_parent="comfy_extras")) for file in files])


@pytest.fixture(scope="module", params=WIDTHS)
def tiny(request, comfy, batches, tmp_path_factory):
    import comfy.sd as core

    if not batches:
        pytest.skip("ComfyUI's Batch Images does not load here")
    user = Tiny(request.param, tmp_path_factory.mktemp(request.param), comfy)
    kept, core.load_checkpoint_guess_config = core.load_checkpoint_guess_config, lambda *a, **k: (*user.parts, None)
    yield user
    core.load_checkpoint_guess_config = kept


def shown(history, graph):
    previews = [i for i, node in graph.items() if node["class_type"] == "PreviewImage"]
    return previews and all(history["outputs"][i]["images"] for i in previews)


@pytest.mark.parametrize("workflow", RUN)
def test_the_note_can_be_followed(tiny, workflow):
    graph = tiny.followed(workflow)
    history, error = tiny.run(graph)
    if tiny.name == "anima" and workflow == "Stop the model copying a picture":
        assert error and "a network that core can differentiate" in error, "core's kernel has no derivative"
        for node in graph.values():
            node["inputs"].update({k: 0 for k in node["inputs"] if k == "attack_steps"})
        history, error = tiny.run(graph)
    assert error is None, error
    assert shown(history, graph)


@pytest.mark.parametrize("workflow", UNET_WORDS)
def test_the_note_for_transformers_can_be_followed(tiny, workflow):
    """Without its second sentence the first is refused, with what would be taken."""
    following = Following.start(workflow, tiny.name, tiny.own)
    following.follow(note(workflow))
    _, error = tiny.run(following.graph)
    assert error and re.search(UNET_WORDS[workflow], error) and "addresses of this model" in error, error
    graph = tiny.followed(workflow)
    history, error = tiny.run(graph)
    assert error is None and shown(history, graph), error


@pytest.mark.parametrize("workflow", TEMPLATES)
def test_the_template_runs(tiny, workflow):
    graph = tiny.template(workflow)
    history, error = tiny.run(graph)
    assert error is None, error
    assert shown(history, graph)


def test_a_video_has_no_score(comfy):
    """NEMO compares still pictures; a latent with several frames is refused, one frame is a picture."""
    from vitrine.engine.errors import VitrineError
    from vitrine.nodes.nemo import shape_of

    assert shape_of(torch.zeros(1, 16, 8, 12)) == shape_of(torch.zeros(1, 16, 1, 8, 12)) == (16, 8, 12)
    with pytest.raises(VitrineError, match="a video of 3 latent frames"):
        shape_of(torch.zeros(1, 16, 3, 8, 12))


def test_flat_attention_is_refused_plainly(tiny):
    _, error = tiny.run(tiny.followed("Guide without a negative prompt"))
    assert "whose queries are normalised" in error, error
