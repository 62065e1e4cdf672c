"""The embedded reference world: rendered cartoon portraits, and a small text-to-image model trained on them.

Everything about the pictures is known exactly, so each method's claim can be measured on a model that was really
trained. See ``scenes`` (who), ``render`` (pictures and ground truth), ``captions`` (words), ``plants`` (what is
memorized on purpose), ``models`` (the network), ``train`` (how it was made), ``quality`` (how good it is).
"""

from .captions import caption
from .plants import plants
from .render import KEYPOINTS, PARTS, render
from .scenes import ATTRIBUTES, sample_scenes

__all__ = [
    "ATTRIBUTES", "KEYPOINTS", "PARTS",
    "build_models", "caption", "load_portraits", "plants", "render", "sample_scenes",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """``models`` needs diffusers and transformers: imported only when asked for."""
    if name in ("build_models", "load_portraits", "Portraits"):
        from . import models

        return getattr(models, name)
    raise AttributeError(name)
