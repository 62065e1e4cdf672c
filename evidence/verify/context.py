"""The inputs of a verification: the user's model and data, the budget, and the folder of unfinished work."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from os import environ
from pathlib import Path
from typing import Any

import torch

from ...engine.errors import VitrineError, refuse
from ...engine.families import family_of
from ...engine.io.files import named, parse_table, write_json
from ...engine.io.prompt_files import read_prompts
from ...engine.jobs.digests import digest, version_of
from ...engine.pipelines.adapter import network_of, reads_sizes
from ...engine.pipelines.components import components_of
from ...engine.pipelines.loading import LoadConfig, load_pipeline
from ...engine.runtime.footprint import memory_bytes
from ...engine.runtime.progress import Progress, TqdmProgress
from .estimate import Pace, pace_of
from .records import Need
from .settings import FILE, VerifySettings, read_settings

_PIECE = 2**22
_WEIGHTS = (".safetensors", ".bin")


def sha256_of(path: str | Path) -> str:
    """Of a file of any size, with 4 MiB in memory; of a folder, of its files' names and sums."""
    path = Path(path)
    if path.is_dir():
        files = (p for p in sorted(path.rglob("*")) if p.is_file() and not p.name.startswith("."))
        lines = (f"{p.relative_to(path).as_posix()}\0{sha256_of(p)}\n" for p in files)
        return hashlib.sha256("".join(lines).encode()).hexdigest()
    if not path.is_file():
        raise refuse("file", str(path), "an existing file or folder", "check the path")
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            total.update(piece)
    return total.hexdigest()


def model_files(model: str | Path) -> list[Path]:
    """The files with a model's weights: one file, or those in the folders that its model_index.json names."""
    model = Path(model)
    if model.is_file():
        return [model]
    index = model / "model_index.json"
    with named(index, "model", "a pipeline folder with a model_index.json", "check the path"):
        parts = parse_table(index.read_text(encoding="utf-8"))
    files: list[Path] = []
    for part in sorted(parts):
        folder = model / part
        weights = [p for p in sorted(folder.glob("*")) if p.suffix in _WEIGHTS] if folder.is_dir() else []
        files += [p for p in weights if p.suffix == ".safetensors"] or weights
    return files


class Checksums:
    """Checksums, cached while a file's size and modification time are unchanged.

    Args:
        path: of the JSON file of the cache.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, list] = {}
        if path.is_file():
            with named(path, "checksums", "what an earlier run left", "delete the file"):
                self._known = parse_table(path.read_text(encoding="utf-8"))

    def of(self, path: Path) -> str:
        """The sum of a file or folder."""
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        state = json.dumps([[p.name, *_state(p)] for p in files])
        seen = hashlib.sha256(state.encode()).hexdigest()
        key = str(path.absolute())
        if self._known.get(key, [""])[0] != seen:
            self._known[key] = [seen, sha256_of(path)]
            write_json(self.path, self._known)
        return str(self._known[key][1])

    def table(self, paths: Iterable[Path], root: Path) -> dict[str, str]:
        """Path relative to ``root`` -> sum."""
        return {_name(p, root): self.of(p) for p in paths}


def _state(path: Path) -> tuple[int, int]:
    entry = path.stat()
    return entry.st_size, entry.st_mtime_ns


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) and path != root else path.name


SEED = 2025
"""Seed of the permutation whose first elements are a subset."""
SETTINGS = Need(FILE, "settings other than the papers'", "written by you", "yours", optional=True)


@dataclass(frozen=True)
class Asked:
    """What the user asks for.

    Attributes:
        model: a pipeline folder or a .safetensors file on this machine.
        data: folder with the data of the checks, at any depth up to two folders.
        sscd, clip: copy descriptors: SSCD's TorchScript file, a CLIP folder.
        face, lpips: a face recogniser and LPIPS, as TorchScript files.
        subset: most prompts or pairs of each kind.
        memory: budget in addition to the weights.
        out: folder of this verification.
        load: device, precision and the like.
        world: the embedded model that takes the checkpoint's role, or None.
    """

    model: str
    data: Path | None = None
    sscd: Path | None = None
    clip: Path | None = None
    subset: int | None = None
    memory: str = "4GB"
    out: Path = Path("verify")
    load: LoadConfig = field(default_factory=LoadConfig)
    world: str = ""
    face: Path | None = None
    lpips: Path | None = None


@contextmanager
def offline() -> Iterator[None]:
    """Blocks access to the hub while the context is open, whatever was imported before."""
    name = "HF_HUB_OFFLINE"
    constants: Any = sys.modules.get("huggingface_hub.constants")
    before, flag = environ.get(name), getattr(constants, name, None)
    environ[name] = "1"
    if constants is not None:
        setattr(constants, name, True)
    try:
        yield
    finally:
        if constants is not None:
            setattr(constants, name, flag)
        if before is None:
            del environ[name]
        else:
            environ[name] = before


def local_model(model: str, config: str = "") -> Path:
    """The model's folder or file."""
    for what, name in (("model", model), ("--config", config)):
        if name and not Path(name).exists():
            here = "a pipeline folder or a .safetensors file on this machine"
            accepted = ["portraits", "flow", "sized", here] if what == "model" else here
            raise refuse(what, name, accepted, "nothing is downloaded here: download it yourself, then name its folder")
    path = Path(model)
    if path.is_file() and path.suffix != ".safetensors":
        raise refuse("model", path.name, "a pipeline folder or a .safetensors file", "convert it; pickles are not read")
    return path


