"""Every node that computes with a MODEL beside a CLIP, a VAE or a CONDITIONING, as the schemas list them.

Each runs on a plain MODEL, on one with a LoRA, and on that one again while its text encoder or VAE takes the network
out; its CONDITIONING carries a key that ComfyUI does not read.
"""

import logging
import uuid
from types import SimpleNamespace

import pytest
import torch
from vitrine.engine.nemo import NeuronSet
from vitrine_tests.comfy import any_node
from vitrine_tests.comfy.conftest import with_choices
from vitrine_tests.comfy.controlled import NEGATIVE, POSITIVE, xl_twins
from vitrine_tests.comfy.guided_graphs import VALUES
from vitrine_tests.comfy.test_encode_then_load import CAPTIONS, FEW, LATENT, adapter, encoded
from vitrine_tests.lanes import nightly_but

LOADS = {
    "VitrineActivationTap": {"VAE"},
    "VitrineControlConditionedSampler": set(),
    "VitrineEMDOneStepGenerator": set(),
    "VitrineFindCorrespondence": {"VAE"},
    "VitrineLoRAReport": {"CLIP", "VAE"},
    "VitrineNEMOCalibrate": {"CLIP"},
    "VitrineNEMOCopyCheck": {"CLIP", "VAE"},
    "VitrineNEMODetect": {"VAE"},
    "VitrineNEMOFindNeurons": {"CLIP"},
    "VitrineNEMOVerify": set(),
    "VitrineRankActivations": {"VAE"},
    "VitrineSegmentLikeThis": {"VAE"},
    "VitrineTrainW2WSlider": {"VAE"},
    "VitrineW2WInvert": {"VAE"},
    "VitrineWordMap": {"CLIP", "VAE"},
}
"""Node -> what it loads besides the network while it runs; without any, its texts and pictures come as tensors."""
KEY = "my_pack_scale"
SAID = f"not read by ComfyUI: {KEY}"
REPORTING = set(LOADS) - {"VitrineEMDOneStepGenerator", "VitrineFindCorrespondence", "VitrineSegmentLikeThis"}
"""Nodes with a report: these three give pictures, masks and points alone, and the server's log says it."""
PICTURES = 4
OWN_INPUTS = {
    "VitrineNEMOCalibrate": {"prompts": "\n".join(CAPTIONS)},
    "VitrineNEMOFindNeurons": {"adjust": True},
    "VitrineW2WInvert": {"preset": "custom"},
    "VitrineEMDOneStepGenerator": {"student": "vitrine/vitrine-portraits-emd-student.safetensors"},
    "VitrineLoRAReport": {"captions": CAPTIONS[0], "prompts": 1},
    "VitrineRankActivations": {
        "images": any_node.picture(6, PICTURES),
        "masks": (any_node.picture(5, PICTURES)[..., 0] > 0.5).float(),
    },
}


@pytest.fixture(scope="module")
def portraits(comfy):
    """MODEL without and with a LoRA, what reads texts and pictures for it, and a CONDITIONING with a foreign key."""
    from comfy import sd

    model, clip, vae = comfy.call("VitrineLoadPortraits", model="portraits, 64 px")
    with_lora = sd.load_lora_for_models(model, clip, adapter(model), 1.0, 0.0)[0]
    prompt = [[text, settings | {KEY: 2.0}] for text, settings in encoded(clip)]
    known = {"CLIP": clip, "VAE": vae, "CONDITIONING": prompt, "LATENT": LATENT, "word": CAPTIONS[0].split()[1]}
    known |= {"prompt": CAPTIONS[0], "masks": (any_node.picture(5)[..., 0] > 0.5).float()}
    known["VITRINE_NEURONS"] = NeuronSet({VALUES: tuple(range(40))})
    known["VITRINE_W2W_SPACE"] = comfy.call(
        "VitrineLoadW2WSpace", space_file="portraits people (shipped)", components=0
    )[0]
    return SimpleNamespace(plain=model, changed=with_lora, known=known)


