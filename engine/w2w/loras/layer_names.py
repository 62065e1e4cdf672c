"""Key formats of LoRA tensors, their canonical name, the module path in a diffusers UNet, and how large a layer can be.

Modules of transformers keep the names of their file, diffusers' (``transformer_blocks.0..``) or ComfyUI's
(``double_blocks.0..``).

Read: kohya (``lora_unet_..``), OneTrainer (``lora_transformer_..``), ComfyUI (``diffusion_model..``, also behind
``model.``, and ``text_encoders..``), PEFT (``base_model.model..``), diffusers old
(``..processor.to_q_lora..``) and new (``unet...lora_A..``), and the published w2w export (``.lora_A.identity1.weight``,
which PEFT silently ignores under other adapter names).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

from ...errors import refuse
from ...families import FAMILIES
from ...families.module_names import LONGEST_NAME, ModuleNames

_LYCORIS = (
    *(f"hada_w{n}_{side}" for n in "12" for side in "ab"),
    "hada_t1",
    "hada_t2",
    *(f"lokr_w{n}{side}" for n in "12" for side in ("", "_a", "_b")),
    "lokr_t1",
    "lokr_t2",
)
_ROLES = (
    ("down", re.compile(r"(?:[._]lora_down|\.lora\.down|_lora\.down|\.lora_linear_layer\.down)\.weight$")),
    ("up", re.compile(r"(?:[._]lora_up|\.lora\.up|_lora\.up|\.lora_linear_layer\.up)\.weight$")),
    ("down", re.compile(r"\.lora_A(?P<adapter>\.(?!(?:weight|bias)$)[^.]+)?(?:\.weight)?$")),
    ("up", re.compile(r"\.lora_B(?P<adapter>\.(?!(?:weight|bias)$)[^.]+)?(?:\.weight)?$")),
    ("singular", re.compile(r"\.lora_E(?P<adapter>\.[^.]+)?$")),
    ("alpha", re.compile(r"(?:_lora)?\.alpha$")),
    ("magnitude", re.compile(r"\.lora_magnitude_vector(?:\.weight)?$")),
    ("dora_scale", re.compile(r"\.dora_scale$")),
    ("mid", re.compile(r"\.lora_mid\.weight$")),
    ("diff", re.compile(r"\.diff$")),
    *((part, re.compile(rf"\.{part}$")) for part in _LYCORIS),
)
_OTHER_KINDS = (
    ("IA3", re.compile(r"\.ia3_l(\.|$)|\.on_input$")),
    ("a textual inversion", re.compile(r"^(emb_params|string_to_param\.|clip_[lg]$|<[^>]*>$)")),
    ("OFT", re.compile(r"\.b?oft_")),
    ("KaSA", re.compile(r"\.lora_diag(\.|$)")),
    ("GLoRA", re.compile(r"\.[ab][12]\.weight$")),
    ("XLabs' LoRA of fused queries", re.compile(r"\.processor\.(qkv|proj)_lora[12]?\.(down|up)\.weight$")),
)
_REMEDIES = {
    "a textual inversion": "it is an embedding of words: put it into ComfyUI's models/embeddings",
    "IA3": "it scales activations: merge it with PEFT and extract a LoRA",
}
_DROPPED = (
    ("norm layers (w_norm, b_norm)", re.compile(r"\.[wb]_norm$")),
    ("embeddings (bundle_emb)", re.compile(r"^bundle_emb\.")),
    ("biases of factors (lora_B.bias)", re.compile(r"(lora_[AB](\.[^.]+)?|lora_(up|down))\.bias$")),
    ("norm layers (diff)", re.compile(r"\.diff$")),
    ("biases (diff_b)", re.compile(r"\.diff_b$")),
    ("biases", re.compile(r"\.bias$")),
)
_TEXT = re.compile(
    r"^((?:base_model\.model|module|_orig_mod)\.)*(lora_(prior_)?te\d?_|text_encoders?(_\d)?\.|te\d?\.|clip_[lgh]\."
    r"|t5xxl\.|cond_stage_model\.|conditioner\.|text_model\.|encoder\.)"
)

_MODULES = ModuleNames(module for family in FAMILIES for module in family.modules)
_UNDERSCORED = ("lora_unet_", "lora_prior_unet_", "lora_transformer_", "lycoris_")
"""Prefixes of names that have underscores for dots."""
_AGAIN = ("lora_unet_", "unet_", "transformer_", "diffusion_model_", "model_diffusion_model_")
"""What converters write before a name that has its prefix already."""


class Key(NamedTuple):
    """One key of a LoRA file: module path, ``down | up | alpha | ..``, format, and whether it belongs to the UNet."""

    path: str
    role: str
    dialect: str
    unet: bool


LONGEST_KEY = LONGEST_NAME + 64
"""Characters of a key; a module's name and the longest name of a tensor."""
_SEEN = 1 << 15
"""Names that are kept with their meaning: the files of a folder have the same ones. Flux LoRAs have 1,500."""


