"""The base model of a LoRA: by its header, and by names and widths of its layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from ...families import FAMILIES, Family
from ...families.module_names import ModuleNames, largest_numbers

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
    """The base model by names, numbers of blocks and sizes (out, in) of layers; empty if none matches.

    Several that cannot be told apart are joined by "or". Names of layers alone decide only where no family that has
    them is known by its sizes.
    """
    names = sized_bases(outers)
    fitting = families_of(tuple(outers))
    if not names and not any(model.width or model.text for family in fitting for model in family.published):
        names = [family.name for family in fitting]
    return " or ".join(name for name in names if not any(name in other for other in names if other != name))


def sized_bases(outers: Outers) -> list[str]:
    """Published models that have these layers with these sizes."""
    return [name for family in families_of(tuple(outers)) if (name := _published(family, outers))]


def _published(family: Family, outers: Outers) -> str:
    """Which of a family's models has layers of these sizes; empty if none has, or sizes do not tell them apart."""
    sizes = {outer for path, outer in outers.items() if re.search(family.lora_paths, path)}
    known = (model for model in family.published if model.width or model.text)
    fitting = (model for model in known if any(model.width in outer or model.text == outer[1] for outer in sizes))
    return next((model.name for model in fitting), "")


@lru_cache(maxsize=64)
def families_of(paths: tuple[str, ...]) -> tuple[Family, ...]:
    """The families to whose modules most of these layers belong; those with exactly these blocks come alone.

    None where fewer than half of the layers belong to a family, or there are more blocks than any of its models has.
    """
    counts = largest_numbers(paths)
    possible = [
        family
        for family in FAMILIES
        if all(counts.get(blocks, 0) <= max(lengths) for blocks, lengths in family.blocks.items())
    ]
    owned = [sum(path in _names(family.modules) for path in paths) for family in possible]
    most = max(owned, default=0)
    if not paths or most < len(paths) / 2:
        return ()
    fitting = [family for family, count in zip(possible, owned, strict=True) if count == most]
    exact = [family for family in fitting if any(counts.get(b) in lengths for b, lengths in family.blocks.items())]
    return tuple(exact or fitting)


@lru_cache(maxsize=64)
def _names(modules: tuple[str, ...]) -> ModuleNames:
    return ModuleNames(modules)
