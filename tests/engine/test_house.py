"""The rules of the house that a machine can check, and the command line."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
from PIL import Image, ImageChops
from vitrine.engine.charts import line_chart
from vitrine.engine.cli.main import main
from vitrine.engine.errors import VitrineError
from vitrine.evidence import registry as claims
from vitrine.evidence import reproduce
from vitrine.evidence.report import Report

ROOT = Path(__file__).parents[2]
CODE = [*(p for wing in ("engine", "nodes", "evidence") for p in ROOT.glob(f"{wing}/**/*.py")), ROOT / "__init__.py"]


def test_the_package_list_matches_the_folders():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = [".".join(["vitrine", *p.parent.relative_to(ROOT).parts]) for p in CODE if p.name == "__init__.py"]
    assert sorted(listed) == sorted(set(found))


@pytest.mark.parametrize("path", CODE, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_in_their_room(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 450 and "utils" not in path.name
    tree = ast.parse(text)
    imported = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    absolute = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module and not n.level]
    imported |= {n.module.split(".")[0] for n in absolute}
    if "engine" in path.relative_to(ROOT).parts:
        assert not imported & {"comfy", "comfy_api", "folder_paths", "nodes", "execution"}
    assert not imported & {"pickle", "dill"}


@pytest.mark.parametrize("path", CODE, ids=lambda p: str(p.relative_to(ROOT)))
def test_public_functions_are_documented(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            inner = isinstance(node, ast.FunctionDef) and node.col_offset != 0
            assert inner or ast.get_docstring(node), f"{path.name}: {node.name}"


def test_importing_the_pack_is_cheap():
    heavy = "{'torch', 'diffusers', 'peft', 'sklearn', 'transformers'}"
    cheap = {"vitrine": "", "vitrine.engine.hooks": "torch", "vitrine.engine.activations": "torch"}
    for module, allowed in cheap.items():
        code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        assert out == (f"['{allowed}']" if allowed else "[]"), module


def test_claims_are_found_by_name_and_glob():
    assert {"portraits.quality", "portraits.memorized"} <= set(claims.all_claims())
    assert {c.name.split(".")[0] for c in claims.pick_claims(["portraits.*"])} == {"portraits"}
    with pytest.raises(VitrineError, match="Did you mean portraits.quality"):
        claims.pick_claims(["portraits.qualty"])


def test_a_claim_that_fails_stays_in_the_list(tmp_path, monkeypatch, capsys):
    def failing(model=None, progress=None):
        line = claims.Curves("trend", "x", "y", {"ours": [(0.0, 1.0), (1.0, 2.0)]})
        return claims.ClaimResult(0.5, (0.4, 0.6), False, {"why": "too small"}, (line,))

    wanted = claims.Claim("test.fails", "none", "a figure", ">= 0.9", failing)
    monkeypatch.setattr(reproduce, "pick_claims", lambda names: [wanted])
    out = tmp_path / "deep" / "claims.json"
    assert reproduce.reproduce([], out, None) == 1
    (entry,) = json.loads(out.read_text())
    assert entry["holds"] is False and entry["command"] == "vitrine reproduce test.fails"
    assert {"claim", "paper", "figure", "value", "interval", "target", "holds", "command", "seconds"} <= set(entry)
    assert "DOES NOT HOLD" in capsys.readouterr().out and not list(tmp_path.rglob("*.tmp"))
    assert entry["curves"][0]["series"] == {"ours": [[0, 1], [1, 2]]}
    assert Image.open(out.with_name("claims-test.fails-1.png")).size == (560, 320)


def test_a_legend_covers_no_line():
    rising = [(float(i), float(i)) for i in range(9)]
    for line in (rising, [(x, 8 - y) for x, y in rising]):
        with_name, without = (line_chart({name: line}, "t", "x", "y") for name in ("a long name of a line", ""))
        names = ImageChops.difference(with_name, without).getbbox()
        drawn = ImageChops.invert(without.convert("L")).crop(names).point(lambda v: 255 * (v > 60))
        assert names is not None and drawn.getbbox() is None


def test_the_command_line_explains_mistakes(capsys):
    assert main(["reproduce", "nothing.such"]) == 2
    assert "accepted" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])


def test_the_report_is_self_contained(tmp_path):
    report = Report("A <title>", "lead")
    report.add_heading("One & two")
    report.add_paragraph("run `vitrine <x>`, then `y`")
    report.add_images([(Image.new("RGB", (4, 4)), 'caption "quoted"')])
    report.add_table([("a", "b"), (1, "<2>")])
    text = report.write(tmp_path / "report.html").read_text()
    assert "A &lt;title&gt;" in text and "&lt;2&gt;" in text and "data:image/png;base64," in text
    assert "<p>run <code>vitrine &lt;x&gt;</code>, then <code>y</code></p>" in text
    assert "http" not in text and not list(tmp_path.glob("*.tmp"))
