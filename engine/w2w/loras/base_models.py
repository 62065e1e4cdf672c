"""The base model of a LoRA: by its header, and by names and widths of its layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from ...families import FAMILIES

Outers = Mapping[str, tuple[int, ...]]

_HEADERS = ("ss_base_model_version", "modelspec.architecture", "ss_sd_model_name")


def named_base(metadata: Mapping[str, str], settings: Mapping[str, object]) -> str:
    """The base model's name in a header or in PEFT's settings, with kohya's short checkpoint hash; or empty.

    kohya writes ``ss_base_model_version``, ``ss_sd_model_name`` and ``ss_sd_model_hash``; ``modelspec.architecture`` is
    Stability's ModelSpec 1.0; PEFT has ``base_model_name_or_path``.
    """
    said = [str(metadata[key]) for key in _HEADERS if metadata.get(key)]
    said += [str(settings["base_model_name_or_path"])] if settings.get("base_model_name_or_path") else []
    if metadata.get("ss_sd_model_hash"):
        said.append(f"checkpoint {metadata['ss_sd_model_hash']}")
    return ", ".join(dict.fromkeys(" ".join(part.split())[:80] for part in said))


def shaped_base(outers: Outers) -> str:
    """The base model by names and sizes (out, in) of layers; empty if none matches."""
    sizes: dict[int, set[tuple[int, ...]]] = {}
    for path, outer in outers.items():
        for family in _families_of(path):
            sizes.setdefault(family, set()).add(outer)
    for family in sorted(sizes):
        for model in FAMILIES[family].published:
            if any(model.width in outer or model.text == outer[1] for outer in sizes[family]):
                return model.name
    return ""


@lru_cache(maxsize=1 << 15)
def _families_of(path: str) -> tuple[int, ...]:
    """Places in ``FAMILIES`` of those whose LoRA files have a layer of this name."""
    return tuple(i for i, f in enumerate(FAMILIES) if f.lora_paths and re.search(f.lora_paths, path))
