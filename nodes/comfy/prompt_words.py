"""The words of a prompt: its text in the graph that runs, and the word at each position that a network reads."""

from __future__ import annotations

from typing import Any

_HOPS = 20
"""Nodes between a prompt and its reader that are looked through, at most."""
_PASSED_ON = ("text", "conditioning", "positive", "value", "string")
"""Inputs of core's nodes that pass a prompt or its text on."""


def text_behind(hidden: Any, name: str) -> str | None:
    """The text of the prompt on an input of the running node; None where the graph does not contain it as text.

    Args:
        hidden: the node's, with ``prompt`` and ``unique_id``; None where no graph runs it.
    """
    graph = getattr(hidden, "prompt", None) or {}
    inputs = graph.get(str(getattr(hidden, "unique_id", "")), {}).get("inputs", {})
    value = inputs.get(name)
    for _ in range(_HOPS):
        if not isinstance(value, list) or len(value) != 2:
            break
        inputs = graph.get(str(value[0]), {}).get("inputs", {})
        value = next((inputs[key] for key in _PASSED_ON if key in inputs), None)
    return value if isinstance(value, str) else None


def words_at(clip: Any, text: str, length: int) -> list[str]:
    """The word at each of the ``length`` positions of an encoded prompt; empty where no encoder has as many.

    A word of several tokens is at each of them; start, end and padding are in angle brackets.
    """
    for name, chunks in clip.tokenize(text, return_word_ids=True).items():
        if sum(map(len, chunks)) == length and (encoder := _encoder(clip.tokenizer, name)) is not None:
            return [word for chunk in chunks for word in _words(encoder, chunk)]
    return []


def _encoder(tokenizer: Any, name: str) -> Any:
    encoders = (getattr(tokenizer, attribute, None) for attribute in (name, f"clip_{name}"))
    return next((encoder for encoder in encoders if hasattr(encoder, "inv_vocab")), None)


def _words(encoder: Any, chunk: list) -> list[str]:
    special = {encoder.pad_token: "<padding>", encoder.end_token: "<end>", encoder.start_token: "<start>"}
    pieces, words = [], []
    for token, _, _ in chunk:
        piece = "<embedding>" if not isinstance(token, int) else special.get(token) or encoder.inv_vocab.get(token, "?")
        pieces.append(piece)
    for at, piece in enumerate(pieces):
        words.append(piece if piece.startswith("<") else _whole(pieces, at))
    return words


def _whole(pieces: list[str], at: int) -> str:
    """The word that the piece at a position belongs to: CLIP marks a word's last piece, T5 and Qwen its first."""
    ends, begins = "</w>", ("\u2581", "\u0120")
    first = last = at
    if any(piece.endswith(ends) for piece in pieces):
        while first and not pieces[first - 1].endswith(ends) and not pieces[first - 1].startswith("<"):
            first -= 1
        while not pieces[last].endswith(ends) and last + 1 < len(pieces):
            last += 1
    else:
        while first and not pieces[first].startswith(begins):
            first -= 1
        while last + 1 < len(pieces) and not pieces[last + 1].startswith((*begins, "<")):
            last += 1
    return "".join(pieces[first : last + 1]).replace(ends, "").strip("".join(begins))
