"""docs/results and the README's rows, rendered from results/*.json and nothing else."""

import html
from pathlib import Path

from vitrine.evidence.result_files import SHIPPED, read_results, write_result
from vitrine.evidence.result_plots import arms_of, dot_plot, shown
from vitrine.evidence.statements import METHODS, page_of, statements

ROOT = Path(__file__).parents[2]
FOLDER, README = ROOT / "docs" / "results", ROOT / "README.md"
MARKS = ("<!-- results -->", "<!-- end of results -->")
ON_README = (
    "gdf.correspondence",
    "nemo.detection",
    "nemo.held_out",
    "w2w.directions",
    "w2w.editing",
    "w2w.inversion",
    "emd.mixture",
    "emd.student",
    "control.cross_size",
    "resolution.receptive",
)
WRITTEN = "<!-- Written by VITRINE_WRITE_DOCS=1 pytest tests/docs/test_results.py from results/*.json -->\n\n"
SHEETS = {
    "portraits.quality.avataaars": "![24 held-out captions: pictures of the dataset, below each "
    "the model's sample](../pictures/avataaars.jpg)\n",
}
"""Claim -> a picture for its section."""
SAID = {"paper": "From: ", "figure": "Figure: ", "target": "Target: "}
HEAD = "| verdict | claim | ours | best other method | trivial baseline | n |\n|---|---|---|---|---|---|\n"
LEAD = """# Results

One line for each claim, verdict first: **pass** (the target is met), **partly** (some of its conditions are), **fail**,
**not run**. The *trivial baseline* is what any method must beat; *n* counts pictures, prompts, people or layers;
brackets enclose 95 % intervals. All figures are of the toy models that ship with the pack, not of published
checkpoints. Settings were chosen on other pictures than those measured, unless a claim's text says otherwise.
"""


def pages():
    """File name -> content: index, one page a method, one plot a claim."""
    results = read_results()
    files = {"index.md": WRITTEN + LEAD + "".join(_section(page, results) for page in METHODS)}
    for page, title in METHODS.items():
        claims = [_claim(r) for name, r in results.items() if page_of(name) == page]
        files[f"{page}.md"] = f"{WRITTEN}# {title}\n\n[All results](index.md)\n\n" + "\n".join(claims)
    return files | {_plot(r): dot_plot(r) for r in results.values() if _drawn(r)}


def readme_rows():
    """The README's table, between its two marks."""
    results = read_results()
    return f"{MARKS[0]}\n{HEAD}{''.join(_row(results[name], 'docs/results/') for name in ON_README)}{MARKS[1]}"


def write():
    """Writes what changed, removes what is no longer made; a claim's words may change without a new measurement."""
    for name, result in read_results().items():
        write_result(result | statements()[name]._asdict(), SHIPPED)
    FOLDER.mkdir(exist_ok=True)
    files = pages()
    for old in [p for p in FOLDER.iterdir() if p.name not in files]:
        old.unlink()
    for name, text in files.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    text = README.read_text(encoding="utf-8")
    before, after = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
    README.write_text(before + readme_rows() + after, encoding="utf-8")


def _section(page, results):
    rows = "".join(_row(r) for name, r in results.items() if page_of(name) == page)
    return f"\n## {METHODS[page]}\n\n{HEAD}{rows}" if rows else ""


def _row(result, folder=""):
    link = f"[{result['title']}]({folder}{page_of(result['claim'])}.md#{result['claim']})"
    flow = ", flow model" if ".flow" in result["claim"] and "flow" not in result["title"] else ""
    cells = (f"**{result['verdict']}**", link + flow, _ours(result), _best(result, "rival"), _best(result, "trivial"))
    return f"| {' | '.join(cells)} | {result['n'] if result['n'] is not None else '-'} |\n"


def _ours(result):
    return "-" if result["ours"] is None else f"{shown(result['ours'], result['interval'])} {result['metric']}"


def _best(result, role):
    found = [arm for arm in result["baselines"] if arm["role"] == role and arm["value"] is not None]
    if not found:
        return "-"
    pick = {"higher": max, "lower": min}.get(result["better"], lambda arms, key: arms[0])
    arm = pick(found, key=lambda a: a["value"])
    return f"{shown(arm['value'], arm['interval'])} {arm['name']}"


def _drawn(result):
    return len([arm for arm in arms_of(result) if arm["value"] is not None]) > 1


def _plot(result):
    return f"{result['claim']}.svg"


def _claim(result):
    parts = [f'<a id="{result["claim"]}"></a>\n\n## {result["title"]}\n\n{_verdict(result)}\n']
    if _drawn(result):
        parts.append(f"![{result['title']}: {result['metric']}]({_plot(result)})\n")
    parts += [f"{result['about']}\n", *filter(None, [SHEETS.get(result["claim"])])]
    if result["verdict"] == "partly":
        parts.append("".join(f"- {'met' if met else '**not met**'}: {part}\n" for part, met in result["parts"].items()))
    if result["tables"]:
        tables = "".join(map(_table, result["tables"]))
        parts.append(f"<details><summary>Further figures</summary>{tables}</details>\n")
    return "\n".join([*parts, _measured(result)])


def _verdict(result):
    line = f"**{result['verdict']}**"
    if result["ours"] is not None:
        line += f": {_ours(result)}" + ("" if result["n"] is None else f", n = {result['n']}")
        line += f", {result['seeds']} seeds" if result["seeds"] > 1 else ""
    model = result["world"]
    return f"{line}. {model[0].upper()}{model[1:]}."


def _table(table):
    def row(tag, cells):
        return (
            "<tr>" + "".join(f"<{tag}>{'-' if c is None else html.escape(_cell(c))}</{tag}>" for c in cells) + "</tr>"
        )

    body = "".join(row("td", r) for r in table["rows"])
    return f"<p>{html.escape(table['title'])}</p><table>{row('th', table['head'])}{body}</table>"


def _cell(value):
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _measured(result):
    lines = [f"{said}{result[key]}." for key, said in SAID.items() if result[key]]
    if result["command"]:
        command = f"`{result['command']}`" if result["command"].split()[0] != "outside" else result["command"]
        lines.append(
            f"{command}, {'quick' if result['quick'] else 'in full'}, {result['date']}, commit {result['commit']}."
        )
    return "<br>\n".join(filter(None, lines)) + "\n"
