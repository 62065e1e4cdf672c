"""Measures shared by the methods."""

from .frechet import frechet_distance

__all__ = ["frechet_distance"]
