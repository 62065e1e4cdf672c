"""A full-size checkpoint in real ComfyUI, as core's Load Checkpoint gives it, and what the nodes' cases share."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from vitrine_tests.full_size.material import checkpoint, loras, pictures

PROMPT = "a photo of a smiling face with red hair"
CAPTIONS = "a smiling face\na pale face\na dark face on pink\nlong hair"
VALUES = "down-level1-repeat0-vit-block0-cross-v"
PLACE = "up-level1-repeat0-vit-block0-cross-q"
STUDENT = {"sd15": "DMD2 SD1.5", "sdxl": "DMD2 SDXL 1-step (UNet)"}
SELECTION = {"sd15": "Ours-v1.5", "sdxl": "Ours-XL"}


class Scene:
    """A checkpoint as Load Checkpoint gives it, and what the cases share."""

    def __init__(self, comfy: Any, family: str, folder: Path, side: int) -> None:
        import folder_paths

        self.comfy, self.family, self.folder, self.side = comfy, family, folder, side
        folder_paths.add_model_folder_path("checkpoints", str(checkpoint(family).parent))
        folder_paths.add_model_folder_path("loras", str(folder / "loras"))
        loras(family, folder / "loras" / f"people-{family}")
        folder_paths.filename_list_cache.clear()
        self.checkpoint = checkpoint(family).name
        self.model, self.clip, self.vae = self.core("CheckpointLoaderSimple", ckpt_name=self.checkpoint)
        self.positive, self.negative = (self.core("CLIPTextEncode", clip=self.clip, text=t)[0] for t in (PROMPT, ""))
        self.images, self.masks = pictures(4, side)

    def core(self, node_id: str, **inputs: Any) -> Any:
        """Execute one of core's nodes."""
        node = self.comfy.nodes.NODE_CLASS_MAPPINGS[node_id]()
        with torch.inference_mode():
            return getattr(node, node.FUNCTION)(**inputs)

    def call(self, node_id: str, **inputs: Any) -> Any:
        """Execute one of the pack's nodes; what is not given has the default that the page shows."""
        schema = self.comfy.nodes.NODE_CLASS_MAPPINGS[node_id].define_schema()
        given = {}
        for i in schema.inputs:
            default = getattr(i, "default", None)
            options = [
                o for o in getattr(i, "options", None) or () if isinstance(o, str)
            ]  # others begin with the first
            if not i.optional and (default is not None or options):
                given[i.id] = options[0] if default is None else default
        return self.comfy.call(node_id, **given | inputs)

    def latent(self, batch: int = 1, side: int | None = None) -> dict:
        """Of Empty Latent Image; by default of the scene's own side."""
        side = self.side if side is None else side
        return self.core("EmptyLatentImage", width=side, height=side, batch_size=batch)[0]

    def sampled(self, model: Any, positive: Any = None) -> dict:
        """Core KSampler, two steps with guidance."""
        told = {"seed": 5, "steps": 2, "cfg": 3.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}
        conds = {"positive": positive or self.positive, "negative": self.negative}
        return self.core("KSampler", model=model, **conds, latent_image=self.latent(), **told)[0]

    # --- made once ------------------------------------------------------------------------------------------------
    @functools.cached_property
    def taps(self) -> Any:
        told = {"image": self.images[:2], "positive": self.positive, "selection": SELECTION[self.family]}
        return self.call("VitrineActivationTap", model=self.model, vae=self.vae, **told)
