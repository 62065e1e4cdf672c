"""Vitrine: open a diffusion model like a display case."""
