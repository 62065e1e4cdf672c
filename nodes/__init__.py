"""ComfyUI nodes: thin. Each clones the MODEL, builds a config, calls one engine function and returns."""

from __future__ import annotations

import importlib.util

from comfy_api.latest import ComfyExtension, io

from .comfy import choices, compat_comfyui, glossary, lora, people, run_watch, similarity
from .comfy.nemo import register as register_neurons
from .comfy.node_inputs import checked
from .search_words import searchable

FAMILIES = (
    "patches", "activations", "word_map", "matching", "ranking", "control", "resolution", "w2w", "w2w_files",
    "w2w_make", "w2w_pairs", "nemo", "nemo_block", "copies", "emd", "reference",
)  # fmt: skip
"""Modules of this folder in menu order; each has a list ``NODES``."""


def _nodes() -> list[type[io.ComfyNode]]:
    present = [f for f in FAMILIES if importlib.util.find_spec(f"{__package__}.{f}")]
    return [checked(searchable(node)) for node in compat_comfyui.nodes_of(present, __package__)]


NODES: list[type[io.ComfyNode]] = _nodes()
run_watch.register()
similarity.register()
people.register()
register_neurons()
choices.register()
glossary.register()
lora.register()


class VitrineExtension(ComfyExtension):
    """What ComfyUI asks for the node list."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """All node classes of the pack."""
        return NODES
