"""The table of all sliders, label by label: ``python -m vitrine.evidence.w2w.slider_table docs/sliders.md``.

What is measured stands in a JSON file beside the page, so that the same command goes on where it was stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...engine.io.files import parse_table, write_json, write_text
from .graded import MANY, Comparison, smaller_space
from .pair_sliders import shipped_change
from .world import LABELS, Studio, people_space

PEOPLE, STEPS = 24, 10
HEAD = """# Sliders of the portraits, label by label

Does an attribute rise evenly along five positions, and what changes beside it? Written by
`{command}` (about {minutes} minutes of one core
for each label; the same command goes on where it was stopped).

Read by the readout on people who are in neither the space (the first 400) nor the tuning: up to {many} of the 68 to 98
who lack a label see the maps, {people} of them even strengths and the word in the prompt. Of the people 200 to 399,
{people} say from which timestep a slider acts, where it ends, and its map; directions from pairs are trained on people
0 to 199, and which of the two counts the tuning people decide. In brackets: 95 % intervals over people. *Others* is
the largest change of any other attribute; a perfect edit, a render with nothing else changed, reads 0.00
(`pytest tests/evidence/test_w2w_measures.py`), and the last line says what another seed changes without any edit.
*Identity* is 1 for the same person. A slider holds if it rises by 30 points, no step of the mean is above 0.4, others
stay within 0.10, and identity within 0.02 of even strengths'.
"""


def measured(studio: Studio, label: str, people: int = PEOPLE, steps: int = STEPS, many: int = MANY) -> dict[str, Any]:
    """One label's rows and verdicts, as JSON can hold them."""
    compared = Comparison.measure(studio, label, people, steps, many, shipped_change(people_space(), label))
    verdicts = {"holds": compared.holds(compared.best), "with labels alone": compared.holds(compared.calibrated)}
    chosen = {"map": compared.chosen.whole.to_dict(), "from pairs": compared.chosen.change is not None}
    return {"rows": compared.described(), "people": people, "many": many, **verdicts, **chosen}


def page(table: dict[str, Any], command: str = "python -m vitrine.evidence.w2w.slider_table docs/sliders.md") -> str:
    """The table as Markdown."""
    text = HEAD.format(command=command, minutes=4, many=MANY, people=PEOPLE)
    holding = [label for label, entry in table.items() if entry["holds"]]
    alone = [label for label, entry in table.items() if entry["with labels alone"]]
    text += (
        f"\n**{len(holding)} of {len(table)} measured labels hold** ({', '.join(holding) or 'none'}); with directions"
    )
    text += f" from labels alone {len(alone)} ({', '.join(alone) or 'none'}).\n"
    missing = [label for label in LABELS if label not in table]
    text += f"Not measured yet: {', '.join(missing)}.\n" if missing else ""
    for label, entry in table.items():
        text += f"\n## {label}: {'holds' if entry['holds'] else 'does not hold'}\n\n"
        if (entry["people"], entry["many"]) != (PEOPLE, MANY):
            text += f"On fewer people: {entry['people']} tune or see all four, {entry['many']} see the maps.\n\n"
        text += "| slider | five positions |\n|---|---|\n"
        text += "".join(f"| {name} | {row} |\n" for name, row in entry["rows"].items())
    return text


def write_page(path: str | Path, labels: Sequence[str] = tuple(LABELS), people: int = PEOPLE, many: int = MANY) -> Path:
    """Measures the labels that are missing from the JSON file beside ``path``; the page is whole after each."""
    path = Path(path)
    notes = path.with_suffix(".json")
    table = parse_table(notes.read_text(encoding="utf-8")) if notes.is_file() else {}
    studio = Studio.open(None, smaller_space())
    for label in labels:
        if label not in table:
            table[label] = measured(studio, label, people, many=many)
            write_json(notes, table)
            write_text(path, page(table))
    return path


if __name__ == "__main__":
    print(write_page(sys.argv[1], sys.argv[2:] or tuple(LABELS)))
