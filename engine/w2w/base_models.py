"""Which base model a LoRA was made for: what its header says, and what its layers' names and widths say."""

from __future__ import annotations

from collections.abc import Mapping

Outers = Mapping[str, tuple[int, ...]]

_TEXT_WIDTHS = {768: "Stable Diffusion 1.x", 1024: "Stable Diffusion 2.x", 2048: "SDXL", 1280: "SDXL refiner"}
"""Inputs of a UNet's cross attention."""
_TRANSFORMERS = (
    (("joint_blocks.",), 1536, "Stable Diffusion 3 / 3.5 medium"),
    (("joint_blocks.",), 2432, "Stable Diffusion 3.5 large"),
    (("double_blocks.", "single_blocks.", "single_transformer_blocks."), 3072, "Flux or Chroma"),
    (("double_blocks.", "single_blocks.", "single_transformer_blocks."), 6144, "Flux.2"),
    (("transformer_blocks.", ".attn2."), 1152, "PixArt"),
)
"""(fragments of which one or, of PixArt's, both are in a path), width, name. Published configurations of each."""
_HEADERS = ("ss_base_model_version", "modelspec.architecture", "ss_sd_model_name")


def named_base(metadata: Mapping[str, str], settings: Mapping[str, object]) -> str:
    """What a file's header or PEFT's settings call the base model, with kohya's short hash of the checkpoint; or empty.

    kohya writes ``ss_base_model_version``, ``ss_sd_model_name`` and ``ss_sd_model_hash``; ``modelspec.architecture`` is
    Stability's ModelSpec 1.0; PEFT has ``base_model_name_or_path``.
    """
    said = [str(metadata[key]) for key in _HEADERS if metadata.get(key)]
    said += [str(settings["base_model_name_or_path"])] if settings.get("base_model_name_or_path") else []
    if metadata.get("ss_sd_model_hash"):
        said.append(f"checkpoint {metadata['ss_sd_model_hash']}")
    return ", ".join(dict.fromkeys(" ".join(part.split())[:80] for part in said))


def shaped_base(outers: Outers) -> str:
    """The base model by layers' names and sizes (out, in); empty where they fit none that is known."""
    unet = any(path.startswith(("down_blocks.", "up_blocks.", "mid_block.")) for path in outers)
    if unet:
        ends = (".attn2.to_k", ".attn2.to_v")
        widths = (outer[1] for path, outer in outers.items() if path.endswith(ends))
        return next((_TEXT_WIDTHS[width] for width in widths if width in _TEXT_WIDTHS), "")
    for fragments, width, name in _TRANSFORMERS:
        every = all if name == "PixArt" else any
        if any(every(f in path for f in fragments) and width in outer for path, outer in outers.items()):
            return name
    return ""
