"""The components of a pipeline as inputs of a job that resumes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

UNREAD = ("unet", "transformer", "safety_checker", "feature_extractor", "image_encoder")
"""Components that a job on activations names otherwise, or that none of them depends on."""
_TEXT = ("text_encoder", "tokenizer")


def components_of(pipe: DiffusionPipeline, without: tuple[str, ...] = ()) -> dict[str, object]:
    """Name -> network, scheduler, tokenizer or processor, and the pipeline's flags, for a ``Run``.

    Args:
        without: how the names of those begin that the job's numbers do not depend on.
    """
    parts = _parts(pipe)
    config = getattr(pipe, "config", {})
    flags = {key: value for key, value in config.items() if key not in parts and not key.startswith("_")}
    chosen = {name.replace("_", " "): part for name, part in parts.items() if not name.startswith(without or ("/",))}
    return chosen | {"pipeline": flags}


def text_parts_of(pipe: DiffusionPipeline) -> dict[str, object]:
    """Text encoders and tokenizers alone: what the states of a prompt depend on."""
    return {name.replace("_", " "): part for name, part in _parts(pipe).items() if name.startswith(_TEXT)}


def _parts(pipe: DiffusionPipeline) -> dict[str, Any]:
    """Its components that are there."""
    return {name: part for name, part in pipe.components.items() if part is not None}
