"""The words of a prompt: its text in the graph that runs, and the word at each position that a network reads."""

from __future__ import annotations

from typing import Any

_HOPS, _CANDIDATES = 20, 32
"""Nodes between a prompt and its reader that are looked through, and texts behind it that are encoded, at most."""
_PASSES = {
    0: {
        "CLIPTextEncode": "text", "PrimitiveString": "value", "PrimitiveStringMultiline": "value",
        "FluxGuidance": "conditioning", "ReferenceLatent": "conditioning", "ConditioningSetArea": "conditioning",
        "ConditioningSetAreaPercentage": "conditioning", "ConditioningSetAreaStrength": "conditioning",
        "ConditioningSetMask": "conditioning", "ConditioningSetTimestepRange": "conditioning",
        "ControlNetApply": "conditioning", "ControlNetApplyAdvanced": "positive", "ControlNetApplySD3": "positive",
        "InpaintModelConditioning": "positive", "InstructPixToPixConditioning": "positive",
        "VitrineControlValues": "conditioning",
    },
    1: {
        "ControlNetApplyAdvanced": "negative", "ControlNetApplySD3": "negative",
        "InpaintModelConditioning": "negative", "InstructPixToPixConditioning": "negative",
    },
}  # fmt: skip
"""Output -> nodes that pass a prompt or its text on there as it is -> the input that it comes from."""
_SAME = 1e-3
"""How far two encodings of one text may differ, relatively."""
_BEGINS, _NEWLINE = "\u2581\u0120", "\u010a"
"""What T5 and Qwen write before a word's first piece, and Qwen for a newline."""


def text_behind(hidden: Any, name: str, clip: Any = None, conditioning: list | None = None) -> str | None:
    """The text of the prompt on an input of the running node; None where that is not certain.

    It is, where all nodes between are known to pass it on. Behind others, each text in the graph is encoded, and the
    one that gives the conditioning is it.

    Args:
        hidden: the node's, with ``prompt`` and ``unique_id``; None where no graph runs it.
        clip: CLIP that may have encoded it.
        conditioning: what is on the input.
    """
    graph = getattr(hidden, "prompt", None) or {}
    link = graph.get(str(getattr(hidden, "unique_id", "")), {}).get("inputs", {}).get(name)
    value = link
    for _ in range(_HOPS):
        if not _is_link(value):
            break
        node = graph.get(str(value[0]), {})
        value = node.get("inputs", {}).get(_PASSES.get(value[1], {}).get(node.get("class_type", ""), ""))
    if isinstance(value, str):
        return value
    if clip is None or conditioning is None:
        return None
    return next((text for text in _texts(graph, link) if is_text_of(clip, text, conditioning)), None)


def is_text_of(clip: Any, text: str, conditioning: list) -> bool:
    """Whether a CLIP encodes a text to the states of a CONDITIONING."""
    states, own = conditioning[0][0], clip.encode_from_tokens_scheduled(clip.tokenize(text))[0][0]
    if states is None or own is None or states.shape != own.shape:
        return False
    states, own = states.float().cpu(), own.float().cpu()
    return bool((states - own).norm() <= _SAME * own.norm())


def _is_link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def _texts(graph: dict[str, Any], link: Any) -> list[str]:
    """Every text behind a link, the nearest first."""
    texts: dict[str, None] = {}
    reached, level = set[str](), [str(link[0])] if _is_link(link) else []
    for _ in range(_HOPS):
        inputs = [value for node in level for value in graph.get(node, {}).get("inputs", {}).values()]
        texts |= dict.fromkeys(value for value in inputs if isinstance(value, str) and value.strip())
        reached |= set(level)
        level = [node for node in dict.fromkeys(str(v[0]) for v in inputs if _is_link(v)) if node not in reached]
    return list(texts)[:_CANDIDATES]


def words_at(clip: Any, text: str, length: int) -> list[str]:
    """The word at each of the ``length`` positions of an encoded prompt; empty where no encoder has as many.

    A word of several tokens is at each of them. What is not the prompt's own is in angle brackets: start, end, padding,
    and the template that encoders such as Qwen put around it ("<assistant>").
    """
    empty = clip.tokenize("", return_word_ids=True)
    for name, chunks in clip.tokenize(text, return_word_ids=True).items():
        if (encoder := _encoder(clip.tokenizer, name)) is None:
            continue
        pieces = _pieces(encoder, chunks)
        own = _own(pieces, _pieces(encoder, empty[name]))
        words = _words(_bracketed(pieces, own))
        if (dropped := len(words) - length) in (0, _header(pieces)):
            return words[dropped:]
    return []


def _encoder(tokenizer: Any, name: str) -> Any:
    encoders = (getattr(tokenizer, attribute, None) for attribute in (name, f"clip_{name}"))
    return next((encoder for encoder in encoders if hasattr(encoder, "inv_vocab")), None)


def _pieces(encoder: Any, chunks: list) -> list[str]:
    """What the vocabulary says for each token."""
    special = {encoder.pad_token: "<padding>", encoder.end_token: "<end>", encoder.start_token: "<start>"}
    tokens = [token for chunk in chunks for token, *_ in chunk]
    return [special.get(t) or encoder.inv_vocab.get(t, "?") if isinstance(t, int) else "<embedding>" for t in tokens]


def _own(pieces: list[str], empty: list[str]) -> range:
    """Positions of the prompt's own tokens: neither at the front nor at the end as without a prompt."""
    most = min(len(pieces), len(empty))
    front = next((k for k in range(most) if pieces[k] != empty[k]), most)
    end = next((k for k in range(most - front) if pieces[-1 - k] != empty[-1 - k]), most - front)
    return range(front, len(pieces) - end)


def _bracketed(pieces: list[str], own: range) -> list[str]:
    """Newlines too, which are in no word."""
    inside = [piece.strip(_BEGINS).replace(_NEWLINE, "newline") for piece in pieces]
    return [
        p if p.startswith("<") or (k in own and _NEWLINE not in p) else f"<{inside[k]}>" for k, p in enumerate(pieces)
    ]


def _header(pieces: list[str]) -> int:
    """Tokens up to the newline after a chat's last "<|im_start|>user", which Qwen-Image's encoders drop."""
    starts = [at for at in range(len(pieces)) if pieces[at : at + 3] == ["<|im_start|>", "user", _NEWLINE]]
    return starts[-1] + 3 if starts else 0


def _words(pieces: list[str]) -> list[str]:
    return [piece if piece.startswith("<") else _whole(pieces, at) for at, piece in enumerate(pieces)]


def _whole(pieces: list[str], at: int) -> str:
    """The word that the piece at a position belongs to: CLIP marks a word's last piece, T5 and Qwen its first."""
    ends, begins = "</w>", tuple(_BEGINS)
    first = last = at
    if any(piece.endswith(ends) for piece in pieces):
        while first and not pieces[first - 1].endswith(ends) and not pieces[first - 1].startswith("<"):
            first -= 1
        while not pieces[last].endswith(ends) and last + 1 < len(pieces):
            last += 1
    else:
        while first and not pieces[first].startswith(begins) and not pieces[first - 1].startswith("<"):
            first -= 1
        while last + 1 < len(pieces) and not pieces[last + 1].startswith((*begins, "<")):
            last += 1
    return "".join(pieces[first : last + 1]).replace(ends, "").strip(_BEGINS)
