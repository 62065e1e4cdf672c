"""Keys by number (``unet:0:up``), as the first LoRA trainer for Stable Diffusion wrote them.

Number n is the n-th linear layer below the attention and GEGLU modules of a UNet, in the order of its modules: down
blocks, up blocks, then the middle block. Until 2023 diffusers' transformer blocks had their feed-forward layer between
the two attentions, later after them. Its output is wider than all others, so the shapes say which order a file has;
they are compared with the UNet of Stable Diffusion 1 and 2 layer by layer. A file that does not fit is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from ...errors import refuse
from ...io.number_checks import LARGEST_RANK, integer

Shapes = Mapping[str, tuple[int, ...]]
DIALECT = "numbers"
_KEY = re.compile(r"(unet|text_encoder):(\d{1,4}):(up|down)")
_EMBEDDING = re.compile(r"<[^>]*>")
_SPELLED = {"up": "lora_B.weight", "down": "lora_A.weight"}
_BLOCKS = (
    *((f"down_blocks.{level}.attentions.{n}", 320 << level) for level in range(3) for n in range(2)),
    *((f"up_blocks.{level}.attentions.{n}", 1280 >> (level - 1)) for level in range(1, 4) for n in range(3)),
    ("mid_block.attentions.0", 1280),
)
"""Transformers of the UNet of Stable Diffusion 1 and 2, in the order of its modules, and their widths."""
_PARTS = (("attn1", "ff", "attn2"), ("attn1", "attn2", "ff"), ("attn1", "attn2"))
"""Orders of a transformer block's parts: of diffusers until 2023, of later ones, and without GEGLU."""
_PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")
_TEXT = ("k_proj", "v_proj", "q_proj", "out_proj")
"""Linear layers of an attention, in the order of its modules: of diffusers, and of a CLIP text encoder."""
_CONTEXTS = (768, 1024)
"""Widths of the text states of Stable Diffusion 1 and 2."""
_REMEDY = "the order says its layers: load it with lora_diffusion, save it by name"


def layers_in_order(parts: tuple[str, ...], context: int) -> list[tuple[str, tuple[int, int]]]:
    """(module, (out, in)) of every layer, in the order of its number.

    Args:
        parts: of a transformer block, in their order.
        context: width of the text states.
    """
    layers = []
    for block, width in _BLOCKS:
        for part in parts:
            stem = f"{block}.transformer_blocks.0.{part}"
            if part == "ff":
                layers.append((f"{stem}.net.0.proj", (8 * width, width)))
                continue
            for name in _PROJECTIONS:
                text = part == "attn2" and name in ("to_k", "to_v")
                layers.append((f"{stem}.{name}", (width, context if text else width)))
    return layers


def names_of_numbers(file: str, shapes: Shapes, header: Mapping[str, str]) -> dict[str, str]:
    """Key -> the same key in PEFT's names; empty for a file that has no keys by number.

    Args:
        file: name of the file, for messages.
        header: the file's texts, which may have ranks and classes of modules.
    """
    numbered = {key: match for key in shapes if (match := _KEY.fullmatch(key))}
    if not numbered:
        return {}
    sizes: dict[str, dict[int, tuple[int, int]]] = {"unet": {}, "text_encoder": {}}
    for match in numbered.values():
        part, number = match[1], int(match[2])
        sizes[part][number] = _size(file, shapes, header, f"{part}:{number}")
    modules = {"unet": _unet_layers(file, sizes["unet"], header), "text_encoder": _text_layers(sizes["text_encoder"])}
    for part, layers in modules.items():
        if len(sizes[part]) != len(layers):
            shown = f"{file} with {len(sizes[part])} numbers of {part}"
            raise refuse("LoRA file", shown, "those of all its layers", _REMEDY)
    names = {key: f"{m[1]}.{modules[m[1]][int(m[2])]}.{_SPELLED[m[3]]}" for key, m in numbered.items()}
    return names | {key: f"bundle_emb.{key}" for key in shapes if _EMBEDDING.fullmatch(key)}


def _size(file: str, shapes: Shapes, header: Mapping[str, str], stem: str) -> tuple[int, int]:
    """(out, in) of a layer, whose two factors and rank belong together."""
    up, down = (shapes.get(f"{stem}:{side}", ()) for side in ("up", "down"))
    if len(up) != 2 or len(down) != 2 or up[1] != down[0]:
        shown = f"{file}: {stem} has factors {down} and {up}"
        raise refuse("LoRA file", shown, "(r, in), (out, r) of a linear layer", _REMEDY)
    said = header.get(f"{stem}:rank")
    if said is not None:
        rank = integer(int(said) if said.isdecimal() and len(said) < 8 else said, f"rank of {stem}", 1, LARGEST_RANK)
        if rank != down[0]:
            shown = f"{file}: {stem} of rank {down[0]}, in its header {rank}"
            raise refuse("LoRA file", shown, "one rank", "download it again")
    return up[0], down[1]


def _unet_layers(file: str, sizes: Mapping[int, tuple[int, int]], header: Mapping[str, str]) -> list[str]:
    """The UNet's modules by number: of the only order whose shapes the file has."""
    if not sizes:
        return []
    for parts in _PARTS:
        for context in _CONTEXTS:
            layers = layers_in_order(parts, context)
            if sizes == {number: size for number, (_, size) in enumerate(layers)}:
                return [name for name, _ in layers]
    classes = header.get("unet", "")[:120]
    below = f" below {', '.join(_classes(classes))}" if classes else ""
    shown = f"{file} with {len(sizes)} layers by number{below}"
    accepted = "those of attentions and GEGLU of Stable Diffusion 1 or 2, in one of diffusers' orders"
    raise refuse("LoRA file", shown, accepted, _REMEDY)


def _classes(text: str) -> list[str]:
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        return ["classes that its header does not name"]
    return sorted(map(str, names)) if isinstance(names, list) else [str(names)]


def _text_layers(sizes: Mapping[int, tuple[int, int]]) -> list[str]:
    """The text encoder's modules by number: square projections of one width, four in each layer."""
    square = all(size[0] == size[1] for size in sizes.values()) and len(set(sizes.values())) <= 1
    if not square or len(sizes) % len(_TEXT) or set(sizes) != set(range(len(sizes))):
        return []
    stem = "text_model.encoder.layers"
    return [f"{stem}.{n}.self_attn.{name}" for n in range(len(sizes) // len(_TEXT)) for name in _TEXT]
