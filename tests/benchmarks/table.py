"""The benchmarks' rows as a page, and a check that ratios did not get worse.

    python tests/benchmarks/table.py results.json [gpu.json ...] > docs/speed.md
    python tests/benchmarks/table.py --rows results.json > tests/benchmarks/baseline.json
    python tests/benchmarks/table.py --check tests/benchmarks/baseline.json results.json [--model portraits]

``results.json`` is what pytest-benchmark wrote; ``--rows`` keeps the rows alone. Ratios are compared, not seconds, so a
baseline of one machine serves another of its kind.
"""

import argparse
import json
import sys
from pathlib import Path

KEY = ("method", "against", "model", "unit", "device")
SLACK, FLOOR = 0.15, 0.01
"""A ratio may rise by 15 %, by its spread, or by one percent of the side it is compared with, whichever is most."""

HEAD = """# Speed

What each method costs, compared with the straightforward way to the same result and one bare forward of the network.
Below 1, ours takes less. In brackets the smallest and largest ratio of a round; both sides run in turn in every round.
Peak memory is the whole process's, with every model in it. Full-size networks have random weights, which cost what
trained ones cost. Made by

    VITRINE_BENCH=1 VITRINE_BENCH_PROMPTS=8 pytest tests/benchmarks --benchmark-json=results.json
    python tests/benchmarks/table.py results.json > docs/speed.md

on two idle cores with 16 GB of memory, and held by

    python tests/benchmarks/table.py --check tests/benchmarks/baseline.json results.json

which fails where a ratio has risen by more than 15 % and more than its spread.
"""
SHORT_FORWARDS = "It waits for Python between the layers of so small a batch, so a hook shows more than on a CPU."
COLUMNS = "| method | against | model | of the | ratio (CPU) | rounds | peak memory, ours / theirs | GPU |"


def load(path):
    """Rows of a pytest-benchmark file, or of one that ``--rows`` made."""
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    if "rows" in found:
        return found["rows"]
    return [row for entry in found["benchmarks"] for row in entry["extra_info"].get("rows", [])]


def key(row):
    """What makes two rows comparable."""
    return tuple(row[name] for name in KEY)


def render(rows):
    """The page."""
    cpu, other = ([r for r in rows if (r["device"] == "cpu") is on] for on in (True, False))
    fast = {key(r)[:-1]: r for r in other}
    parts = [HEAD, machine(cpu) if cpu else "Not measured yet.\n"]
    if not other:
        parts.append("GPU: no GPU was at hand.\n")
    else:
        names = ", ".join(sorted({r["device"] for r in other}))
        parts.append(f"GPU: {names}, {other[0]['dtype']}. {SHORT_FORWARDS}\n")
    lines = [COLUMNS, "|---" * COLUMNS.count(" | ") + "|---|"] if rows else []
    for row in cpu:
        there = fast.pop(key(row)[:-1], None)
        cells = (row["method"], row["against"], row["model"], row["unit"], ratio(row), str(row["rounds"]), memory(row))
        lines.append(f"| {' | '.join(cells)} | {ratio(there) if there else ''} |")
    for row in fast.values():  # measured on the GPU alone
        cells = (row["method"], row["against"], row["model"], row["unit"], "", str(row["rounds"]), memory(row))
        lines.append(f"| {' | '.join(cells)} | {ratio(row)} |")
    return "\n".join([*parts, *lines, *waits(cpu)]).rstrip() + "\n"


def waits(rows):
    """Seconds where a hand waits for them, and what was promised; other rows are ratios, which travel."""
    found = [r for r in rows if "promised" in r]
    head = ["", "What a hand waits for, in seconds (median of the rounds; other work may have shared the cores):", ""]
    lines = [
        f"- {r['method']}: **{r['ours']:.3f}** s, at most {r['promised']:g} promised; a bare forward meanwhile took "
        f"{r['theirs']:.3f} s"
        for r in found
    ]
    return [*head, *lines] if found else []


def machine(rows):
    """One line on what ran."""
    threads, kinds, torch = ({str(r[name]) for r in rows} for name in ("threads", "dtype", "torch"))
    facts = (f"{'/'.join(sorted(threads))} threads", "/".join(sorted(kinds)), f"torch {'/'.join(sorted(torch))}")
    return f"CPU: {', '.join(facts)}.\n"


def ratio(row):
    """``0.28 (0.27 to 0.29)``; ratios of one round have no spread."""
    spread = f" ({number(row['low'])} to {number(row['high'])})" if row["rounds"] > 1 else ""
    return f"**{number(row['ratio'])}**{spread}"


def number(value):
    """Three significant digits, never in powers of ten."""
    return f"{value:.{max(0, 2 - _magnitude(value))}f}"


def _magnitude(value):
    return int(f"{value:e}".split("e")[1])


def memory(row):
    """``4.1 / 4.0 GiB``, or nothing where none was read."""
    if not row["peak_mib"]:
        return ""
    theirs = f" / {row['against_mib'] / 1024:.1f}" if row["against_mib"] else ""
    return f"{row['peak_mib'] / 1024:.1f}{theirs} GiB"


def check(baseline, rows, model=""):
    """Complaints: rows that are worse than the baseline's, or missing. Devices that did not run are not asked for."""
    found, devices, complaints = {key(r): r for r in rows}, {r["device"] for r in rows}, []
    for old in baseline:
        if old["device"] not in devices or not old["model"].startswith(model):
            continue
        new, name = found.get(key(old)), ", ".join(key(old)[:3])
        if new is None:
            complaints.append(f"missing: {name}")
            continue
        spread = max(old["high"] - old["low"], new["high"] - new["low"])
        allowed = max(spread, SLACK * old["ratio"], FLOOR)
        if new["ratio"] - old["ratio"] > allowed:
            was, now = number(old["ratio"]), number(new["ratio"])
            complaints.append(f"worse: {name}: {was} -> {now}, a rise of {number(allowed)} was allowed")
    return complaints or ([] if rows else ["missing: no rows at all"])


def main(argv=None):
    """The command line; 1 where the check fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+")
    parser.add_argument("--check", metavar="BASELINE", help="compare with these rows instead of printing a page")
    parser.add_argument("--model", default="", help="check only models that begin so")
    parser.add_argument("--rows", action="store_true", help="print the rows alone, as a baseline")
    args = parser.parse_args(argv)
    rows = [row for path in args.results for row in load(path)]
    if args.check:
        complaints = check(load(args.check), rows, args.model)
        sys.stdout.write("".join(f"{line}\n" for line in complaints or [f"{len(rows)} rows, none worse"]))
        return 1 if complaints else 0
    sys.stdout.write(json.dumps({"rows": rows}, indent=1) + "\n" if args.rows else render(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
