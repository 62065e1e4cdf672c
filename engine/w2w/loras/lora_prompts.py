"""Prompts of a LoRA report: captions, the trigger alone, natural and ordinary prompts.

Natural prompts are its captions without rare words, as written by someone who does not know the LoRA.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .lora_facts import LoraFacts

CAPTION, TRIGGER, NATURAL, ORDINARY = "caption", "trigger alone", "natural", "ordinary"
CLASS_WORDS = frozenset({
    "a", "an", "the", "of", "in", "on", "at", "by", "with", "and", "or", "to", "for", "from", "is", "are", "her", "his",
    "its", "this", "that", "photo", "picture", "image", "portrait", "painting", "drawing", "illustration", "person",
    "man", "woman", "boy", "girl", "child", "dog", "cat", "face", "style", "art", "character", "object",
})  # fmt: skip
"""Words that stay in a natural prompt even if they are part of a trigger phrase."""
USUAL = (
    "a dog in the snow", "a street at night", "a bowl of soup", "a woman reading a book", "a mountain lake",
    "an old car", "a man playing the guitar", "a plate of fruit",
)  # fmt: skip
"""Default ordinary prompts."""


@dataclass(frozen=True)
class AskedPrompt:
    """One prompt and its kind: ``caption``, ``trigger alone``, ``natural`` or ``ordinary``."""

    text: str
    kind: str


def prompts_of(
    facts: LoraFacts, captions: Sequence[str], triggers: Sequence[str], ordinary: Sequence[str] = USUAL, most: int = 4,
    pieces: Callable[[str], int] | None = None,
) -> list[AskedPrompt]:  # fmt: skip
    """The prompts of a report on one LoRA: at most ``most`` captions, and all ordinary prompts, without repetition.

    Without captions the header's tags replace them; without tags, the trigger before ordinary prompts; without either,
    the ordinary prompts themselves, since such a LoRA affects all prompts.

    Args:
        captions: of its training images.
        triggers: trigger words; none: those of the header.
        pieces: word -> number of tokens: words of several tokens are unknown to the text encoder.
    """
    triggers = [*triggers] or [*facts.triggers]
    own = _spread([c for c in dict.fromkeys(captions) if c.strip()], most)
    if not own and facts.tags:
        own = [", ".join([*triggers[:1], *(t for t in list(facts.tags)[:6] if t not in triggers)])]
    if not own:
        own = [f"{triggers[0]}, {text}" for text in ordinary[:most]] if triggers else list(ordinary[:most])
    rare = rare_words(own, triggers, pieces)
    asked = [AskedPrompt(text, CAPTION) for text in own]
    asked += [AskedPrompt(triggers[0], TRIGGER)] if triggers else []
    asked += [AskedPrompt(text, NATURAL) for text in (natural(caption, rare) for caption in own) if text]
    asked += [AskedPrompt(text, ORDINARY) for text in ordinary]
    first: dict[str, AskedPrompt] = {}
    for prompt in asked:
        first.setdefault(prompt.text, prompt)
    return list(first.values())


def rare_words(
    captions: Sequence[str], triggers: Sequence[str], pieces: Callable[[str], int] | None = None
) -> set[str]:
    """Words specific to the LoRA: those of its triggers, and words of several tokens.

    A long common word may have several tokens, too; it is then missing from natural prompts.
    """
    rare = {word for phrase in triggers for word in _words(phrase) if word not in CLASS_WORDS}
    if pieces is not None:
        rare |= {word for caption in captions for word in _words(caption) if pieces(word) > 1 and word.isalpha()}
    return rare


def natural(caption: str, rare: set[str]) -> str:
    """A caption without rare words; empty if only class words remain."""
    kept = re.sub(r"[\w'-]+", lambda match: "" if match[0].lower() in rare else match[0], caption)
    kept = re.sub(r"\s+([,.;])", r"\1", " ".join(kept.split())).strip(" ,;")
    kept = re.sub(r"([,;])(\s*[,;])+", r"\1", kept)
    return kept if any(word not in CLASS_WORDS for word in _words(kept)) else ""


def _words(text: str) -> list[str]:
    return re.findall(r"[\w'-]+", text.lower())


def _spread(texts: Sequence[str], most: int) -> list[str]:
    """At most ``most`` texts, evenly spaced over the list."""
    if len(texts) <= most:
        return list(texts)
    return [texts[round(i * (len(texts) - 1) / max(most - 1, 1))] for i in range(most)]
