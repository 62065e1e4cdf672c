"""CLIP features of pictures and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import normalize

from ...engine.errors import refuse
from ...engine.io.files import named


@dataclass(frozen=True)
class Clip:
    """A CLIP, image and text side.

    Attributes:
        model: a transformers ``CLIPModel``.
        processor: its ``CLIPProcessor``.
    """

    model: Any
    processor: Any

    @classmethod
    def load(cls, folder: str) -> Clip:
        """From a transformers folder on this machine; nothing is downloaded."""
        from transformers import AutoConfig, AutoProcessor, CLIPModel

        accepted = "a transformers folder of a CLIPModel with preprocessor and tokenizer"
        remedy = "save openai/clip-vit-base-patch16, say, with save_pretrained, model and processor"
        with named(folder, "CLIP", accepted, remedy):
            kind = AutoConfig.from_pretrained(folder, local_files_only=True).model_type
            processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
            if kind != "clip" or not hasattr(processor, "tokenizer"):
                raise refuse("CLIP", f"{folder} ({kind}, {type(processor).__name__})", accepted, remedy)
            return cls(CLIPModel.from_pretrained(folder, local_files_only=True).eval(), processor)

    @torch.no_grad()
    def pictures(self, images: torch.Tensor) -> torch.Tensor:
        """(B, D) unit vectors of (B, 3, H, W) pictures in [0, 1]."""
        pixels = self.processor.image_processor(images=list(images), do_rescale=False, return_tensors="pt")
        return _unit(self.model.get_image_features(pixel_values=pixels["pixel_values"].to(self.model.device)))

    @torch.no_grad()
    def texts(self, prompts: Sequence[str]) -> torch.Tensor:
        """(B, D) unit vectors; longer prompts are truncated."""
        length = self.model.config.text_config.max_position_embeddings
        words = self.processor.tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        ).to(self.model.device)
        return _unit(self.model.get_text_features(words["input_ids"], words["attention_mask"]))


def _unit(out: Any) -> torch.Tensor:
    """Newer transformers wrap the features."""
    features = out if isinstance(out, torch.Tensor) else out.pooler_output
    return normalize(features.double(), dim=1).cpu()
