"""The rules of our prose, for pages that people read: short sentences, and the field's words (docs/words.json)."""

from __future__ import annotations

import re

MOST_WORDS = 35
"""In one sentence."""
WORDS = {
    r"(?:two|both|either|each|which|through .*) doors?": "interface: ComfyUI and diffusers",
    r"(?:is|are|was|were|be) told": "conditioned on",
    r"stands? on": "is applied to",
    r"of its own": "a separate one",
    r"planted": "memorized training picture",
    r"of no space|chose nothing": "held-out",
    r"strangeness": "unsupported_reason",
    r"readout": "attribute classifier",
    r"(?:kin|fellows)": "variants, neighbours",
    r"so many": "that many",
    r"goes? on": "resumes, continues",
    r"gone on with": "continued from",
}
"""A word of ours, as a regular expression -> the field's."""
FENCE = re.compile(r"^```.*?^```|<!--.*?-->|^    .*$", re.M | re.S)
INLINE = re.compile(r"`[^`]*`|\]\([^)]*\)|<[^>]+>|https?://\S+")
END = re.compile(r"(?<=[.!?:;])[\"')*]*\s+(?=[A-Z*\"(\[`0-9])")


def sentences(text: str) -> list[str]:
    """Sentences of a Markdown page: of paragraphs, list items and table cells; code left out."""
    text = FENCE.sub("\n\n", text)
    blocks, paragraph = [], []
    for line in [*text.splitlines(), ""]:
        bare = line.strip()
        if bare.startswith("|"):
            blocks += [cell for cell in bare.strip("|").split("|") if not set(cell) <= set("-: ")]
        elif not bare or bare.startswith(("#", "- ", "* ", "1. ", "2. ", "3. ", "4. ", "5. ", "![")):
            blocks.append(" ".join(paragraph))
            paragraph = [bare.lstrip("#-* ")] if bare else []
        else:
            paragraph.append(bare)
    return [s.strip() for block in blocks for s in END.split(INLINE.sub("X", block)) if s.strip()]


def long_sentences(text: str) -> list[str]:
    """Those of more than :data:`MOST_WORDS` words."""
    return [s for s in sentences(text) if len(re.findall(r"[\w'.-]*\w", s)) > MOST_WORDS]


def own_words(text: str) -> list[str]:
    """Each of our words that a page uses, with the field's."""
    plain = " ".join(sentences(text))
    return [f"{m[0]} -> {field}" for word, field in WORDS.items() for m in re.finditer(rf"\b{word}\b", plain, re.I)]
