"""A pipeline around another of any class, which stays that pipeline for everything else."""

from __future__ import annotations

from typing import Any

from typing_extensions import Self


class Wrapping:
    """What pipelines that wrap one share; each has its own call.

    Attributes:
        pipe: the wrapped pipeline.
    """

    pipe: Any

    def __getattr__(self, name: str) -> Any:
        """The rest is the wrapped pipeline's: saving, offloading, LoRAs, the progress bar."""
        if name == "pipe":
            raise AttributeError(name)  # while an object is copied, before it has one
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # a property that failed: its own error, not "no such name"
        return getattr(self.pipe, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """A new scheduler, network or VAE is the wrapped pipeline's."""
        pipe = self.__dict__.get("pipe")
        if name in getattr(pipe, "components", {}):
            setattr(pipe, name, value)
        else:
            super().__setattr__(name, value)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast the pipeline."""
        self.pipe.to(*args, **kwargs)
        return self
