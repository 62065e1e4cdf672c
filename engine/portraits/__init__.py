"""The embedded toy dataset: rendered cartoon portraits, and small text-to-image models trained on them.

Everything about the images is known exactly, so each method's claim can be measured on a trained model. See ``scenes``
(attributes), ``render`` (images and ground truth), ``captions``, ``plants`` (memorized duplicates), ``models`` (the
network), ``shipped`` (further shipped files). Training and quality of the model: ``vitrine.evidence.portraits``.
"""

from typing import TYPE_CHECKING, Any

from .captions import caption
from .plants import plants
from .render import KEYPOINTS, PARTS, render
from .scenes import ATTRIBUTES, sample_scenes

if TYPE_CHECKING:
    from .models import Portraits, build_models, load_portraits

__all__ = [
    "ATTRIBUTES",
    "KEYPOINTS",
    "PARTS",
    "Portraits",
    "build_models",
    "caption",
    "load_portraits",
    "plants",
    "render",
    "sample_scenes",
]


def __getattr__(name: str) -> Any:
    """Imports ``models``, which needs diffusers and transformers, on demand."""
    if name in ("build_models", "load_portraits", "Portraits"):
        from . import models

        return getattr(models, name)
    raise AttributeError(name)
