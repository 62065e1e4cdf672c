"""The rules of our prose, for everything that people read: short sentences, short cells, and the field's words."""

from __future__ import annotations

import html
import re

MOST_WORDS, MOST_IN_A_CELL = 35, 25
"""In one sentence; in one cell of a table."""
WORDS = {
    r"(?<!in )(?<!take )(?<!takes )(?<!took )(?<!change )places?": "layer; position",
    r"(?<!e-mail )(?<!memory )address(?:es)?(?! below| above)": "layer name",
    r"told": "conditioned on; given",
    r"(?:un)?drawn|draws?|drew": "generated, sampled, shown",
    r"holds?|held(?!-out)(?! out)": "contains; covered by a test; passes",
    r"(?<!batch )(?<!slider )rows?(?!,? (?:and )?columns)": "batch rows; UNet evaluations; lines",
    r"(?<!-)control(?!s)": "size conditioning",
    r"beside": "next to; compared with",
    r"contracts?": "student preset",
    r"stands?|stood": "is; is applied to",
    r"worlds?": "toy dataset; test environment",
    r"readouts?(?!, or)": "attribute classifier",
    r"rooms?|floors?|doors?": "subpackage; layer; interface",
    r"(?<!train )plants?|planted": "memorized training image",
    r"of no space|chose nothing|chose no \w+": "held-out",
    r"(?:the|a|our|its|each|early|published|own) stop": "stopping rule",
    r"legacy": "prior-work layers",
    r"(?:the|a|as|its|what|largest|smallest|whose) share|shares? of": "fraction",
    r"walks?|walked": "sampling loop; chain",
    r"gaps?": "score difference",
    r"(?:the|a|usual|full) (?:pull|bend)": "norm or curvature of the guidance difference",
    r"strangeness|surroundings of|easel|trainee": "see the code's names",
    r"fellows|kin": "neighbours, variants",
    r"so many": "that many",
    r"(?:goes|go|went|going) on|gone on with": "resumes; continues",
    r"of (?:its|their) own(?! [a-z])": "a separate one",
    r"nobody": "no one",
}
"""A word of ours, as a regular expression -> the field's."""
FENCE = re.compile(r"^```.*?^```|<!--.*?-->|^    .*$", re.M | re.S)
INLINE = re.compile(
    r"`[^`]*`|[\w.-]+/[\w./-]+|\]\([^)]*\)|<[^>]+>|https?://\S+|\d+(?:\.\d+)+|\b(?:e\.g|i\.e|et al|Sec|Fig|Eq|vs)\."
)
END = re.compile(r"(?<=[.!?])[\"')*_]*\s+|[.!?][\"')*_]*$")
HTML = re.compile(r"<(?:t[dh]|p|summary)>(.*?)</(?:t[dh]|p|summary)>|<br>|</?\w+[^>]*>")
ITEM = re.compile(r"#+ |[-*] |\d+\. |!\[|>|::")


def _cells(line: str) -> list[str]:
    return [cell for cell in line.strip("|").split("|") if not set(cell) <= set("-: ")]


def _blocks(text: str) -> tuple[list[str], list[str]]:
    """(paragraphs and list items, cells of tables) of a Markdown page, code left out."""
    blocks, cells, paragraph = [], [], []
    text = HTML.sub(lambda m: f"\n| {m[1]} |\n" if m[1] else "\n\n" if m[0] == "<br>" else "X", FENCE.sub("\n\n", text))
    for line in [*INLINE.sub("X", html.unescape(text)).splitlines(), ""]:
        bare = line.strip()
        if bare.startswith("|"):
            cells += _cells(bare)
        elif bare and not ITEM.match(bare):
            paragraph.append(bare)
            continue
        blocks.append(" ".join(paragraph))
        paragraph = [ITEM.sub("", bare)] if bare and bare[0] not in "|#" else []
        blocks += [bare.lstrip("# ")] if bare.startswith("#") else []
    return [b for b in blocks if b], cells


def words(text: str) -> int:
    """How many words a sentence has; code, links and numbers count as one each."""
    return len(re.findall(r"[\w'.%-]*\w", text))


def long_sentences(text: str) -> list[str]:
    """Those of more than :data:`MOST_WORDS` words, and cells of more than :data:`MOST_IN_A_CELL`."""
    blocks, cells = _blocks(text)
    found = [s.strip() for block in blocks for s in END.split(block) if words(s) > MOST_WORDS]
    return found + [cell.strip() for cell in cells if words(cell) > MOST_IN_A_CELL]


def own_words(text: str) -> list[str]:
    """Each of our words that a text uses, where it is, and the field's."""
    plain = " ; ".join(part for parts in _blocks(text) for part in parts)
    return [
        f"{plain[max(m.start() - 40, 0) : m.end() + 30]!r}: {field}"
        for word, field in WORDS.items()
        for m in re.finditer(rf"(?<![\w-])(?:{word})(?![\w-])", plain, re.I)
    ]


def faults(text: str) -> list[str]:
    """What breaks a rule in a text."""
    return [f"long: {sentence}" for sentence in long_sentences(text)] + own_words(text)
