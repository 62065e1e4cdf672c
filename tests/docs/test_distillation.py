"""docs/python.md on distillation: at most ten lines, which run as they are on the shipped model."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
CODE = next(
    block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S) if "training_parts" in block
)


def test_it_is_ten_lines_at_most():
    assert len(CODE.splitlines()) <= 10


@pytest.mark.nightly
def test_it_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(CODE, str(PAGE), "exec"), names)  # noqa: S102 - the page's own code
    assert capsys.readouterr().out.startswith("gz 0.0")
    assert names["kohya"].name.endswith("_kohya.safetensors") and names["kohya"].is_file() and names["others"]
