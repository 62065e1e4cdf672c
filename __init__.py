"""Vitrine: open a diffusion model like a display case.

ComfyUI's entry point, and the short imports for Python::

    from vitrine import NEMOPipeline, load_space

A short import loads its module when it is asked for: ``import vitrine`` loads neither torch nor diffusers.
ComfyUI imports this file under a name made from its absolute path; the entry point loads the same folder once more
under its real name, ``vitrine``, so that classes have one identity in both, and saved pipelines never record a path.
"""

from typing import TYPE_CHECKING, Any

WEB_DIRECTORY = "./nodes/web"

__all__ = [
    "Activations",
    "ActivationTapPipeline",
    "Calibration",
    "CheckConfig",
    "ControlConditionedPipeline",
    "CorrespondencePipeline",
    "Denoiser",
    "EMDOneStepPipeline",
    "EditConfig",
    "FewStepConfig",
    "GuidanceConfig",
    "InvertConfig",
    "NEMOPipeline",
    "PCABasis",
    "PipelineModel",
    "ProbeConfig",
    "ResolutionTransferConfig",
    "ResolutionTransferPipeline",
    "SampleConfig",
    "SearchConfig",
    "SegmentationPipeline",
    "SizeCondition",
    "VitrineError",
    "W2WPipeline",
    "copy_check",
    "load_portraits",
    "load_space",
    "lora_report",
    "materialise",
    "pca_rgb",
    "write_lora",
]

_HOMES = {
    ".engine.activations": ("Activations", "PCABasis", "pca_rgb"),
    ".engine.control": ("GuidanceConfig", "SizeCondition"),
    ".engine.diffusion.denoiser": ("Denoiser",),
    ".engine.errors": ("VitrineError",),
    ".engine.copies": ("CheckConfig", "lora_report"),
    ".engine.nemo": ("Calibration", "FewStepConfig", "ProbeConfig", "SearchConfig"),
    ".engine.portraits": ("load_portraits",),
    ".engine.resolution": ("ResolutionTransferConfig",),
    ".engine.w2w": ("EditConfig", "InvertConfig", "SampleConfig", "load_space", "materialise", "write_lora"),
}
"""Where a short name is found; every other name of ``__all__`` in ``.engine.pipelines``."""

if TYPE_CHECKING:  # the same once more, for type checkers
    from .engine.activations import Activations, PCABasis, pca_rgb
    from .engine.control import GuidanceConfig, SizeCondition
    from .engine.copies import CheckConfig, lora_report
    from .engine.diffusion.denoiser import Denoiser
    from .engine.errors import VitrineError
    from .engine.nemo import Calibration, FewStepConfig, ProbeConfig, SearchConfig
    from .engine.pipelines.activation_tap import (
        ActivationTapPipeline,
    )
    from .engine.pipelines.control import (
        ControlConditionedPipeline,
    )
    from .engine.pipelines.copies import PipelineModel, copy_check
    from .engine.pipelines.emd import EMDOneStepPipeline
    from .engine.pipelines.matching import (
        CorrespondencePipeline,
        SegmentationPipeline,
    )
    from .engine.pipelines.nemo import NEMOPipeline
    from .engine.pipelines.resolution import ResolutionTransferPipeline
    from .engine.pipelines.w2w import W2WPipeline
    from .engine.portraits import load_portraits
    from .engine.resolution import ResolutionTransferConfig
    from .engine.w2w import EditConfig, InvertConfig, SampleConfig, load_space, materialise, write_lora


def __getattr__(name: str) -> Any:
    """A short import (PEP 562). Under the name that ComfyUI makes there are none: they would be second copies."""
    if __name__ != "vitrine" or name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    home = next((home for home, names in _HOMES.items() if name in names), ".engine.pipelines")
    try:
        globals()[name] = value = getattr(importlib.import_module(home, __name__), name)
    except ModuleNotFoundError as error:
        raise _with_remedy(name, error) from error
    return value


def _with_remedy(name: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error with what to install, if a library is missing; a missing module of this package stays as it is."""
    if (error.name or "vitrine").split(".")[0] == "vitrine":
        return error
    from .engine.io import packages

    remedy = packages.install("diffusers", "torch")
    return ModuleNotFoundError(f"vitrine.{name} needs {error.name}, which is not installed: {remedy}", name=error.name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__}) if __name__ == "vitrine" else sorted(globals())


def _another_project() -> str | None:
    """Where the distribution ``vitrine`` is installed: another project, with the same import name and command.

    Folders are listed for it: the import of ``importlib.metadata`` alone takes 40 ms.
    """
    import os
    import sys

    for folder in sys.path:
        try:
            entries = os.listdir(folder or os.curdir)
        except OSError:  # a folder that is gone, or a zip file
            continue
        for entry in entries:
            if entry.lower().startswith("vitrine-") and entry.endswith((".dist-info", ".egg-info")):
                path = os.path.join(folder, entry)
                if not _is_ours(path):
                    return path
    return None


def _is_ours(distribution: str) -> bool:
    """Whether a distribution called ``vitrine`` is this project, installed before it was called vitrine-diffusion."""
    import os

    try:
        with open(os.path.join(distribution, "entry_points.txt"), encoding="utf-8") as file:
            return "vitrine.cli.main" in file.read()
    except (OSError, UnicodeDecodeError):
        return False


def _warn_of_another_project() -> None:
    where = _another_project()
    if where is not None:
        import logging

        logging.getLogger("vitrine").warning(
            "another project is installed under the name 'vitrine': %s. It has the same import name and command as "
            "this one, vitrine-diffusion, so either can take the other's place. Use two environments, or run "
            "'pip uninstall vitrine' and then install vitrine-diffusion again.",
            where,
        )


def _under_its_own_name():
    """Import ``vitrine.nodes`` from this very folder, whatever other copy was imported before."""
    import importlib
    import importlib.util
    import logging
    import os
    import sys

    here = os.path.dirname(os.path.abspath(__file__))
    known = getattr(sys.modules.get("vitrine"), "__file__", None) or os.devnull
    if os.path.realpath(os.path.dirname(known)) != os.path.realpath(here):
        others = [name for name in sys.modules if name.startswith("vitrine.")]
        for name in others:
            del sys.modules[name]  # half of each copy would be worse than either
        if others:
            logging.getLogger("vitrine").warning("%s was imported before; from now on it is %s", known, here)
        path = os.path.join(here, "__init__.py")
        spec = importlib.util.spec_from_file_location("vitrine", path, submodule_search_locations=[here])
        sys.modules["vitrine"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["vitrine"])
    return importlib.import_module("vitrine.nodes")


async def comfy_entrypoint():
    """ComfyUI's V3 entry point. ComfyUI logs a failure as one line, so the traceback is logged here."""
    import logging

    try:
        return _under_its_own_name().VitrineExtension()
    except Exception:
        logging.getLogger("vitrine").exception("Vitrine could not be loaded")
        raise


if __name__ == "vitrine":
    _warn_of_another_project()
