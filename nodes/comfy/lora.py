"""LoRAs as ordinary weight patches of a clone: files of one-step students, and models of a W2W space."""

from __future__ import annotations

import os
from typing import Any

import comfy.utils
import torch
from comfy_api.latest import io

from ...engine.emd import StudentPreset, check_names, one_step_of, read_student
from ...engine.errors import refuse
from ...engine.families import spelled_layers
from ...engine.io.lora_writing import usual_names
from ...engine.portraits.shipped import STUDENT_FOLDER, student_file
from ...engine.w2w import Lora
from . import compat_comfyui as core
from .model import PREFIX, backbone_of
from .saved import known_files, lora_files, lora_source, lora_stamp

NO_STUDENT = "(the model is the student)"
_SHIPPED_STUDENT = student_file().relative_to(STUDENT_FOLDER).as_posix()


def _patched(model: Any, tensors: dict[str, torch.Tensor], strength: float) -> tuple[Any, int]:
    """A clone with a LoRA file's tensors as patches, and how many layers of the model they reached."""
    names = _all_names(model) | core.model_lora_keys_unet(model.model, {})
    lora = core.convert_lora(tensors)
    patches = core.load_lora(lora, _named_in(lora, names))
    clone = model.clone()
    return clone, len(set(clone.add_patches(patches, strength)))


def _named_in(lora: dict[str, torch.Tensor], names: dict[str, Any]) -> dict[str, Any]:
    """Of a network's layer names those that tensors of a LoRA begin with: core tries every format on each name."""
    stems = {key[:end] for key in lora for end, letter in enumerate(key) if letter == "."}
    return {name: weight for name, weight in names.items() if name in stems or f"{name}_lora" in stems}


def _all_names(model: Any) -> dict[str, Any]:
    """Every trainer's names for the network's linear layers -> its weight, or rows of it: core knows only some."""
    names: dict[str, Any] = {}
    for name, path, rows in spelled_layers(backbone_of(model)):
        key = f"{PREFIX}{path}.weight"
        names[name] = key if rows is None else (key, (0, *rows))
    return names


def as_listed(data: dict[str, Any]) -> dict[str, Any]:
    """A prompt whose files have this system's separators: another system's graph has its own in names of files."""
    prompt = data.get("prompt") if isinstance(data, dict) else None
    for node in prompt.values() if isinstance(prompt, dict) else ():
        inputs: Any = node.get("inputs") if isinstance(node, dict) else None
        own = _choices(node.get("class_type")) if isinstance(inputs, dict) else {}
        for key, value in inputs.items() if isinstance(inputs, dict) else ():
            if isinstance(value, str) and key in own:
                inputs[key] = own[key].get(value.replace("\\", "/"), value)
    return data


def _choices(kind: object) -> dict[str, dict[str, str]]:
    """Input of one of our nodes -> each of its choices, by its name with slashes."""
    from nodes import NODE_CLASS_MAPPINGS

    node = NODE_CLASS_MAPPINGS.get(kind) if isinstance(kind, str) and kind.startswith("Vitrine") else None
    choices = (entry for entry in node.define_schema().inputs if isinstance(entry, io.Combo.Input)) if node else ()
    return {entry.id: {str(name).replace("\\", "/"): name for name in entry.options or ()} for entry in choices}


def register() -> None:
    """Read saved graphs' names, where there is a server."""
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    if server is not None and hasattr(server, "add_on_prompt_handler"):
        server.add_on_prompt_handler(as_listed)


def student_files() -> list[str]:
    """LoRA files on offer, after the entry that means none."""
    return [NO_STUDENT, *lora_files()]


def usual_student() -> str:
    """A published student among the user's LoRAs; the portraits model's where they have no LoRA; else none."""
    own = known_files("loras")
    known = (name for name in own if one_step_of(name) is not None)
    return next(known, NO_STUDENT if own else _SHIPPED_STUDENT)


def student_stamp(name: str) -> str:
    """What tells whether an entry of :func:`student_files` has changed."""
    return "" if name == NO_STUDENT else lora_stamp(name)


def preset_in(name: str) -> StudentPreset:
    """The preset in a LoRA file's header, or of a published student by the file's name."""
    if name == NO_STUDENT:
        raise refuse("student preset", "auto without a student file", "a student file with a header", "choose a preset")
    path = str(lora_source(name))
    return read_student(path, otherwise=one_step_of(path))[0]


def with_student(model: Any, name: str) -> Any:
    """A clone with a LoRA file at strength 1; every key must fit."""
    if name == NO_STUDENT:
        return model
    tensors = comfy.utils.load_torch_file(str(lora_source(name)), safe_load=True)
    check_names(tensors, os.path.basename(name))
    ups = [k for k in tensors if k.endswith((".lora_up.weight", ".lora_B.weight"))]
    layers = {k.rsplit(".lora_", 1)[0] for k in ups}
    clone, fitting = _patched(model, tensors, 1.0)
    if not fitting or fitting < len(layers):
        shown = f"{fitting} of {len(layers)} layers of {os.path.basename(name)} fit"
        raise refuse("student LoRA", shown, "a LoRA of this base model", "load the base it was distilled from")
    return clone


def with_lora(model: Any, lora: Lora, strength: float = 1.0) -> Any:
    """A clone with a LoRA as ordinary weight patches; every layer must fit."""
    clone, fitting = _patched(model, usual_names(lora), strength)
    if fitting < len(lora):
        shown = f"{fitting} of {len(lora)} layers fit"
        raise refuse("model of the space", shown, "the base model the LoRAs were trained on", "load that checkpoint")
    return clone
