"""What our diffusers pipelines share: they are made from a loaded pipeline without changing it, and free its models."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import DiffusionPipeline, ModelMixin
from typing_extensions import Self

from ..diffusion.denoiser import check_finite, weights_state
from ..diffusion.schedule import refuse_table_on_flow
from ..errors import refuse
from .loading import read_single_file
from .prompt_encoding import reads_sizes

_OFFLOADING = ("_all_hooks", "_offload_device", "_offload_gpu_id")


class SharedPipeline(DiffusionPipeline):
    """Base of the pipelines; comes first among a class's bases."""

    _meaningless: ClassVar[Mapping[str, str]] = {}
    """Arguments of the stock pipelines that have no meaning here, and why."""
    _stock: ClassVar[str | None] = None
    """Name of the diffusers class whose parts these are, where it is not a base."""
    _choices: ClassVar[tuple[str, ...]] = ()
    """Arguments of ``from_pipe`` beyond components and settings of ``__init__``."""
    _finite: dict[str, int]

    def to_json_string(self) -> str:
        """diffusers' index of what is saved, with the stock class's name: a saved folder loads without this package."""
        index = json.loads(super().to_json_string())
        bases = (base for base in type(self).__mro__ if base.__module__.startswith("diffusers.pipelines."))
        index["_class_name"] = self._stock or next(bases).__name__
        return json.dumps(index, indent=2, sort_keys=True) + "\n"

    def _refuse_arguments(self, unknown: Mapping[str, Any], accepted: Iterable[str] = ()) -> None:
        """An argument that cannot be honoured must not be swallowed.

        Args:
            accepted: names that the method takes beyond those of its signature.
        """
        if unknown:
            names, calls = sorted(unknown), [vars(c)["__call__"] for c in type(self).__mro__ if "__call__" in vars(c)]
            ours = [c for c in calls if c.__module__.startswith(__name__.rsplit(".", 1)[0])]
            parameters = [p for call in ours for p in inspect.signature(call).parameters.values()]
            known = [p.name for p in parameters if p.kind != p.VAR_KEYWORD and p.name != "self"]
            reasons = dict.fromkeys(self._meaningless[name] for name in names if name in self._meaningless)
            remedy = "; ".join(reasons) or "see the docstring"
            raise refuse("arguments", names, [*known, *accepted], remedy)

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs: Any) -> Self:
        """A pipeline of this class around the components of another, each as it is: same object, dtype and device.

        diffusers' own ``from_pipe`` casts the shared modules to float32 unless told otherwise, and so changes the
        pipeline they came from.

        Args:
            kwargs: components or settings of ``__init__`` to use instead; ``torch_dtype`` casts all modules, which the
                other pipeline then shares.

        Raises:
            VitrineError: If the other pipeline lacks a component, has one of another class, or a text encoder that
                this class would leave out.
        """
        pipeline, dtype = whole(pipeline), kwargs.pop("dtype", kwargs.pop("torch_dtype", None))
        modules, settings = map(set, cls._get_signature_keys(cls))
        source = {**pipeline.components, **{k: v for k, v in pipeline.config.items() if k in settings}}
        chosen = {k: v for k, v in source.items() if k in modules | settings} | kwargs
        cls._refuse_strangers(type(pipeline).__name__, chosen, modules)
        cls._refuse_larger(pipeline, modules)
        made = cls(**{name: None for name in cls._optional_components if name in modules} | chosen)
        if pipeline.config.get("_name_or_path") is not None:
            made.register_to_config(_name_or_path=pipeline.config["_name_or_path"])
        for name in _OFFLOADING:  # hooks sit on the modules; who frees them must know of them
            if hasattr(pipeline, name):
                setattr(made, name, getattr(pipeline, name))
        return made if dtype is None else made.to(dtype)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """What :meth:`from_pipe` makes of the pipeline of a folder or hub repository.

        diffusers' own would read SDXL as Stable Diffusion, without its second text encoder.

        Args:
            kwargs: as ``DiffusionPipeline.from_pretrained`` takes them, and ``from_pipe``'s own.

        Raises:
            VitrineError: As :meth:`from_pipe`.
        """
        ours = {name: kwargs.pop(name) for name in cls._choices if name in kwargs}
        return cls.from_pipe(DiffusionPipeline.from_pretrained(pretrained_model_name_or_path, **kwargs), **ours)

    @classmethod
    def from_single_file(cls, path: str | Path, **kwargs: Any) -> Self:
        """A pipeline of this class, or its form for SDXL, from one safetensors file in the layout of the authors.

        Args:
            kwargs: as ``from_single_file`` of the stock pipeline takes them: ``torch_dtype``, ``config`` ...

        Raises:
            VitrineError: If it is no safetensors file of Stable Diffusion or SDXL, or none that this class fits.
        """
        pipe: Self = read_single_file(Path(path), cls, **kwargs)
        return pipe

    @classmethod
    def _refuse_strangers(cls, name: str, chosen: dict[str, Any], modules: set[str]) -> None:
        kinds, parameters = cls._get_signature_types(), inspect.signature(cls.__init__).parameters
        if "text_encoder_2" in modules and chosen.get("unet") is not None and not reads_sizes(chosen["unet"]):
            raise refuse("pipeline", name, "one of SDXL", f"{cls.__name__} is for another model family")
        for key in sorted(modules):
            value, optional = chosen.get(key), parameters[key].default is not inspect.Parameter.empty
            if value is None and not optional and key not in cls._optional_components:
                accepted = f"a pipeline with {', '.join(sorted(modules - set(cls._optional_components)))}"
                raise refuse("pipeline", f"{name} without {key}", accepted, f"load a pipeline that {cls.__name__} fits")
            expected = [k for k in kinds.get(key, ()) if isinstance(k, type)]
            if isinstance(value, ModelMixin) and expected and not isinstance(value, tuple(expected)):
                wanted = " or ".join(k.__name__ for k in expected)
                raise refuse(key, type(value).__name__, wanted, f"{cls.__name__} is for another model family")

    @classmethod
    def _refuse_larger(cls, pipeline: DiffusionPipeline, modules: set[str]) -> None:
        """SDXL instead of Stable Diffusion: the parts fit, but its network waits for what the second encoder says."""
        parts = pipeline.components
        left = sorted(k for k in set(parts) - modules if k.startswith("text_encoder") and parts[k] is not None)
        if left and "text_encoder" in modules:
            shown = f"{type(pipeline).__name__} with {', '.join(left)}"
            accepted = "a pipeline with one text encoder"
            raise refuse("pipeline", shown, accepted, f"{cls.__name__} is for another model family")

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Around the body of every public method: offloaded models go back at its end, also after an interruption.

        Raises:
            VitrineError: If the scheduler is over a table of betas, and the model is a flow.
        """
        unet = getattr(self, "unet", None)
        refuse_table_on_flow(self.scheduler, getattr(self, "transformer", None) if unet is None else unet)
        try:
            yield
        finally:
            self.maybe_free_model_hooks()

    def _refuse_broken_weights(self, *names: str) -> None:
        """Read the weights of components for NaN, once until something writes to them.

        Raises:
            VitrineError: As :func:`~vitrine.engine.diffusion.denoiser.check_finite`.
        """
        finite = self.__dict__.setdefault("_finite", {})
        for name in names:
            module = getattr(self, name, None)
            if not isinstance(module, torch.nn.Module):
                continue
            state = weights_state(module)
            if finite.get(name) != state:
                check_finite(module, name)
                finite[name] = state


def whole(pipeline: DiffusionPipeline) -> DiffusionPipeline:
    """The pipeline with all its parts: of one that was put around another, that other."""
    source: DiffusionPipeline = vars(pipeline).get("source", pipeline)
    return source


def native_size(network: Any, vae: Any, factor: int, step: int) -> tuple[int, int]:
    """(height, width) in pixels of the pictures that a network was trained on.

    Networks with rotary positions name no size, and their pipelines generate 1024 pixels whatever they were trained on:
    theirs is the autoencoder's.

    Args:
        factor: pixels for each latent position.
        step: what divides the sides.
    """
    side = network.config.get("sample_size")
    pixels = vae.config.get("sample_size") or 1024 if side is None else side
    height, width = (pixels, pixels) if isinstance(pixels, int) else list(pixels)[-2:]
    scale = 1 if side is None else factor
    return max(1, height * scale // step) * step, max(1, width * scale // step) * step
