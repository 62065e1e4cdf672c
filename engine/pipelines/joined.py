"""A task's pipeline is also an instance of the pipeline that it was made from: one class of both."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import Self

from ..errors import refuse
from ..families import family_of
from .adapter import network_of, stock_of
from .shared import SharedPipeline
from .wrapping import whole

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline as _Base
else:
    _Base = object  # modular pipelines are no DiffusionPipeline


class TaskPipeline(SharedPipeline, _Base):  # type: ignore[misc] # ours come before diffusers' own
    """Base of the tasks. ``X.from_pipe(pipe)`` is an ``X`` and a ``type(pipe)``, with the same components.

    What a task does not define is the other pipeline's: saving, offloading, LoRAs, callbacks, the progress bar.
    """

    _needed: ClassVar[tuple[str, ...]] = ("vae", "scheduler")
    """Components without which a pipeline is refused."""
    _samples_as_stock: ClassVar[bool] = True
    """Whether the call takes what the other pipeline's takes, and the task's own arguments beside."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if stock_of(cls) is cls:
            raise refuse("pipeline", f"{cls.__name__}(...)", f"{cls.__name__}.from_pipe(pipe)", "load a pipeline first")
        return super().__new__(cls)

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
        pipeline = whole(pipeline)
        task._check(pipeline, kwargs)
        made = copy.copy(pipeline)  # no constructor runs, so no component is left out
        stock: Any = type(pipeline)
        made.__class__ = joined(task, stock)
        if kwargs:
            made.register_modules(**kwargs)
        return made if dtype is None else made.to(dtype)

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

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # a property that failed: its own error, not "no such name"
        return super().__getattr__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles name the classes that a joined one is made of."""
        return _empty, _parts_of(type(self)), self.__dict__


@functools.cache
def joined(task: type, stock: type) -> type:
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
    if task._samples_as_stock:  # type: ignore[attr-defined]
        members["__call__"] = _call_of(task, stock)
    return type(stock.__name__, (task, stock), members)


def _call_of(task: type, stock: type) -> Callable[..., Any]:
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
