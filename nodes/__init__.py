"""ComfyUI nodes: thin. Each clones the MODEL, builds a config, calls one engine function and returns."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from . import activations, reference

NODES: list[type[io.ComfyNode]] = [*reference.NODES, *activations.NODES]


class VitrineExtension(ComfyExtension):
    """What ComfyUI asks for the node list."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """All node classes of the pack."""
        return NODES
