"""Flux.2 Klein, tiny, in both libraries: no guidance."""

from vitrine_tests.families import flux2
from vitrine_tests.families.flux2 import CHANNELS, CONFIG_KEYS, EPS, MODEL, SIZE, run  # noqa: F401
from vitrine_tests.families.twin import condition, text_states


def diffusers(seed=0):
    return flux2.diffusers(seed, guidance=False)


def comfyui(ops):
    return flux2.comfyui(ops, guidance=False)


def prompt(g, rows=2):
    return condition(text_states(g, rows, 7, 20))
