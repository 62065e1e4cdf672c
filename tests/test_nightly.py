"""The nightly lane's runner, on a suite of three files made here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vitrine_tests import nightly

SUITE = {
    "test_passes.py": "import pytest\n\n@pytest.mark.nightly\ndef test_it():\n    pass\n\n"
    "def test_quick():\n    pass\n",
    "test_fails.py": "import pytest\n\n@pytest.mark.nightly\n@pytest.mark.parametrize('n', [1, 2])\ndef test_it(n):\n"
    "    assert n == 1\n",
    "test_quick.py": "def test_it():\n    pass\n",
}
LONG = nightly.Piece("long", ("tests/test_quick.py",), {"LENGTH": "full"})


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """A project with two marked files and one long piece; returns its record's path."""
    (tmp_path / "tests").mkdir()
    for name, text in SUITE.items():
        (tmp_path / "tests" / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -m 'not nightly'\nmarkers =\n    nightly: slow\n")
    monkeypatch.setattr(nightly, "ROOT", tmp_path)
    monkeypatch.setattr(nightly, "RECORD", tmp_path / "tests" / "nightly.json")
    monkeypatch.setattr(nightly, "LONG", (LONG,))
    monkeypatch.setattr(nightly, "commit", lambda: "first")
    return tmp_path / "tests" / "nightly.json"


def entries(record):
    return json.loads(record.read_text())


def test_each_piece_is_recorded(suite, capsys):
    assert nightly.main([]) == 1
    found = entries(suite)
    assert {name: entry["result"] for name, entry in found.items()} == {
        "tests/test_fails.py": "failed", "tests/test_passes.py": "passed", "long": "passed",
    }  # fmt: skip
    assert found["tests/test_fails.py"]["failures"] == ["tests.test_fails::test_it[2]"]
    assert found["tests/test_passes.py"] | {"date": "", "seconds": 0} == {
        "command": "pytest tests/test_passes.py -m nightly", "commit": "first", "date": "", "seconds": 0,
        "result": "passed", "passed": 1, "skipped": 0,
    }  # fmt: skip
    assert found["long"]["command"].startswith("LENGTH=full pytest")
    assert "test_fails" in capsys.readouterr().out


def test_what_passed_is_not_run_again_at_the_same_commit(suite, capsys, monkeypatch):
    nightly.main(["*passes*"])
    assert nightly.main(["--list"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["tests/test_fails.py", "long"]
    monkeypatch.setattr(nightly, "commit", lambda: "second")
    nightly.main(["--list"])
    assert "test_passes" in capsys.readouterr().out
    nightly.main(["--missing", "--list"])
    assert "test_passes" not in capsys.readouterr().out


def test_a_release_asks_for_a_pass_of_every_piece(suite, monkeypatch):
    assert nightly.main(["--check"]) == 1
    (suite.parent / "test_fails.py").unlink()
    nightly.main([])
    assert nightly.main(["--check"]) == 0


def test_an_interrupted_piece_leaves_no_result(suite):
    (suite.parent / "test_fails.py").write_text(
        "import pytest\n\n@pytest.mark.nightly\ndef test_it():\n    raise KeyboardInterrupt\n"
    )
    nightly.main([])
    assert set(entries(suite)) == {"tests/test_passes.py", "long"}


def test_the_lane_names_files_that_exist():
    root = Path(nightly.__file__).parents[1]
    for piece in nightly.LONG:
        for path in (a for a in piece.arguments if a.startswith("tests")):
            assert (root / path).exists(), path
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    command = [sys.executable, "tests/nightly.py", "--list"]
    listed = subprocess.run(command, cwd=root, env=clean, capture_output=True, text=True, check=True).stdout
    assert set(listed.splitlines()) <= {p.name for p in nightly.pieces()}
