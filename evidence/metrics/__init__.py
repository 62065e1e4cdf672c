"""Metrics shared by several evidence packages."""

from ...engine.diffusion.coverage import precision_recall
from .copies import copy_figures
from .detail import fine_detail
from .frechet import frechet_distance

__all__ = ["copy_figures", "fine_detail", "frechet_distance", "precision_recall"]
