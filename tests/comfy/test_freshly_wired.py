"""A node as it comes from the menu, its sockets wired to the shipped models and nothing typed, runs."""

import pytest
from vitrine_tests.lanes import nightly_but

SOURCES = {
    "MODEL": ("VitrineLoadPortraits", 0),
    "CLIP": ("VitrineLoadPortraits", 1),
    "VAE": ("VitrineLoadPortraits", 2),
    "CONDITIONING": ("CLIPTextEncode", 0),
    "LATENT": ("EmptyLatentImage", 0),
    "IMAGE": ("VitrineRenderPortrait", 0),
    "MASK": ("VitrineRenderPortrait", 2),
    "VITRINE_ACTIVATIONS": ("VitrineActivationTap", 0),
    "VITRINE_NEURONS": ("VitrineNEMOFindNeurons", 0),
    "VITRINE_NEMO_CALIBRATION": ("VitrineNEMOCalibrate", 0),
    "VITRINE_FEATURE_PRESET": ("VitrineRankActivations", 0),
    "VITRINE_W2W_SPACE": ("VitrineLoadW2WSpace", 0),
    "VITRINE_W2W_MODEL": ("VitrineW2WSample", 0),
}
TOLD = ("VitrineLoadControl", 0)
TRANSFORMER = ("VitrineLoadPortraitsTransformer", 0)
OTHER_MODEL = {
    "VitrineLoadControl": TRANSFORMER,
    "VitrineControlCFGGuider": TOLD,
    "VitrineControlConditionedSampler": TOLD,
    "VitrineResolutionTransferLoader": TRANSFORMER,
}
"""Nodes that are for the second shipped model."""
NATURAL = {
    ("VitrineNEMOVerify", "tau"): ("VitrineNEMOCalibrate", 1),
    ("VitrineControlCFGGuider", "positive"): ("VitrineControlValues", 0),
    ("VitrineControlCFGGuider", "negative"): ("VitrineControlValues", 0),
    ("VitrineNoisyReplicatePadding", "clip"): SOURCES["CLIP"],
}
"""Where an input's value can only come from."""
SHORTER = {
    "EmptyLatentImage": {"width": 64, "height": 64},
    "CLIPTextEncode": {"text": "a smiling face"},
    "VitrineEMDDistill": {"steps": 1, "batch": 1, "K": 1},
    "VitrineW2WInvert": {
        "preset": "custom",
        "preset.steps": 2,
        "preset.lr": 0.1,
        "preset.batch": 1,
        "preset.components": 0,
        "preset.prior": 0.0,
    },
    "VitrineTrainW2WSlider": {"steps": 2},
    "VitrineNEMOCalibrate": {"prompts": "a face\na hat\na beard\na cap"},
    "VitrineNEMOCopyCheck": {"seeds": 2, "steps": 2, "prompts": "a face"},
    "VitrineLoRAReport": {"seeds": 2, "steps": 1, "prompts": 1, "ordinary": "a\nb"},
    "VitrineNEMOVerify": {"attack_steps": 2},
    "VitrineControlConditionedSampler": {"steps": 2},
}
"""What only takes less time than the defaults, and texts that a node cannot do without."""
SHIPPED = {"VitrineLoadControl": {"file": "portraits power-cosine"}}
"""Files that other tests have saved come first in a list."""
LEFT_OUT = {
    "VitrineLoadActivations": "nothing has been saved",
    "VitrineLoadNeurons": "nothing has been saved",
    "VitrineLoadFeaturePreset": "nothing has been saved",
    "VitrineLoadW2WModel": "nothing has been saved",
    "VitrineApplyGammaSchedule": "the shipped model that is told sizes has a curve of its own",
    "VitrineTrainW2WDirection": "only its user knows which models have the attribute",
}


class Wired:
    """A graph that grows by what a node's sockets ask for."""

    def __init__(self, classes):
        self.classes, self.graph = classes, {}

    def add(self, kind):
        """A node at its defaults with all required sockets wired, once a kind; its id."""
        if kind in self.graph:
            return kind
        told = self.classes[kind].INPUT_TYPES()
        inputs = {}
        for name, (socket, *options) in (told["required"] | told.get("optional", {})).items():
            settings = options[0] if options else {}
            if (kind, name) in NATURAL:
                source = NATURAL[kind, name]
                inputs[name] = [self.add(source[0]), source[1]]
            elif isinstance(socket, list):
                inputs[name] = settings.get("default", socket[0])
            elif socket == "COMFY_DYNAMICCOMBO_V3":
                inputs[name] = settings["options"][0]["key"]
            elif socket == "COMBO":
                inputs[name] = settings.get("default") or settings["options"][0]
            elif "default" in settings or socket == "STRING":
                inputs[name] = settings.get("default", "")
            elif name in told["required"]:
                source = OTHER_MODEL.get(kind, SOURCES["MODEL"]) if socket == "MODEL" else SOURCES[socket]
                inputs[name] = [self.add(source[0]), source[1]]
        self.graph[kind] = {"class_type": kind, "inputs": inputs | SHORTER.get(kind, {}) | SHIPPED.get(kind, {})}
        return kind


def _ids():
    import json
    from pathlib import Path

    return sorted(json.loads((Path(__file__).parents[1] / "data" / "names.json").read_text("utf-8"))["nodes"])


@pytest.fixture(scope="module")
def executor(comfy):
    """One for all: what several nodes are wired to runs once."""
    return comfy.executor()


BEHIND = ("NEMOFindNeurons", "SaveNeurons", "NEMOBake", "NEMONeuronBlocker", "NEMOVerify", "EMDDistill")
SEARCHING = {f"Vitrine{name}" for name in BEHIND}
"""A search and what is behind it, and a training; test_nemo and test_emd run these nodes by day."""
RUN = [i for i in _ids() if i not in LEFT_OUT]


@pytest.mark.parametrize("node_id", nightly_but(RUN, set(RUN) - SEARCHING))
def test_defaults_run(comfy, executor, node_id):
    wired = Wired(comfy.nodes.NODE_CLASS_MAPPINGS)
    wired.add(node_id)
    for slot in range(len(comfy.nodes.NODE_CLASS_MAPPINGS[node_id].RETURN_TYPES)):
        wired.graph[f"shown {slot}"] = {"class_type": "PreviewAny", "inputs": {"source": [node_id, slot]}}
    shown, error = comfy.run(wired.graph, executor)
    assert error is None, error
    assert shown["outputs"]
