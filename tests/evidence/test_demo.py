"""The demo's frame: eight sections, each opened by its results; a line for each on the console and nothing else."""

import types
from pathlib import Path

from vitrine.cli.main import main
from vitrine.evidence import demo
from vitrine.evidence.result_files import read_results

WORKFLOWS = [p.stem for p in (Path(__file__).parents[2] / "workflows").glob("*.json")]


def test_eight_sections_with_a_verdict_and_a_baseline_each(monkeypatch, tmp_path, capsys):
    def load(name):
        return types.SimpleNamespace(section=lambda report: report.add_subheading(name))

    monkeypatch.setattr(demo.importlib, "import_module", load)
    assert main(["demo", "--out", str(tmp_path / "r.html")]) == 0
    text, printed = (tmp_path / "r.html").read_text(), capsys.readouterr()
    lines = printed.out.splitlines()
    assert [line.split("  ")[0] for line in lines[:-1]] == [f"{i} of 8" for i in range(1, 9)]
    assert printed.err == "demo: loading\n"
    assert all(" left" in line for line in lines[:-1]) and lines[-1].startswith("report: ")
    sections = text.split("<h2 ")[1:]
    assert len(sections) == 8 and text.count('<li><a href="#section-') == 8
    for section in sections:
        assert "verdict " in section and "trivial baseline: " in section and "<svg" in section
        assert "Try this next: " in section and "vitrine.evidence." in section


def test_what_it_names_exists():
    results = read_results()
    for stage in demo.STAGES:
        assert set(stage.claims) <= set(results)
        named = stage.next.split("*")[1]
        assert any(name.startswith(named) for name in WORKFLOWS), named
