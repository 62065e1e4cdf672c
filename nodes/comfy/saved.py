"""Where the Save nodes write, what the Load nodes list, and the examples that ship with the pack.

What a model is used with is saved among ComfyUI's models, in folders that extra_model_paths.yaml can name too: neurons,
selections of layers, models of a space. LoRAs go where every LoRA loader lists them. Activations, which are large and
belong to pictures, go to the output folder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import folder_paths

from ...engine.errors import refuse
from ...engine.io.file_names import safe_name
from ...engine.io.folders import files_in, has_ending, hidden
from ...engine.portraits.shipped import STUDENT_FOLDER

SHIPPED = Path(__file__).parents[2] / "engine" / "portraits" / "weights" / "examples"
MODELS = ("vitrine_neurons", "vitrine_presets", "vitrine_statistics", "vitrine_w2w")
"""Kinds of file with a folder of their own among the models."""
LORAS = "vitrine"
"""Folder below models/loras, so that ours are listed together."""
_MARK = " (shipped)"

for _kind in MODELS:
    if _kind not in folder_paths.folder_names_and_paths:
        folder_paths.add_model_folder_path(_kind, str(Path(folder_paths.models_dir) / _kind))


def _plain(name: str) -> str:
    """The name of a file that is there already, without any path; new ones are :func:`safe_name`'s."""
    if not name or name != os.path.basename(name) or "\\" in name or name.startswith(".") or "\0" in name:
        raise refuse("file name", name, "letters without folders, e.g. portrait-t50", "leave out / and leading dots")
    return name


def folder(kind: str) -> Path:
    """Where a Save node writes: models/<kind> for what has a folder there, else output/<kind>."""
    return _folders(kind)[0]


def shown(path: str | Path) -> str:
    """A written file as its node names it: without the path above ComfyUI's folders of models and of output."""
    for root in (Path(folder_paths.models_dir).parent, Path(folder_paths.get_output_directory()).parent):
        if Path(path).is_relative_to(root):
            return Path(path).relative_to(root).as_posix()
    return str(path)


def _folders(kind: str) -> list[Path]:
    """Where a Load node looks."""
    if kind in MODELS:
        return [Path(path) for path in folder_paths.get_folder_paths(kind)]
    return [Path(folder_paths.get_output_directory()) / kind]


def lora_file(name: str) -> Path:
    """models/loras/vitrine/<name>.safetensors, which Load LoRA lists as vitrine/<name>.safetensors."""
    return Path(folder_paths.get_folder_paths("loras")[0]) / LORAS / f"{safe_name(name)}.safetensors"


def listed(kind: str, ending: str) -> list[str]:
    """Names of saved files, then the shipped example, so that a Load node has something to load at once."""
    names = sorted({p.name for root in _folders(kind) for p in files_in(root, ending)})
    return [*names, *(f"{p.name}{_MARK}" for p in files_in(SHIPPED / kind, ending))]


def known_files(kind: str, ending: str = ".safetensors") -> list[str]:
    """ComfyUI's own list of a folder of models, subfolders too, without hidden names and files of other endings.

    It is read again only when a folder has changed.
    """
    names = folder_paths.get_filename_list(kind)
    return [n for n in names if has_ending(n, ending) and not any(map(hidden, n.replace("\\", "/").split("/")))]


def lora_files() -> list[str]:
    """LoRA files as this pack's nodes list them: the user's, then the shipped ones, which core's lists do not have."""
    own = known_files("loras")
    return [*own, *(name for name in _shipped_loras() if name not in own)]


def in_the_list(name: str, file: str, files: Sequence[str]) -> bool | str:
    """True, or what a node says whose LoRA is not there: the rest of the graph runs."""
    if file in files:
        return True
    return f"{name}: there is no {file}; put the LoRA into models/loras, press R in the page, and choose it"


def _shipped_loras() -> dict[str, Path]:
    return {p.relative_to(STUDENT_FOLDER).as_posix(): p for p in sorted(STUDENT_FOLDER.rglob("*.safetensors"))}


def lora_source(name: str) -> Path:
    """Where an entry of :func:`lora_files` lies."""
    own = folder_paths.get_full_path("loras", name)
    path = Path(own) if own else _shipped_loras().get(name)
    if path is None:
        raise refuse("LoRA", name, "a file in models/loras", "put it there, press R in the page and choose it")
    return path


def lora_stamp(name: str) -> str:
    """What tells whether an entry of :func:`lora_files` has changed."""
    own = folder_paths.get_full_path("loras", name) if name else None
    return stamp(own) if own else stamp(_shipped_loras().get(name))


def path_of(kind: str, name: str) -> Path:
    """Where an entry of :func:`listed` lies."""
    if name.endswith(_MARK):
        return SHIPPED / kind / _plain(name.removesuffix(_MARK))
    paths = [root / _plain(name) for root in _folders(kind)]
    return next((path for path in paths if path.is_file()), paths[0])


def changed(kind: str, name: str) -> str:
    """What tells whether an entry of :func:`listed` has changed, for ``fingerprint_inputs``."""
    return stamp(path_of(kind, name))


def stamp(*paths: str | Path | None) -> str:
    """What tells whether files, or those in folders, have changed: names, sizes, times of writing. Nothing is read."""
    stamps: list[tuple[str, int, int]] = []
    for path in (Path(p) for p in paths if p is not None):
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            try:
                facts = file.stat()
            except OSError:  # not there, or gone since it was listed
                continue
            stamps.append((str(file), facts.st_size, facts.st_mtime_ns))
    return repr(stamps)


def stamp_of(kind: str, name: str) -> str:
    """:func:`stamp` of an entry of one of ComfyUI's own lists; of none, where it is no file."""
    return stamp(folder_paths.get_full_path(kind, name)) if name else stamp()
