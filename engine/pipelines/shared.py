"""What our pipelines share: one adapter of the pipeline, refusal of arguments, and models that are freed after use."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import DiffusionPipeline, ModelMixin

from ..diffusion.denoiser import Denoiser, check_finite, weights_state
from ..diffusion.schedule import refuse_table_on_flow
from ..errors import refuse
from .adapter import Adapter
from .loading import read_single_file


class SharedPipeline:
    """Base of the pipelines: of those that are diffusers pipelines, and of those around another."""

    _meaningless: ClassVar[Mapping[str, str]] = {}
    """Arguments of the stock pipelines that have no meaning here, and why."""
    _choices: ClassVar[tuple[str, ...]] = ()
    """Arguments of ``from_pipe`` that ``from_pretrained`` takes as well."""
    _finite: dict[str, int]

    @property
    def _adapter(self) -> Adapter:
        """Of the wrapped pipeline, or of this one."""
        return Adapter(vars(self).get("pipe", self))

    @property
    def _network(self) -> ModelMixin:
        """The UNet or transformer."""
        return self._adapter.network

    def _denoiser(self) -> Denoiser:
        return self._adapter.denoiser()

    def _refuse_arguments(self, unknown: Mapping[str, Any], accepted: Iterable[str] = ()) -> None:
        """An argument that cannot be honoured must not be swallowed.

        Args:
            accepted: names that the method takes beyond those of its signature.
        """
        if unknown:
            names, calls = sorted(unknown), [vars(c)["__call__"] for c in type(self).__mro__ if "__call__" in vars(c)]
            ours = [c for c in calls if c.__module__.startswith(__name__.rsplit(".", 1)[0])]
            parameters = [p for call in ours for p in inspect.signature(call).parameters.values()]
            kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
            known = [p.name for p in parameters if p.kind not in kinds and p.name != "self"]
            reasons = dict.fromkeys(self._meaningless[name] for name in names if name in self._meaningless)
            remedy = "; ".join(reasons) or "see the docstring"
            raise refuse("arguments", names, [*known, *accepted], remedy)

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, *settings: Any, **named: Any) -> Any:
        """A pipeline of this class from another that is loaded."""
        raise NotImplementedError

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *settings: Any, **kwargs: Any) -> Any:
        """What :meth:`from_pipe` makes of the pipeline of a folder or hub repository.

        diffusers' own would read SDXL as Stable Diffusion, without its second text encoder.

        Args:
            settings: as ``from_pipe`` takes them after the pipeline.
            kwargs: as ``DiffusionPipeline.from_pretrained`` takes them, and ``from_pipe``'s own.
        """
        ours = {name: kwargs.pop(name) for name in cls._choices if name in kwargs}
        pipeline = DiffusionPipeline.from_pretrained(pretrained_model_name_or_path, **kwargs)
        return cls.from_pipe(pipeline, *settings, **ours)

    @classmethod
    def from_single_file(cls, path: str | Path, *settings: Any, **kwargs: Any) -> Any:
        """A pipeline of this class, or its form for SDXL, from one safetensors file in the layout of the authors.

        Args:
            settings: as ``from_pipe`` takes them after the pipeline.
            kwargs: as ``from_single_file`` of the stock pipeline takes them: ``torch_dtype``, ``config`` ...
        """
        return cls.from_pipe(read_single_file(Path(path), **kwargs), *settings)

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Around the body of every public method: offloaded models go back at its end, also after an interruption."""
        pipe = self._adapter.pipe
        refuse_table_on_flow(pipe.scheduler, self._network)
        try:
            yield
        finally:
            pipe.maybe_free_model_hooks()

    def _refuse_broken_weights(self) -> None:
        """Read the weights of all networks for NaN, once until something writes to them."""
        finite = self.__dict__.setdefault("_finite", {})
        for name in ("unet", "transformer", "vae", "text_encoder", "text_encoder_2"):
            module = getattr(self._adapter.pipe, name, None)
            if not isinstance(module, torch.nn.Module):
                continue
            state = weights_state(module)
            if finite.get(name) != state:
                check_finite(module, name)
                finite[name] = state
