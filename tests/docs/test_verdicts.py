"""The table of verdicts is that of the code; ``VITRINE_WRITE_DOCS=1 pytest tests/docs/test_verdicts.py`` writes it."""

import os
import re
from pathlib import Path

from vitrine.engine.copies.lora_findings import Findings
from vitrine.engine.copies.training_runs import FEWEST, LEARNS, WANDERS
from vitrine.engine.nemo.blocked_copies import THIRD
from vitrine.engine.nemo.dose import FULL
from vitrine.engine.nemo.noise_similarity import PROMPT_WORDS
from vitrine.engine.settings.verdicts import BAD, COPIES_BAD, FINE, LOOK, OPEN, WORDS
from vitrine_tests.engine.copies.test_verdicts import facts

PAGE = Path(__file__).parents[2] / "docs" / "verdicts.md"
MARKS = ("<!-- verdicts -->", "<!-- end of verdicts -->")
ASKED = {
    "what it is": "its tensors, a text encoder's for NaN alone; libraries that loaded it",
    "where it acts": "its own prompts and ordinary ones",
    "what it copies": "prompts of those asked for; strengths",
    "what it costs": "the same, and ordinary prompts",
    "its neighbours": "LoRAs of its base model; how many were left out",
}
"""Part of the LoRA report -> what its verdict counts."""


def rows():
    """(check, word and what makes it, what is measured)."""
    table = [("all", f"{word}: {rule}", "n of m parts") for word, rule in WORDS.items()]
    for pictures in ((), ("a",)):
        for line in Findings("a", facts(), pictures=pictures).summary:
            table += [
                (f"*LoRA Report*, {line.topic}", rule, ASKED[line.topic])
                for rule in re.split("; (?=look:)", line.threshold)
            ]
    table += [
        ("*Copy Check*", f"{BAD}: {COPIES_BAD:.0%} of a prompt's samples or more are copies; {LOOK}: any",
         f"prompts; samples (a copy is below {THIRD:.0%} of the usual distance); NeMo's score, if it has a threshold"),
        ("a run of checkpoints", f"{FINE}: each goes on where the one before went, a cosine of {WANDERS:g} or more "
         f"({LEARNS:g}: it still learns)", "weights of n of m checkpoints; samples of n"),
        ("a run of checkpoints", f"{LOOK}: it wanders, turns back or stands still", "the same"),
        ("a run of checkpoints", f"{BAD}: nothing was learned, or samples of a checkpoint copy", "the same"),
        ("a run of checkpoints", f"{OPEN}: fewer than {FEWEST}, or too few that differ", "the same"),
        ("*Detect a Copied Prompt (NEMO)*", f"{PROMPT_WORDS[BAD]}: samples differ less, or the score is higher, than "
         "the threshold of *Calibrate Copy Detection (NEMO)*", "samples, or seeds, of those asked for"),
        ("*Detect a Copied Prompt (NEMO)*", f"{PROMPT_WORDS[OPEN]}: no threshold was measured for this model",
         "the same"),
        ("`vitrine nemo detect`", f"{BAD}: a prompt is memorized; {FINE}: none is, and each has a verdict", "prompts"),
        ("*Find Copying Neurons (NEMO)*", f"cured: none of {sum(FULL)} full samples is near the untouched picture "
         f"(below {THIRD:.0%} of the usual distance); reduced: fewer are; not cured: as many are",
         "few-step and full samples"),
        ("*Find Copying Neurons (NEMO)*", "not memorized: untouched few-step samples do not agree",
         "few-step samples"),
        ("*Verify Blocking (NEMO)*, other seeds", f"{BAD}: they still agree; {OPEN}: they did not agree without "
         "blocking either", "seeds"),
        ("*Verify Blocking (NEMO)*, the attack", f"{BAD}: an optimised embedding brings the picture back; {OPEN}: no "
         "reference picture", "the same seeds"),
    ]  # fmt: skip
    return list(dict.fromkeys(table))


def rendered():
    lines = ["| check | verdict, and what makes it | what is counted |", "|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows()]
    return "\n".join([MARKS[0], *lines, MARKS[1]])


def test_the_table_of_verdicts_is_that_of_the_code():
    text = PAGE.read_text(encoding="utf-8")
    before, _, after = text.partition(MARKS[0])
    after = after.partition(MARKS[1])[2]
    if os.environ.get("VITRINE_WRITE_DOCS"):
        PAGE.write_text(before + rendered() + after, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == before + rendered() + after, "VITRINE_WRITE_DOCS=1 pytest tests/docs"


def test_each_word_and_each_part_is_in_the_table():
    text = rendered()
    assert all(f"| {word}: " in text for word in WORDS) and all(text.count(topic) for topic in ASKED)
    assert {line.topic for line in Findings("a", facts()).summary} == set(ASKED)
