"""Measures shared by the methods."""

from .copies import copy_figures, load_clip, load_sscd
from .coverage import precision_recall
from .frechet import frechet_distance

__all__ = ["copy_figures", "frechet_distance", "load_clip", "load_sscd", "precision_recall"]
