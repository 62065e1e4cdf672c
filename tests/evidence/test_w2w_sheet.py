"""The contact sheet of sliders: who is on it, what it shows, and that its first column is the unedited person."""

import pytest
import torch
from PIL import Image
from vitrine.engine.cli.main import main
from vitrine.evidence.w2w.graded import MEASURED, Sitting, smaller_space
from vitrine.evidence.w2w.sheet import Sheet
from vitrine.evidence.w2w.world import Studio


def test_a_small_sheet(tmp_path):
    sheet = Sheet.draw(("glasses",), people=2, steps=4)
    pictures, seen = sheet.pictures["glasses"], sheet.probability["glasses"]
    assert pictures.shape == (2, 5, 3, 64, 64) and len(seen) == 5
    studio = Studio.open(None, smaller_space())
    sitting = Sitting.open(studio, "glasses", MEASURED, 2, 4)
    assert torch.equal(pictures[:, 0], sitting.moved(0.0)[:, 0])
    assert seen[-1] > seen[0] + 0.3
    with Image.open(sheet.write(tmp_path / "s.png")) as image:
        assert image.size == (5 * 64 + 8, 2 * 64 + 14 + 8)


@pytest.mark.parametrize("words", [["--labels", "beards"], ["--people", "0"]])
def test_unknown_sliders_are_refused(capsys, words):
    assert main(["w2w", "sheet", *words]) == 2
    assert "glasses, beard" in capsys.readouterr().err
