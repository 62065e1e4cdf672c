"""W2W in ComfyUI: spaces and folders of LoRAs on disk, and a model of a space on MODEL, also from a timestep on."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import folder_paths

from ...engine.errors import refuse
from ...engine.io.file_names import safe_name
from ...engine.portraits.shipped import PEOPLE_LORAS, PEOPLE_SPACE
from ...engine.w2w import (
    BaseWeights,
    BatchedLora,
    BuildConfig,
    Built,
    Manifest,
    Space,
    W2WModel,
    build_space,
    difference,
    load_space,
    mapped,
    materialise,
)
from ...engine.w2w.space.linked_factors import linked_files
from ...engine.w2w.train.batched_lora import lora_targets
from .forwards import Forward, around_forwards
from .lora import with_lora
from .model import PREFIX, backbone_of, unpatched
from .own_patches import note_late_change
from .progress import progress
from .saved import known_files, stamp

PEOPLE = "portraits people (shipped)"
FOLDER = "vitrine_w2w"
"""Where saved models lie, below models."""
_KEY = "vitrine.w2w"

if "w2w" not in folder_paths.folder_names_and_paths:  # another pack may have registered it
    folder_paths.add_model_folder_path("w2w", str(Path(folder_paths.models_dir) / "w2w"))


# --- on disk ------------------------------------------------------------------------------------------------------
def space_files() -> list[str]:
    """The files in models/w2w, and the shipped space."""
    shipped = [PEOPLE] if PEOPLE_SPACE.is_file() else []
    return [*known_files("w2w"), *shipped]


def space_path(name: str) -> Path:
    """Where a file of :func:`space_files` lies."""
    return PEOPLE_SPACE if name == PEOPLE else Path(folder_paths.get_full_path_or_raise("w2w", name))


def known_space(name: str) -> Path | None:
    """As :func:`space_path`; None where there is no such file."""
    if name == PEOPLE:
        return PEOPLE_SPACE
    path = folder_paths.get_full_path("w2w", name)
    return None if path is None else Path(path)


def space_stamp(name: str) -> str:
    """What tells whether a space has changed: its file, and the LoRAs that a linked one reads."""
    path = known_space(name)
    return "" if path is None else stamp(path, *linked_files(path, folder_paths.get_folder_paths("loras")))


def space(name: str) -> Space:
    """A space by its entry in the list."""
    return load_space(space_path(name), folder_paths.get_folder_paths("loras"))


def save_space(space: Space, name: str) -> Path:
    """Write a space into models/w2w."""
    target = Path(folder_paths.get_folder_paths("w2w")[0])
    return space.save(target / f"{safe_name(name)}.w2w.safetensors", "float16")


def lora_folders() -> dict[str, Path]:
    """Folders with two LoRA files or more: their names below models/loras -> where they are.

    ``.`` is models/loras itself; another root goes by its folder's name. The user's are first; the forty shipped people
    are here alone: as single LoRAs they would fill every loader's list.
    """
    folders = dict(sorted(_folders(tuple(loras()), tuple(folder_paths.get_folder_paths("loras")))))
    return folders | ({PEOPLE: PEOPLE_LORAS} if PEOPLE_LORAS.is_dir() else {})


@lru_cache(maxsize=1)
def _folders(files: tuple[str, ...], roots: tuple[str, ...]) -> tuple[tuple[str, Path], ...]:
    """(name, folder) of folders with two files or more, of the files that *Load LoRA* lists."""
    folders: dict[str, Path] = {}
    for number, root in enumerate(map(Path, roots)):
        counts = Counter(Path(file).parent for file in files if (root / file).is_file())
        for folder in sorted(folder for folder, count in counts.items() if count > 1 and not _in_circle(root, folder)):
            name = folder.as_posix()
            folders.setdefault(root.name if number and name == "." else name, root / folder)
    return tuple(folders.items())


def _in_circle(root: Path, folder: Path) -> bool:
    """Whether a link leads back to a folder above it, which ComfyUI's list follows forty times."""
    return os.path.realpath(root / folder) in {os.path.realpath(root / parent) for parent in folder.parents}


def loras() -> list[str]:
    """LoRA files of models/loras."""
    return known_files("loras")


def lora_path(name: str) -> str:
    """Where a file of :func:`loras` lies."""
    return str(folder_paths.get_full_path_or_raise("loras", name))


def build(folder: str, name: str, config: BuildConfig, model: Any = None) -> Built:
    """Build a space from a folder below models/loras; it is saved in models/w2w.

    Args:
        model: MODEL of the checkpoint, whose weights DoRAs need; LoRAs on it do not count.
    """
    known = lora_folders()
    if folder not in known:
        raise refuse("folder", folder, list(known), "put the LoRAs into a folder below models/loras")
    work = Path(folder_paths.get_folder_paths("w2w")[0]) / f".{safe_name(name)}.work"  # where a stopped build resumes
    base = None if model is None else BaseWeights.of_module(backbone_of(model), unpatched(model))
    built = build_space(known[folder], config, progress(), work=work, base=base)
    built = replace(built, space=mapped(built.space))
    save_space(built.space, name)
    shutil.rmtree(work, ignore_errors=True)
    return built


# --- on MODEL -----------------------------------------------------------------------------------------------------
def applied(model: Any, space: Space, chosen: W2WModel, late: W2WModel | None, start: float, strength: float) -> Any:
    """A clone that is the chosen model of the space and, from timestep ``start`` on, the late one.

    The chosen model is a weight patch like any LoRA. The late one adds their difference, a LoRA of twice the rank,
    inside each forward: patches cannot change while a sampler runs.
    """
    before = materialise(space, chosen.only(space))
    if late is None:
        return with_lora(model, before, strength)
    after = materialise(space, late.only(space))
    if start >= 1000:
        return with_lora(model, after, strength)
    clone, change = with_lora(model, before, strength), difference(after, before)
    if not change or start < 0:
        return clone
    change = {path: replace(layer, up=strength * layer.up) for path, layer in change.items()}
    manifest = Manifest.of(change)
    weights = manifest.flatten(change)[None]

    def late_edit(forward: Forward) -> AbstractContextManager:
        if forward.timestep > start:
            return nullcontext()
        return BatchedLora(forward.network, manifest, weights.to(forward.x.device))

    clone = around_forwards(clone, _KEY, late_edit)
    network = backbone_of(model)
    names = {id(module): name for name, module in network.named_modules()}
    changed = [names[id(target.module)] for target in lora_targets(network, manifest).values()]
    note_late_change(clone, _KEY, [f"{PREFIX}{name}.weight" for name in changed])
    return clone
