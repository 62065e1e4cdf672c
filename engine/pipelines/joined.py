"""A task's pipeline is also an instance of the pipeline that it was made from: one class of both."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from typing_extensions import Self

from ..diffusion.denoiser import Denoiser, check_finite, weights_state
from ..diffusion.schedule import refuse_table_on_flow
from ..errors import refuse
from ..families import family_of
from .adapter import Adapter, network_of, stock_of
from .conventions import inputs_of_blocks, refuse_unknown
from .loading import read_single_file

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline as _Base
    from diffusers import ModelMixin
else:
    _Base = object  # modular pipelines are no DiffusionPipeline


class TaskPipeline(_Base):
    """Base of the tasks. ``X.from_pipe(pipe)`` is an ``X`` and a ``type(pipe)``, with the same components.

    What a task does not define is the other pipeline's: saving, offloading, LoRAs, callbacks, the progress bar.
    """

    _choices: ClassVar[tuple[str, ...]] = ()
    """Arguments of ``from_pipe`` that ``from_pretrained`` takes as well."""
    _needed: ClassVar[tuple[str, ...]] = ("vae", "scheduler")
    """Components without which a pipeline is refused."""
    _samples_as_stock: ClassVar[bool] = True
    """Whether the call takes what the other pipeline's takes, and the task's own arguments beside."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if stock_of(cls) is cls:
            raise refuse("pipeline", f"{cls.__name__}(...)", f"{cls.__name__}.from_pipe(pipe)", "load a pipeline first")
        return super().__new__(cls)

    def __call__(self, *args: Any, **kwargs: Any) -> ImagePipelineOutput:
        """Sample as the other pipeline does; arguments that it does not know are refused."""
        refuse_unknown(type(self), kwargs, inputs_of_blocks(self))
        stock: Any = super().__call__
        pictures: ImagePipelineOutput = stock(*args, **kwargs)
        return pictures

    @classmethod
    def from_pipe(cls, pipeline: Any, **kwargs: Any) -> Self:
        """This task on a loaded pipeline of any class: an instance of both classes, which shares all components.

        The other pipeline stays as it is; a scheduler or network that one of both is given later is that one's alone.
        diffusers' own ``from_pipe`` casts the shared modules to float32 unless asked otherwise.

        Args:
            kwargs: components to use instead; ``torch_dtype`` casts all modules, which both pipelines share.
        """
        task: Any = next(kind for kind in cls.__mro__ if stock_of(kind) is kind)
        dtype = kwargs.pop("dtype", kwargs.pop("torch_dtype", None))
        task._check(pipeline, kwargs)
        made = copy.copy(pipeline)  # no constructor runs, so no component is left out
        stock: Any = type(pipeline)
        made.__class__ = joined(task, stock)
        if kwargs:
            made.register_modules(**kwargs)
        return made if dtype is None else made.to(dtype)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *settings: Any, **kwargs: Any) -> Any:
        """What :meth:`from_pipe` makes of the pipeline of a folder or hub repository.

        Args:
            settings: as ``from_pipe`` takes them after the pipeline.
            kwargs: as ``DiffusionPipeline.from_pretrained`` takes them, and ``from_pipe``'s own.
        """
        ours = {name: kwargs.pop(name) for name in cls._choices if name in kwargs}
        pipeline = DiffusionPipeline.from_pretrained(pretrained_model_name_or_path, **kwargs)
        return cls.from_pipe(pipeline, *settings, **ours)

    @classmethod
    def from_single_file(cls, path: str | Path, *settings: Any, **kwargs: Any) -> Any:
        """What :meth:`from_pipe` makes of the pipeline in one safetensors file in the layout of the authors.

        Args:
            settings: as ``from_pipe`` takes them after the pipeline.
            kwargs: as ``from_single_file`` of the stock pipeline takes them: ``torch_dtype``, ``config`` ...
        """
        return cls.from_pipe(read_single_file(Path(path), **kwargs), *settings)

    @classmethod
    def _check(cls, pipeline: Any, components: dict[str, Any]) -> None:
        """Refuse a pipeline that the task does not fit, before anything is made."""
        lacking = [name for name in cls._needed if getattr(pipeline, name, None) is None]
        if lacking:
            shown, needed = f"{type(pipeline).__name__} without {lacking[0]}", f"one with {', '.join(cls._needed)}"
            raise refuse("pipeline", shown, needed, f"load a pipeline that {cls.__name__} fits")
        network = network_of(pipeline)
        if getattr(pipeline, "unet", None) is None and family_of(network).condition is None:
            shown = f"a pipeline of {family_of(network).name}"
            raise refuse("pipeline", shown, "one that encodes prompts", "tap_latents takes encoded text")
        if set(components) - set(pipeline.components):
            accepted = sorted(pipeline.components)
            raise refuse("arguments", sorted(components), accepted, f"{cls.__name__} takes no others")

    @property
    def _adapter(self) -> Adapter:
        return Adapter(self)

    @property
    def _network(self) -> ModelMixin:
        """The UNet or transformer."""
        return network_of(self)

    def _denoiser(self) -> Denoiser:
        return self._adapter.denoiser()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Around the body of every public method: offloaded models go back at its end, also after an interruption."""
        refuse_table_on_flow(self.scheduler, self._network)
        try:
            yield
        finally:
            self.maybe_free_model_hooks()

    def _refuse_broken_weights(self) -> None:
        """Read the weights of all networks for NaN, once until something writes to them."""
        finite: dict[str, int] = self.__dict__.setdefault("_finite", {})
        for name in ("unet", "transformer", "vae", "text_encoder", "text_encoder_2"):
            module = getattr(self, name, None)
            if not isinstance(module, torch.nn.Module):
                continue
            state = weights_state(module)
            if finite.get(name) != state:
                check_finite(module, name)
                finite[name] = state

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # a property that failed: its own error, not "no such name"
        return super().__getattr__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles name the classes that a joined one is made of."""
        return _empty, _parts_of(type(self)), self.__dict__


