"""The contact sheet of sliders: who is on it, what it shows, and that its first column is the unedited person."""

import pytest
import torch
from PIL import Image
from vitrine.cli.main import main
from vitrine.engine.w2w.edit.even_strengths import StrengthMap
from vitrine.evidence.w2w.graded import MEASURED, Sitting, smaller_space
from vitrine.evidence.w2w.pair_sliders import shipped_change
from vitrine.evidence.w2w.people import Studio, people_space
from vitrine.evidence.w2w.sheet import Sheet


@pytest.mark.nightly
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


def test_what_the_tuning_people_said_is_taken_from_the_table(tmp_path):
    points = StrengthMap((0.0, 2.0, 4.0), 850.0)
    table = {"red hair": {"map": points.to_dict(), "from pairs": True}}
    sheet = Sheet.draw(("red hair",), people=2, calibrated=True, steps=2, table=table)
    sitting = Sitting.open(Studio.open(None, smaller_space()), "red hair", MEASURED, 2, 2)
    change = shipped_change(people_space(), "red hair")
    assert change is not None
    assert torch.equal(sheet.pictures["red hair"][:, 4], sitting.moved(4.0, change, 850.0)[:, 0])
    missing = ["w2w", "sheet", "--table", str(tmp_path / "none.json")]
    assert main(missing) == 2


@pytest.mark.parametrize(
    ("words", "said"), [(["--labels", "beards"], "glasses, beard"), (["--people", "0"], "1 or more")]
)
def test_unknown_sliders_are_refused(capsys, words, said):
    assert main(["w2w", "sheet", *words]) == 2
    assert said in capsys.readouterr().err
