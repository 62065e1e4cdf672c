"""The many spellings of one LoRA tensor, and the one name used inside: the module path of a diffusers UNet.

Read: kohya (``lora_unet_..``), ComfyUI (``diffusion_model..``), PEFT (``base_model.model..``), diffusers old
(``..processor.to_q_lora..``) and new (``unet...lora_A..``), and the published w2w export (``.lora_A.identity1.weight``,
which PEFT silently ignores under any other adapter name).
"""

from __future__ import annotations

import re
from typing import NamedTuple

_ROLES = (
    ("down", re.compile(r"(?:\.lora_down|\.lora\.down|_lora\.down|\.lora_linear_layer\.down)\.weight$")),
    ("up", re.compile(r"(?:\.lora_up|\.lora\.up|_lora\.up|\.lora_linear_layer\.up)\.weight$")),
    ("down", re.compile(r"\.lora_A(?P<adapter>\.(?!weight$)[^.]+)?(?:\.weight)?$")),
    ("up", re.compile(r"\.lora_B(?P<adapter>\.(?!weight$)[^.]+)?(?:\.weight)?$")),
    ("alpha", re.compile(r"(?:_lora)?\.alpha$")),
)
_OTHER_KINDS = {
    "hada_": "LoHa", "lokr_": "LoKr", "dora_scale": "DoRA", "lora_magnitude_vector": "DoRA", "oft_": "OFT",
    "lora_mid": "LoCon with a middle factor", ".diff": "a full difference",
}  # fmt: skip
_TEXT = re.compile(r"^(lora_te\d?_|text_encoder(_\d)?\.|te\d?\.|cond_stage_model\.)")

# Module names that contain an underscore themselves; every other underscore of a kohya name separates modules.
_WORDS = [
    "down_blocks", "up_blocks", "mid_block", "transformer_blocks", "to_q", "to_k", "to_v", "to_out", "proj_in",
    "proj_out", "time_emb_proj", "conv_in", "conv_out", "conv_shortcut", "time_embedding", "add_embedding",
    "linear_1", "linear_2", "input_blocks", "output_blocks", "middle_block", "in_layers", "out_layers", "emb_layers",
    "skip_connection", "time_embed", "label_emb", "to_add_out", "add_q_proj", "add_k_proj", "add_v_proj",
    "single_transformer_blocks", "ff_context", "double_blocks", "single_blocks", "img_attn", "txt_attn", "img_mlp",
    "txt_mlp",
]  # fmt: skip
_TOKENS = re.compile("|".join(rf"{w}(?=_|$)" for w in sorted(_WORDS, key=len, reverse=True)) + "|[A-Za-z0-9]+")


class Key(NamedTuple):
    """One key of a LoRA file: module path, ``down | up | alpha``, spelling, and whether it belongs to the UNet."""

    path: str
    role: str
    dialect: str
    unet: bool


def parse(key: str, layers_per_block: int = 2) -> Key | None:
    """A key's meaning, or None if it is not a LoRA tensor. ``layers_per_block`` is the UNet's, for ldm names only."""
    for role, pattern in _ROLES:
        match = pattern.search(key)
        if match:
            adapter = (match.groupdict().get("adapter") or "").strip(".")
            stem, dialect = _bare(key[: match.start()], adapter)
            return Key(canonical(stem, layers_per_block), role, dialect, _TEXT.match(key) is None)
    return None


def other_kind(key: str) -> str | None:
    """The kind of adapter this key belongs to, if that is not a plain LoRA."""
    return next((kind for mark, kind in _OTHER_KINDS.items() if mark in key), None)


def _bare(stem: str, adapter: str) -> tuple[str, str]:
    """A name without its prefix, and its spelling."""
    if stem.startswith(("lora_unet_", "lycoris_")):
        return ".".join(_TOKENS.findall(_strip(_strip(stem, "lora_unet_"), "lycoris_"))), "kohya"
    if stem.startswith("diffusion_model."):
        return stem[16:], "ComfyUI"
    if stem.startswith("base_model.model."):
        return _strip(stem[17:], "unet."), f"w2w ({adapter})" if adapter not in ("", "default") else "PEFT"
    if ".processor." in stem:
        return re.sub(r"\.to_out$", ".to_out.0", _strip(stem, "unet.").replace(".processor.", ".")), "diffusers old"
    return _strip(_strip(stem, "unet."), "transformer."), "diffusers"


def _strip(text: str, prefix: str) -> str:
    return text[len(prefix) :] if text.startswith(prefix) else text


_RESNET = {"in_layers.2": "conv1", "out_layers.3": "conv2", "emb_layers.1": "time_emb_proj"}
_RESNET["skip_connection"] = "conv_shortcut"
_EDGES = {
    "time_embed.0": "time_embedding.linear_1", "time_embed.2": "time_embedding.linear_2", "input_blocks.0.0": "conv_in",
    "label_emb.0.0": "add_embedding.linear_1", "label_emb.0.2": "add_embedding.linear_2", "out.2": "conv_out",
}  # fmt: skip


def canonical(path: str, layers: int = 2) -> str:
    """ldm module names in diffusers' words; other names as they are.

    A level has ``layers`` repeats on the way down and one more on the way up.
    """
    if path in _EDGES:
        return _EDGES[path]
    match = re.match(r"(input_blocks|output_blocks|middle_block)\.(\d+)(?:\.(\d+))?\.?(.*)$", path)
    if not match:
        return path
    stage, n = match[1], int(match[2])
    if stage == "middle_block":
        return _child("mid_block", n // 2, n % 2 == 1, ".".join(filter(None, match.group(3, 4))))
    child, tail = int(match[3] or 0), match[4]
    level, repeat = divmod(n - 1 if stage == "input_blocks" else n, layers + 1)
    block = f"{'down' if stage == 'input_blocks' else 'up'}_blocks.{level}"
    if tail == "op":
        return f"{block}.downsamplers.0.conv"
    if tail == "conv":
        return f"{block}.upsamplers.0.conv"
    return _child(block, repeat, child == 1, tail)


def _child(block: str, index: int, attention: bool, tail: str) -> str:
    return f"{block}.attentions.{index}.{tail}" if attention else f"{block}.resnets.{index}.{_RESNET.get(tail, tail)}"