@functools.cache
def joined(task: type[Any], stock: type[Any]) -> type:
    """The class of a task on a pipeline's class.

    It has the stock class's name: by it diffusers writes ``model_index.json`` and chooses among pipelines.
    """
    if issubclass(stock, task):
        return stock
    members = {
        "_task_class": task,
        "_stock_class": stock,
        "__module__": task.__module__,
        "__doc__": task.__doc__,
        "__qualname__": f"{task.__name__}[{stock.__qualname__}]",
    }
    inherited = task.__call__ is TaskPipeline.__call__ and issubclass(stock, TaskPipeline)
    if task._samples_as_stock and not inherited:
        members["__call__"] = _call_of(task, stock)
    return type(stock.__name__, (task, stock), members)


def _call_of(task: type[TaskPipeline], stock: type[Any]) -> Callable[..., Any]:
    """The task's call, with the signature and the help of both."""
    own: Any = task.__call__

    @functools.wraps(stock.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **kwargs)

    del call.__wrapped__  # type: ignore[attr-defined]
    theirs, ours = inspect.signature(stock.__call__), inspect.signature(own)
    added = [p for p in ours.parameters.values() if p.kind is p.KEYWORD_ONLY and p.name not in theirs.parameters]
    parameters = [*theirs.parameters.values(), *added]
    call.__signature__ = theirs.replace(  # type: ignore[attr-defined]
        parameters=sorted(parameters, key=lambda p: p.kind)
    )
    call.__doc__ = f"{inspect.getdoc(own)}\n\n{inspect.getdoc(stock.__call__) or ''}"
    return call


def _parts_of(kind: type) -> tuple[type, ...]:
    """The stock class that a joined class begins with, and the tasks in the order they were put on it."""
    if "_stock_class" not in vars(kind):
        return (kind,)
    return *_parts_of(vars(kind)["_stock_class"]), vars(kind)["_task_class"]


def _empty(stock: type, *tasks: type) -> Any:
    for task in tasks:
        stock = joined(task, stock)
    return object.__new__(stock)
