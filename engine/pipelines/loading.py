"""Models that commands take by name: the shipped one, a folder, a hub id, or a single safetensors file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import readable, refuse
from ..io.files import named
from ..io.folders import has_ending
from ..runtime.quiet import no_bars
from ..settings.option import Option, Options

if TYPE_CHECKING:
    import torch

SHIPPED, FLOW = "portraits", "flow portraits"
ACCEPTED = "'portraits', 'flow portraits', a pipeline folder, a .safetensors file, or a hub id"


@dataclass(frozen=True)
class LoadConfig(Options):
    """How a model is loaded."""

    device: Annotated[str, Option("cpu, cuda, cuda:1, mps ...; none: an accelerator if there is one.")] = ""
    dtype: Annotated[
        str,
        Option(
            "Precision of the weights.",
            choices=("bfloat16", "float16", "float32"),
            remedy="float16 suits GPUs, bfloat16 newer ones",
        ),
    ] = "float32"
    revision: Annotated[str, Option("Branch, tag or commit of a hub id.")] = ""
    variant: Annotated[str, Option("Of the weight files' names: fp16 takes *.fp16.safetensors.")] = ""
    config: Annotated[
        str,
        Option(
            "For a .safetensors file: a pipeline folder or hub id with its configuration; none: found by diffusers.",
        ),
    ] = ""

    @property
    def place(self) -> torch.device:
        """Where the model goes: the device asked for, else this process's own."""
        import torch

        from ..runtime.processes import processes

        try:
            return torch.device(self.device) if self.device else processes().device
        except RuntimeError as error:
            raise refuse("device", self.device, "cpu, cuda, cuda:1, mps ...", "check the name") from error

    @property
    def checked_place(self) -> torch.device:
        """:attr:`place`, once a tensor has been there."""
        import torch

        place = self.place
        try:
            torch.empty(1, device=place)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).strip().split("\n")[0]
            raise refuse("device", f"{place} ({reason})", "a device of this machine", "cpu always works") from error
        return place

    @property
    def precision(self) -> torch.dtype:
        """The dtype by its name."""
        import torch

        precision: torch.dtype = getattr(torch, self.dtype)
        return precision


def load_pipeline(model: str, kind: Any = None, config: LoadConfig | None = None) -> Any:
    """A pipeline of class ``kind`` (default: the model's own), in the precision and on the device asked for."""
    config = config or LoadConfig()
    _refuse_unread(model, config)
    if model in (SHIPPED, FLOW):
        from ..portraits.flow import load_either
        from ..portraits.shipped import shipped_models

        folder = next(path for name, path in shipped_models().items() if name.startswith(f"{model},"))
        pipe = formed(load_either(folder).pipeline(), kind)
    elif has_ending(model, ".safetensors"):
        pipe = _from_file(Path(model), kind, config)
    else:
        pipe = _from_folder_or_hub(model, kind, config)
    return pipe.to(config.checked_place, config.precision)


def _refuse_unread(model: str, config: LoadConfig) -> None:
    """What would be ignored: a version of files on this machine, a configuration of what has its own."""
    read: tuple[str, ...] = ()
    if model in (SHIPPED, FLOW):
        kind = "a model that ships with the pack"
    elif has_ending(model, ".safetensors"):
        kind, read = "a single file", ("config",)
    elif Path(model).is_dir():
        kind, read = "a folder", ("variant",)
    else:
        kind, read = "a hub id", ("revision", "variant")
    settings = {"revision": config.revision, "variant": config.variant, "config": config.config}
    unread = {f"--{name}": value for name, value in settings.items() if value and name not in read}
    if unread:
        accepted = " and ".join(f"--{name}" for name in read) or "neither --revision, --variant nor --config"
        raise refuse("model", f"{kind} with {readable(unread)}", accepted, "leave it out: it would change nothing")


def _from_folder_or_hub(model: str, kind: Any, config: LoadConfig) -> Any:
    from diffusers import DiffusionPipeline

    if not Path(model).is_dir() and (Path(model).is_absolute() or model.startswith(".") or model.count("/") != 1):
        raise refuse("model", model, ACCEPTED, "check the path")
    chosen = {k: v for k, v in (("revision", config.revision), ("variant", config.variant)) if v}
    try:
        with no_bars():
            pipe = DiffusionPipeline.from_pretrained(model, torch_dtype=config.precision, **chosen)
    except (OSError, ValueError) as error:
        raise _unreadable(model, error) from error
    return formed(pipe, kind)


def _from_file(path: Path, kind: Any, config: LoadConfig) -> Any:
    """One file in the layout of Stable Diffusion's authors. Pickles are not read."""
    where = {"config": config.config} if config.config else {}
    with no_bars():
        return read_single_file(path, kind, torch_dtype=config.precision, **where)


def read_single_file(path: Path, kind: Any = None, **options: Any) -> Any:
    """The stock pipeline that diffusers reads from one file, or one of class ``kind`` around its components.

    Args:
        options: as the stock pipeline's ``from_single_file`` takes them.
    """
    if not path.is_file():
        raise refuse("model", str(path), ACCEPTED, "check the path")
    try:
        pipe = pipeline_of(path).from_single_file(str(path), **options)
    except (OSError, ValueError) as error:
        raise _unreadable(path.name, error) from error
    return formed(pipe, kind)


def formed(pipe: Any, kind: Any = None) -> Any:
    """A loaded stock pipeline as class ``kind``, or as the form of that class for its model."""
    if kind is None or isinstance(pipe, kind):
        return pipe
    if kind.__module__.startswith("diffusers."):  # its ``from_pipe`` would leave parts out without a word
        raise refuse("model", type(pipe).__name__, kind.__name__, "it is for another model family")
    return kind.from_pipe(pipe)


def pipeline_of(path: Path) -> Any:
    """The stock pipeline for a single file, by the names in it: SDXL's authors keep a second text encoder there."""
    from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
    from safetensors import safe_open

    with named(path, "model", ACCEPTED, "check it"), safe_open(str(path), "pt") as file:
        second = any(key.startswith("conditioner.embedders.1.") for key in file.keys())  # noqa: SIM118
    return StableDiffusionXLPipeline if second else StableDiffusionPipeline


def _unreadable(model: str, error: Exception) -> Exception:
    reason = str(error).strip().split("\n")[0]
    return refuse("model", f"{model} ({reason})", ACCEPTED, "check it")


def load_backbone(model: str, config: LoadConfig | None = None) -> Any:
    """The UNet or transformer of :func:`load_pipeline`."""
    from .adapter import network_of

    return network_of(load_pipeline(model, None, config))
