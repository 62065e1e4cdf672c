"""docs/graphs.md: its tables are the lists that the tests of guiders, patches and conditionings run over.

``VITRINE_WRITE_DOCS=1 pytest tests/comfy/test_graphs_page.py`` writes them anew.
"""

import os
from pathlib import Path

from vitrine_tests.comfy.guided_graphs import GUIDERS, PATCHES
from vitrine_tests.comfy.sampling_graphs import GRAPHS
from vitrine_tests.comfy.test_sampling_graphs import OWN_WEIGHTS
from vitrine_tests.comfy.test_token_positions import FIRST, SAID
from vitrine_tests.comfy.test_what_a_condition_carries import CARRIED, REFUSED, REGIONAL, WITHOUT_EFFECT

PAGE = Path(__file__).parents[2] / "docs" / "graphs.md"
BEGIN, END = "<!-- {} -->", "<!-- /{} -->"


def guiders():
    lines = [
        "| guider or prompt | recorded halves | blocker, `cond` | late W2W model | Size Weight Schedule |",
        "|---|---|---|---|---|",
    ]
    for name, (_, halves) in GUIDERS.items():
        recorded = ", ".join(f"`{half}`" for half in halves)
        lines.append(f"| {name} | {recorded} | the prompt only | from its timestep | each prompt's sizes |")
    return lines


def patches():
    lines = [
        "| core's node before ours | tap | blocker, `cond` | late W2W model | Size CFG Guider |",
        "|---|---|---|---|---|",
    ]
    for name in PATCHES:
        lines.append(f"| {name} | guidance's own pass | the prompt only | from its timestep | as KSampler |")
    return lines


def keys():
    lines = ["| what the prompt carries | one forward |", "|---|---|"]
    for name in CARRIED:
        lines.append(f"| {name} | as in KSampler{', where it changes nothing' if name in WITHOUT_EFFECT else ''} |")
    parts = "as in KSampler in *One-Step Sampler (EMD)*, refused elsewhere"
    return [*lines, *(f"| {name} | {parts} |" for name in REGIONAL), *(f"| {name} | refused |" for name in REFUSED)]


def graphs():
    lines = ["| graph | no change asked | tap | blocker | late W2W model |", "|---|---|---|---|---|"]
    for name in GRAPHS:
        late = f"from its timestep{', its change in full' if name in OWN_WEIGHTS else ''}"
        lines.append(f"| {name} | bit for bit | the prompt only | the prompt only, its steps | {late} |")
    return lines


def tokens():
    lines = ["| text encoder of | the prompt's first word is at | in front of it |", "|---|---|---|"]
    return [*lines, *(f"| {SAID[name][0]} | {first} | {SAID[name][1]} |" for name, first in FIRST.items())]


def test_the_tables_are_those_of_the_tests():
    text = PAGE.read_text(encoding="utf-8")
    tables = {"graphs": graphs(), "guiders": guiders(), "patches": patches(), "keys": keys(), "tokens": tokens()}
    for name, table in tables.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n" + "\n".join(table) + f"\n{end}{after}"
    if os.environ.get("VITRINE_WRITE_DOCS"):
        PAGE.write_text(text, encoding="utf-8", newline="\n")
    assert PAGE.read_text(encoding="utf-8") == text, "run with VITRINE_WRITE_DOCS=1"
