"""The embedded reference world: rendered cartoon portraits, and a small text-to-image model trained on them.

Everything about the pictures is known exactly, so each method's claim can be measured on a model that was really
trained. See ``scenes`` (who), ``render`` (pictures and ground truth), ``captions`` (words), ``plants`` (what is
memorized on purpose), ``models`` (the network), ``shipped`` (what else ships). How the model was made and how good it
is: ``vitrine.evidence.portraits``.
"""

from typing import TYPE_CHECKING, Any

from .captions import caption
from .plants import plants
from .render import KEYPOINTS, PARTS, render
from .scenes import ATTRIBUTES, sample_scenes

if TYPE_CHECKING:
    from .models import Portraits, build_models, load_portraits

__all__ = [
    "ATTRIBUTES", "KEYPOINTS", "PARTS", "Portraits",
    "build_models", "caption", "load_portraits", "plants", "render", "sample_scenes",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """``models`` needs diffusers and transformers: imported only when asked for."""
    if name in ("build_models", "load_portraits", "Portraits"):
        from . import models

        return getattr(models, name)
    raise AttributeError(name)
