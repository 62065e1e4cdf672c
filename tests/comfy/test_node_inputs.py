"""What comes over a link, or is typed past the page: each input of each node takes what its schema says, or refuses.

ComfyUI compares typed numbers with their bounds, which NaN passes, and looks at no linked value.
"""

import inspect
import math

import pytest
import torch
from vitrine.engine.errors import VitrineError

OTHERS = {
    "INT": (math.nan, math.inf, 1.5, "1", torch.tensor(1.0), [1]),
    "FLOAT": (math.nan, math.inf, -math.inf, "1", torch.tensor(1.0), [1.0], 10**400),
    "COMBO": ("no such choice", 3, math.nan),
    "COMFY_DYNAMICCOMBO_V3": ("no such choice", 3, {}),
    "STRING": (3, ["a"]),
    "BOOLEAN": (1, "yes"),
    "IMAGE": ([], {"samples": torch.zeros(1)}),
    "MASK": ("x",),
    "LATENT": (torch.zeros(1), []),
    "CONDITIONING": ({}, torch.zeros(1)),
}


def _entries(node):
    """(input, the choice that it stands below, if any) of a node."""
    for entry in node.define_schema().inputs:
        yield entry, {}
        for option in getattr(entry, "options", None) or ():
            yield from ((each, {entry.id: option.key}) for each in getattr(option, "inputs", ()))


def test_every_input_of_every_node(comfy):
    from vitrine.nodes import NODES

    tried = below = 0
    for node in NODES:
        for entry, choice in _entries(node):
            below += bool(choice)
            strange = list(OTHERS.get(entry.io_type, ()))
            if getattr(entry, "min", None) is not None:
                strange.append(entry.min - 1)
            if getattr(entry, "max", None) is not None:
                strange.append(entry.max + 1)
            strange += [] if entry.optional else [None]
            for value in strange:
                with pytest.raises(VitrineError, match=f"^({entry.id}|{entry.display_name}): given "):
                    comfy.call(node.define_schema().node_id, **choice, **{entry.id: value})
                    pytest.fail(f"{node.__name__} {entry.id} {value!r}")
                tried += 1
    assert tried > 1000 and below == 7


def test_the_signature_is_the_nodes_own(comfy):
    """ComfyUI and the page's tests read it."""
    from vitrine.nodes.w2w import W2WBlend

    assert list(inspect.signature(W2WBlend.execute).parameters) == ["space", "w2w_model", "other", "blend"]


def test_a_file_that_came_since_is_on_offer(comfy):
    """The list of files is read again where a name is not in it."""
    from vitrine.nodes.comfy.node_inputs import check_inputs
    from vitrine.nodes.comfy.saved import folder

    node = comfy.nodes.NODE_CLASS_MAPPINGS["VitrineLoadNeurons"]
    with pytest.raises(VitrineError, match="file: given 'new.json'"):
        check_inputs(node, {"file": "new.json"})
    folder("vitrine_neurons").mkdir(parents=True, exist_ok=True)
    (folder("vitrine_neurons") / "new.json").write_text("{}")
    check_inputs(node, {"file": "new.json"})
    (folder("vitrine_neurons") / "new.json").unlink()


def test_a_checkpoint_without_a_text_encoder(comfy):
    with pytest.raises(VitrineError, match="clip: given nothing, from the node before .*Load CLIP"):
        comfy.call("VitrineNEMOCalibrate", clip=None)