@pytest.fixture(scope="module")
def sized(comfy):
    """The same of a network that takes sizes."""
    plain = xl_twins().model
    changed = plain.clone()
    key = next(k for k in plain.model.state_dict() if k.endswith("attn2.to_v.weight"))
    changed.add_patches({key: (torch.randn(plain.model.state_dict()[key].shape, generator=torch.manual_seed(4)),)})
    prompt = [[text, settings | {KEY: 2.0}] for text, settings in POSITIVE]
    latent = {"samples": torch.zeros(1, 4, 8, 8)}
    return SimpleNamespace(
        plain=plain, changed=changed, known={"positive": prompt, "negative": NEGATIVE, "LATENT": latent}
    )


def asked_of(comfy, node_id, parts, model):
    """All inputs of a node for one run, with a folder of its own."""
    known = parts.known | {"MODEL": model} | OWN_INPUTS.get(node_id, {}) | {"name": uuid.uuid4().hex}
    if node_id == "VitrineNEMOFindNeurons":
        asked = {"model": model, "clip": known["CLIP"], "latent": LATENT, "prompts": "\n".join(CAPTIONS), **FEW}
        known["VITRINE_NEMO_CALIBRATION"] = comfy.call("VitrineNEMOCalibrate", measure="everything", **asked)[0]
    return any_node.inputs_of(comfy, node_id, known)


def output_of(comfy, node_id, asked):
    with torch.inference_mode():
        node = comfy.nodes.NODE_CLASS_MAPPINGS[node_id]
        return node.execute(**with_choices(node, asked))


def numbers(output):
    return any_node.numbers_of(list(output.result))


LONG = {
    "VitrineLoRAReport",
    "VitrineNEMOCopyCheck",
    "VitrineNEMOFindNeurons",
    "VitrineNEMOVerify",
    "VitrineRankActivations",
    "VitrineTrainW2WSlider",
}
"""Two seconds and more, for three runs."""
EACH = nightly_but(LOADS, set(LOADS) - LONG)


@pytest.fixture(params=EACH)
def node_id(request):
    return request.param


@pytest.fixture
def parts(request, node_id):
    return request.getfixturevalue("sized" if node_id == "VitrineControlConditionedSampler" else "portraits")


def test_all_nodes_are_here(comfy):
    assert set(LOADS) == set(any_node.computing(comfy, ("CLIP", "VAE", "CONDITIONING")))


def evict_when_encoding(monkeypatch):
    """Whatever a text encoder or a VAE loads takes all other models out, as on a small GPU; what was loaded so."""
    import comfy.model_management
    import comfy.sd

    unload, loaded = comfy.model_management.unload_all_models, set()

    def before(kind, name):
        original = getattr(kind, name)

        def evicted(*args, **kwargs):
            unload()
            loaded.add(kind.__name__)
            return original(*args, **kwargs)

        monkeypatch.setattr(kind, name, evicted)

    before(comfy.sd.CLIP, "load_model")
    before(comfy.sd.VAE, "encode")
    before(comfy.sd.VAE, "decode")
    return loaded


def test_an_encoder_that_takes_the_model_out_changes_nothing(comfy, node_id, parts, monkeypatch, caplog):
    """The MODEL's LoRA is not loaded when the node starts, and goes whenever its CLIP or VAE is used.

    On the way: what of its CONDITIONING nothing reads is said in the node's texts, or once in the log.
    """
    from comfy.model_management import unload_all_models
    from vitrine.nodes.comfy.carried import warn_once

    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "vitrine"):
        bare = numbers(output_of(comfy, node_id, asked_of(comfy, node_id, parts, parts.plain)))
        output = output_of(comfy, node_id, asked_of(comfy, node_id, parts, parts.changed))
    wanted = numbers(output)
    assert bare != wanted, "the LoRA has no effect here"
    if any_node.takes(comfy, node_id, "CONDITIONING"):
        shown = any_node.texts_of([list(output.result), output.ui if isinstance(output.ui, dict) else {}])
        logged = [record.getMessage() for record in caplog.records if SAID in record.getMessage()]
        assert SAID in shown if node_id in REPORTING else len(logged) == 1
    asked = asked_of(comfy, node_id, parts, parts.changed)
    loaded = evict_when_encoding(monkeypatch)
    unload_all_models()
    assert numbers(output_of(comfy, node_id, asked)) == wanted
    assert loaded == LOADS[node_id]
