"""Inputs for any node of the pack that takes a MODEL, by its schema, small enough to run in seconds."""

import re

import torch

SMALL = {
    "steps": 2, "attack_steps": 2, "samples": 2, "seeds": 2, "timestep_index": 4, "timestep": 500.0, "batch": 1,
    "tau": 0.5, "cfg": 3.0, "size": 64, "usual": 2, "name": "any", "save_as": "", "layers": "up-level1-*-cross-q",
    "most": 1, "reference": "target", "sampler_name": "euler", "scheduler": "normal", "width": 64, "height": 64,
    "first_seed": 3, "folds": 2, "prompts": "a smiling face", "ordinary": "a bald head\na pale face\nan old face",
    "k": 4, "upscale": 1.0, "label": "any", "compare": False,
}  # fmt: skip
"""Values of inputs by their names."""
PASSED_ON = {"MODEL", "GUIDER", "CONDITIONING"}
"""Outputs that nothing was computed for yet."""


def computing(comfy, also):
    """Node ids that take a MODEL and one of ``also``, and return what the network computed."""
    ids = []
    for node_id, node in comfy.nodes.NODE_CLASS_MAPPINGS.items():
        if not node_id.startswith("Vitrine"):
            continue
        schema = node.define_schema()
        required = {i.get_io_type() for i in schema.inputs if not getattr(i, "optional", False)}
        computed = {o.get_io_type() for o in schema.outputs} - PASSED_ON
        if "MODEL" in required and required & set(also) and computed:
            ids.append(node_id)
    return ids


def takes(comfy, node_id, kind):
    """Whether a node has an input of a kind, optional ones included."""
    return kind in {i.get_io_type() for i in comfy.nodes.NODE_CLASS_MAPPINGS[node_id].define_schema().inputs}


def picture(seed, count=2):
    return torch.rand(count, 64, 64, 3, generator=torch.Generator().manual_seed(seed))


def inputs_of(comfy, node_id, known):
    """Values for all required inputs, and for optional ones of a kind in ``known``: kind or name -> value."""
    values = {}
    for number, entry in enumerate(comfy.nodes.NODE_CLASS_MAPPINGS[node_id].define_schema().inputs):
        kind, optional = entry.get_io_type(), getattr(entry, "optional", False)
        options = [getattr(option, "key", option) for option in getattr(entry, "options", None) or []]
        if entry.id in known:
            values[entry.id] = known[entry.id]
            values |= _below(entry, known[entry.id])
        elif kind in known and not (optional and kind == "MODEL"):
            values[entry.id] = known[kind]
        elif kind == "IMAGE":
            values |= {} if optional else {entry.id: picture(number)}
        elif optional:
            continue
        elif entry.id in SMALL and (not options or SMALL[entry.id] in options):
            values[entry.id] = SMALL[entry.id]
        elif options:
            values[entry.id] = options[0]
            values |= _below(entry, options[0])
        else:
            values[entry.id] = entry.default
            assert entry.default is not None, f"{node_id}: a value for {entry.id} ({kind}), here or in SMALL"
    return values


def _below(entry, key):
    """Small values of what stands below the chosen option, where it has any."""
    chosen = [option.inputs for option in getattr(entry, "options", None) or () if getattr(option, "key", None) == key]
    return {i.id: SMALL[i.id] for inputs in chosen for i in inputs if i.id in SMALL}


def numbers_of(value):
    """All numbers of a node's outputs, in one list: of tensors, of what has some, and in texts."""
    if isinstance(value, torch.Tensor):
        return value.double().flatten().tolist()
    if isinstance(value, (bool, int, float)):
        return [float(value)]
    if isinstance(value, str):
        return [float(n) for n in re.findall(r"\d+\.\d+|\d+", re.sub(r"\b\d+ s\b|[\w/.-]*/[\w/.-]*", "", value))]
    if isinstance(value, dict):
        return [n for key in value for n in numbers_of(value[key])]
    if isinstance(value, (list, tuple)):
        return [n for part in value for n in numbers_of(part)]
    if hasattr(value, "tensor"):
        return numbers_of(value.tensor)
    if hasattr(value, "keys"):
        return [n for key in list(value.keys()) for n in numbers_of(value[key])]
    return numbers_of(dict(vars(value))) if hasattr(value, "__dict__") else []


def texts_of(value):
    """All texts of a node's outputs and of what it shows, in one."""
    if isinstance(value, dict):
        return "\n".join(texts_of(part) for part in value.values())
    if isinstance(value, (list, tuple)):
        return "\n".join(texts_of(part) for part in value)
    return value if isinstance(value, str) else ""