def kind_of(pipe: Any) -> str:
    """``SD`` (1.x and 2.x), ``SDXL``, or the name of a transformer's family."""
    unet = getattr(pipe, "unet", None)
    if unet is None:
        return family_of(pipe.transformer).name
    return "SDXL" if reads_sizes(unet) else "SD"


class Context:
    """One verification.

    Attributes:
        asked: the user's request.
        model: folder or file.
        pipe: loaded from it.
        kind: see :func:`kind_of`.
        settings: the papers', or what settings.json in the data folder says.
        budget: bytes in addition to the weights.
    """

    def __init__(self, asked: Asked, bar: Callable[[str], Progress] = TqdmProgress) -> None:
        if asked.subset is not None and asked.subset < 2:
            raise refuse("subset", asked.subset, "2 or more", "20 prompts give a first impression")
        if asked.data is not None and not asked.data.is_dir():
            remedy = "leave --data out, and the plan (--dry) lists what belongs into it"
            raise refuse("data", str(asked.data), "a folder", remedy)
        self.asked, self.bar, self.budget = asked, bar, memory_bytes(asked.memory)
        self.model = local_model(asked.model, asked.load.config)
        self.settings: VerifySettings = read_settings(self.path(SETTINGS))
        self.sums = Checksums(asked.out / "state" / "checksums.json")
        with offline():
            self.pipe: Any = self._loaded()
        self.pipe.set_progress_bar_config(disable=True)
        self.kind = kind_of(self.pipe)

    def _loaded(self) -> Any:
        try:
            return load_pipeline(str(self.model), None, self.asked.load)
        except VitrineError as error:
            if self.model.is_file() and not self.asked.load.config:
                remedy = "name a pipeline folder of the same model with --config: a single file lacks it"
                raise refuse("--config", "none", "a folder with the model's configuration", remedy) from error
            raise

    # --- the model ------------------------------------------------------------------------------------------------
    @cached_property
    def network(self) -> Any:
        """The UNet or transformer."""
        return network_of(self.pipe)

    @cached_property
    def nemo(self) -> Any:
        """The NEMO tools around the pipeline."""
        from ...engine.pipelines import NEMOPipeline

        side = self.settings.size
        pipe = NEMOPipeline.from_pipe(self.pipe, size=(side, side) if side else None)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    @cached_property
    def w2w(self) -> Any:
        """The weights2weights tools around the pipeline."""
        from ...engine.pipelines import W2WPipeline

        pipe = W2WPipeline.from_pipe(self.pipe)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    @cached_property
    def controlled(self) -> Any:
        """The pipeline whose sizes have a weight over the noise level; of models conditioned on sizes."""
        from ...engine.pipelines import ControlConditionedPipeline

        pipe = ControlConditionedPipeline.from_pipe(self.pipe)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    @cached_property
    def own_side(self) -> int:
        """Side in pixels of the pictures of a model conditioned on sizes, its default condition."""
        return int(self.network.config.sample_size) * int(self.pipe.vae_scale_factor)

    @cached_property
    def pace(self) -> Pace:
        """Cost of a batch row in the network on this machine, timed once."""
        return pace_of(self.pipe, self.nemo, self.settings.detect)

    @cached_property
    def weights(self) -> dict[str, str]:
        """File of the model -> SHA-256."""
        return self.sums.table(model_files(self.model), self.model)

    @cached_property
    def identity(self) -> str:
        """The digest of everything loaded: networks, scheduler, tokenizers; and the libraries that compute them."""
        versions = [version_of(name) for name in ("torch", "diffusers", "transformers")]
        return digest([components_of(self.pipe), versions, self.network.device.type])

    @property
    def dtype(self) -> str:
        """Of the network."""
        return str(self.network.dtype).removeprefix("torch.")

    # --- the data -------------------------------------------------------------------------------------------------
    def path(self, need: Need) -> Path | None:
        """Where the data is, or None."""
        if need.option:
            path: Path | None = getattr(self.asked, need.option)
            if path is not None and not path.exists():
                raise refuse(f"--{need.option}", str(path), need.what, "check the path")
            return path
        if self.asked.data is None:
            return None
        for name in need.names:
            for pattern in (name, f"*/{name}", f"*/*/{name}"):
                matches = sorted(self.asked.data.glob(pattern))
                if matches:
                    return matches[0]
        return None

    def prompts(self, need: Need) -> tuple[list[str], list[str]]:
        """(prompts, labels) of a required list; labels are empty if it has none."""
        path = self.path(need)
        if path is None:
            raise refuse(need.file, "nothing", need.what, need.text())
        prompts, labels = read_prompts(path)
        return prompts, labels or [""] * len(prompts)

    def chosen(self, count: int) -> list[int]:
        """Ascending indices of a subset of ``count`` items: always the same ones, and part of every larger subset."""
        order = torch.randperm(count, generator=torch.Generator().manual_seed(SEED))
        return sorted(order[: self.asked.subset].tolist())

    def subset_note(self, count: int, whole: int, what: str) -> list[str]:
        """A sentence if only a subset was measured."""
        return [] if count == whole else [f"{count} of {whole} {what}, chosen by a fixed permutation"]

    def usual_notes(self, *relevant: str, autocast: bool = True) -> list[str]:
        """The differences common to all checks: the model, the precision, the settings.

        Args:
            relevant: names of the settings that the check reads.
            autocast: whether the authors computed in float16 autocast of float32 weights, as NeMo's did.
        """
        notes = [f"the embedded model {self.asked.world!r} takes the checkpoint's role"] if self.asked.world else []
        if autocast:
            notes.append(f"computed in {self.dtype}, the authors in float16 (autocast of float32 weights)")
        return notes + self.settings.changed(*relevant)

    # --- the work -------------------------------------------------------------------------------------------------
    def state(self, name: str, *facts: object) -> Path:
        """The folder (or file, by its suffix) of unfinished work, separate for each model and ``facts``."""
        mark = digest([self.identity, list(facts)])[:12]
        stem, dot, ending = name.partition(".")
        return self.asked.out / "state" / f"{stem}-{mark}{dot}{ending}"

    def data_sums(self, needs: Sequence[Need]) -> dict[str, str]:
        """Name -> SHA-256 of the existing data."""
        paths = {need.file: self.path(need) for need in needs}
        return {path.name: self.sums.of(path) for path in paths.values() if path is not None}

    def data_sums_of(self, *options: str) -> list[str]:
        """Sums of the files that the command's options name; empty for unset options."""
        paths: list[Path | None] = [getattr(self.asked, option) for option in options]
        return ["" if path is None else self.sums.of(path) for path in paths]