@lru_cache(maxsize=_SEEN)
def parse(key: str, layers_per_block: int = 2) -> Key | None:
    """Parses a key; None if it is not a LoRA tensor. ``layers_per_block`` is the UNet's, for ldm names only.

    A name with underscores for dots that is no module's of any family is refused.
    """
    if len(key) > LONGEST_KEY:
        raise refuse("LoRA key", f"{key[:60]}... of {len(key)} letters", f"at most {LONGEST_KEY}", "export it again")
    for role, pattern in _ROLES:
        match = pattern.search(key)
        if match:
            adapter = (match.groupdict().get("adapter") or "").strip(".")
            stem, dialect = bare(key[: match.start()], adapter)
            return Key(canonical(stem, layers_per_block), role, dialect, _TEXT.match(key) is None)
    return None


@lru_cache(maxsize=_SEEN)
def other_kind(key: str) -> str | None:
    """The adapter kind of a key, if it is not a plain LoRA."""
    return next((kind for kind, pattern in _OTHER_KINDS if pattern.search(key)), None)


def remedy_of(kind: str) -> str:
    """What to do with a file of another kind."""
    return _REMEDIES.get(kind, "merge it and extract a LoRA")


def among_factors(key: str, layers: Collection[str], layers_per_block: int = 2) -> bool:
    """Whether a key that is not a LoRA tensor belongs to one of ``layers`` or to an adapter, with unknown meaning.

    Biases and norm layers are known; a space leaves them out.
    """
    if any(pattern.search(key) for _, pattern in _DROPPED) or _TEXT.match(key):
        return False
    parts = key.split(".")
    if any(part.startswith("lora_") for part in parts[1:]):
        return True
    if key.startswith(_UNDERSCORED):
        path = _dotted(parts[0]) or ""
        return canonical(path, layers_per_block) in layers
    path = canonical(bare(key)[0], layers_per_block)
    return any(path[:end] in layers for end, letter in enumerate(path) if letter == ".")


def dropped_part(key: str) -> str:
    """What a key that is not a LoRA tensor changes, for the remark that a space leaves it out."""
    return next(
        (part for part, pattern in _DROPPED if pattern.search(key)), f"other tensors ({key.rsplit('.', 1)[-1]})"
    )


def bare(stem: str, adapter: str = "") -> tuple[str, str]:
    """(name without its prefix, format)."""
    if stem.startswith(_UNDERSCORED):
        path = _dotted(stem)
        if path is None:
            accepted = "modules of " + ", ".join(family.name for family in FAMILIES)
            remedy = "a name with underscores for dots is read for these models only: save it in diffusers' names"
            raise refuse("LoRA layer", stem, accepted, remedy)
        return path, "kohya"
    stem = stem.removeprefix("model.")
    path = _PREFIXES.sub("", stem)
    if stem.startswith("diffusion_model."):
        return path, "ComfyUI"
    if stem.startswith("base_model.model."):
        return path, f"w2w ({adapter})" if adapter not in ("", "default") else "PEFT"
    if ".processor." in path:
        return re.sub(r"\.to_out$", ".to_out.0", path.replace(".processor.", ".")), "diffusers old"
    return path, "diffusers"


def _dotted(stem: str) -> str | None:
    """The module that a name with underscores for dots means; None if it is no known one's, or several families'."""
    name = stem[len(next(prefix for prefix in _UNDERSCORED if stem.startswith(prefix))) :]
    while name:
        paths = _MODULES.dotted(name)
        if len(paths) == 1:
            return paths[0]
        name = next((name[len(again) :] for again in _AGAIN if name.startswith(again)), "")
    return None


_PREFIXES = re.compile(r"^(?:(?:base_model\.model|unet|transformer|diffusion_model|module|_orig_mod)\.)+")
"""Prefixes of module names by pipelines, PEFT, ComfyUI, data-parallel and compiled modules, in any order."""


def canonical(path: str, layers: int = 2) -> str:
    """A module's diffusers name, if the family's own code has another one (ldm); other names are unchanged.

    Args:
        layers: resnets per encoder level.
    """
    for rename in _RENAMES:
        path = rename(path, layers)
    return path


_RENAMES = [family.renamed for family in FAMILIES if family.renamed is not None]


# --- sizes, to refuse damaged or malicious files ----------------------------------------------------------------------
_UNET_PREFIXES = ("down_blocks.", "up_blocks.", "mid_block.", "conv_", "time_", "add_")
_LARGEST_UNET, LARGEST = 1 << 26, 1 << 29
"""Most numbers in a weight: SDXL's refiner has 42 million in one layer, Flux.2 340 million."""


def most_numbers(path: str) -> int:
    """The largest size of a weight with this layer name in any model."""
    return _LARGEST_UNET if path.startswith(_UNET_PREFIXES) else LARGEST


def layer_fits(path: str, numbers: int) -> bool:
    """Whether a layer's weight can have that many numbers."""
    return 0 < numbers <= most_numbers(path)
