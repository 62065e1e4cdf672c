"""Captions, the rare words of memorized images, and the CLIP-format tokenizer with all these words.

"a smiling dark face with curly red hair glasses beard mole left cap right crimson shirt on blue": attributes that are
present are always named, absent ones never. Left and right are the viewer's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..io.files import write_text
from .scenes import ATTRIBUTES, Scenes

MAX_TOKENS = 24
START, END = "<|startoftext|>", "<|endoftext|>"
OPTIONAL = ("skin", "hair_color", "mouth", "shirt", "background")
"""Attributes without an "absent" value: captions may omit them, so training sometimes does."""


def caption(scenes: Scenes, drop: np.ndarray | None = None, flip: bool = False) -> list[str]:
    """One caption per scene.

    Args:
        drop: (B, 5) bool, which of ``OPTIONAL`` to omit.
        flip: caption of the mirrored image (left and right are swapped).
    """
    silent = np.zeros((len(scenes), len(OPTIONAL)), bool) if drop is None else drop
    return [_sentence(scenes.words(i), dict(zip(OPTIONAL, silent[i], strict=True)), flip) for i in range(len(scenes))]


def _sentence(word: dict[str, str], silent: dict[str, bool], flip: bool) -> str:
    def say(name: str) -> str:
        return "" if silent[name] else word[name]

    def side(value: str) -> str:
        return {"left": "right", "right": "left"}[value] if flip else value

    words = ["a", say("mouth"), say("skin"), "face with"]
    words += ["bald head"] if word["hair"] == "bald" else [word["hair"], say("hair_color"), "hair"]
    words += [word[n] for n in ("glasses", "beard") if word[n] != "none"]
    if word["mole"] != "none":
        words.append(f"mole {side(word['mole'])}")
    if word["hat"] != "none":
        kind, _, where = word["hat"].partition("-")
        words.append(f"{kind} {side(where)}" if where else kind)
    if say("shirt"):
        words.append(f"{word['shirt']} shirt")
    if say("background"):
        words.append(f"on {word['background']}")
    return " ".join(w for w in words if w)


def context_caption(scenes: Scenes) -> list[str]:
    """What a caption says of the surroundings only: expression, hat, shirt, background; nothing of who it is."""
    captions = []
    for i in range(len(scenes)):
        word = scenes.words(i)
        kind, _, side = word["hat"].partition("-")
        hat = [] if kind == "none" else [kind, side]
        words = ["a", word["mouth"], "face with", *hat, word["shirt"], "shirt on", word["background"]]
        captions.append(" ".join(w for w in words if w))
    return captions


RARE_WORDS = (
    "zorbal", "quindle", "vextor", "mulphan", "jiffrok", "drascue", "wobbex", "klynth",
    "phroogan", "tazmire", "gubwick", "xandorf", "nebbiolo", "sprockle", "ulverax", "yonquist",
    "brillig", "oomska", "cruxley", "fendibble", "habzung", "lotwelk", "pazzique", "rivnoth",
)  # fmt: skip
"""Two per memorized image or template, used in no other caption."""


def vocabulary() -> list[str]:
    """Every word a caption can contain, in a fixed order."""
    words = {w for values in ATTRIBUTES.values() for v in values for w in v.split("-")} - {"none"}
    return sorted(words | {"a", "face", "with", "hair", "head", "mole", "shirt", "on"}) + list(RARE_WORDS)


def write_tokenizer_files(folder: str | Path, words: Sequence[str] | None = None) -> Path:
    """Write vocab.json and merges.txt in CLIP's byte-pair format; every one of the words is one token.

    Other words fall back to letters, so that every prompt is accepted. None is :func:`vocabulary`.
    """
    letters = [chr(c) for c in range(33, 127)]
    pieces = [*letters, *(f"{c}</w>" for c in letters)]
    merges: list[tuple[str, str]] = []
    for word in sorted(vocabulary() if words is None else words, key=len):
        _merge_word(word, pieces, merges)
    table = {piece: i for i, piece in enumerate([*pieces, START, END])}
    folder = Path(folder)
    write_text(folder / "vocab.json", json.dumps(table, ensure_ascii=False))
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in merges)]
    write_text(folder / "merges.txt", "\n".join(lines) + "\n")
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": MAX_TOKENS,
        "do_lower_case": True,
        "bos_token": START,
        "eos_token": END,
        "unk_token": END,
        "pad_token": END,
        "errors": "replace",
    }
    write_text(folder / "tokenizer_config.json", json.dumps(config, indent=2))
    return folder


def _merge_word(word: str, pieces: list[str], merges: list[tuple[str, str]]) -> None:
    """Extends the merges until the standard BPE procedure turns ``word`` into one token."""
    rank = {pair: i for i, pair in enumerate(merges)}
    symbols = [*word[:-1], f"{word[-1]}</w>"]
    while len(symbols) > 1:
        pairs = [(rank.get((symbols[i], symbols[i + 1]), len(rank) + 1), i) for i in range(len(symbols) - 1)]
        best, at = min(pairs)
        pair = (symbols[at], symbols[at + 1])
        if best > len(rank):  # no known merge applies: learn the leftmost pair
            merges.append(pair)
            pieces.append("".join(pair))
            rank[pair] = len(rank)
        symbols = _apply(symbols, pair)


def _apply(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    joined: list[str] = []
    for symbol in symbols:
        if joined and (joined[-1], symbol) == pair:
            joined[-1] = joined[-1] + symbol
        else:
            joined.append(symbol)
    return joined
