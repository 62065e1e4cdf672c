"""Checkpoints of one run: which files they are, and what walks, lines, zeros and restarts are called."""

import json
import re

import pytest
import torch
from vitrine.cli.main import main
from vitrine.engine.copies.run_page import drawing
from vitrine.engine.copies.training_runs import (
    CopiesAtStep,
    checkpoints_beside,
    named_runs,
    runs_among,
    training_run,
    with_copies,
)
from vitrine.engine.io.lora_layer import LoraLayer
from vitrine.engine.io.lora_writing import write_lora
from vitrine.engine.portraits.shipped import PEOPLE_LORAS
from vitrine.engine.w2w.loras.lora_files import read_header

PATH = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"


def course(rows, from_zero=True):
    """A run of vectors (N, D), one checkpoint each."""
    rows = torch.as_tensor(rows, dtype=torch.float64)
    return training_run("run", [str(100 * (i + 1)) for i in range(len(rows))], rows @ rows.T, from_zero)


def noise(count, seed=0):
    return torch.randn(count, 4000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 4000**0.5


def path_of(signal, seed=0):
    """Stretches of one direction, of a strength each, plus noise of length 1."""
    direction = noise(1, 99)[0] / noise(1, 99)[0].norm()
    return (torch.tensor(signal, dtype=torch.float64)[:, None] * direction + noise(len(signal), seed)).cumsum(0)


def test_a_line_learns_a_walk_wanders_and_one_that_fades_wanders_from_its_middle_on():
    line, walk = course(path_of([1.0] * 8)), course(path_of([0.0] * 8))
    assert (line.headline, line.verdict) == ("Still learning", "fine")
    assert (walk.headline, walk.verdict) == ("Wandering from the start", "look")
    fades = course(path_of([1, 1, 1, 1, 0, 0, 0, 0]))
    assert fades.headline == "Wandering from step 400 on"
    assert [of.suggested for of in (line, walk, fades)] == [None] * 3, "which is nicer, only samples say"
    slow = course(path_of([1, 0.9, 0.7, 0.6, 0.45, 0.4]))
    assert slow.headline == "Learning slows down" and slow.checkpoints[-1].cosine == pytest.approx(0.15, abs=0.06)


@pytest.mark.parametrize("seed", range(6))
def test_a_walk_is_never_called_learning_and_a_line_never_wandering(seed):
    assert course(path_of([0.0] * 7, seed)).headline.startswith("Wandering")
    assert course(path_of([1.0] * 7, seed)).headline == "Still learning"


def test_the_cosine_is_that_of_the_stretches_and_the_first_one_begins_at_zero():
    rows = path_of([1, 0.5, 0.2, 0])
    stretches = torch.cat([rows[:1], rows.diff(dim=0)])
    true = torch.nn.functional.cosine_similarity(stretches[1:], stretches[:-1])
    points = course(rows).checkpoints
    assert [p.cosine for p in points[1:]] == pytest.approx(true.tolist(), abs=1e-9) and points[0].cosine is None
    assert [p.to_last for p in points] == pytest.approx((rows[-1] - rows).norm(dim=1).tolist(), abs=1e-6)
    whole = course(rows + 50, from_zero=False).checkpoints
    assert whole[1].cosine is None and whole[2].cosine == pytest.approx(points[2].cosine, abs=1e-6)


def test_zeros_equal_files_and_a_run_that_stopped_are_named():
    nothing = course(torch.zeros(5, 10))
    assert nothing.headline == "This training did nothing" and "5 files of exactly zero change" in nothing.text
    assert nothing.verdict == "bad"
    equal = course(noise(1).expand(4, -1))
    assert equal.headline == "Nothing was learned between these files"
    rows = path_of([1.0] * 6)
    rows[3:] = rows[3]
    assert course(rows).headline == "Nothing changes after step 400"
    assert course(rows[:2]).verdict == "not measured"


def test_a_restart_is_named_by_its_step():
    first, second = path_of([1.0] * 4), path_of([1.0] * 4, seed=1)
    assert course(torch.cat([first, second])).headline == "Restarted at step 500"
    start = 20 * noise(1, 5)  # of a whole model the beginning is not known
    assert (
        course(torch.cat([first, second - 8 * first[-1]]) + start, from_zero=False).headline == "Restarted at step 500"
    )
    assert course(path_of([1.0] * 8) + start, from_zero=False).headline == "Still learning"


def names(runs):
    return [(labelled, [step for step, _ in members]) for labelled, members in runs]


def test_names_that_differ_by_a_step_are_a_run(tmp_path):
    def paths(*stems):
        return [tmp_path / f"{stem}.safetensors" for stem in stems]

    assert names(named_runs(paths("a-000010", "a-000002", "b"))) == [(True, [2, 10])]
    assert names(named_runs(paths("s1_step100", "s1_step20", "s2_step100", "s2_step20"))) == [(True, [20, 100])] * 2
    assert names(named_runs(paths("epoch=1-step=50", "epoch=2-step=100"))) == [(True, [50, 100])]
    assert names(named_runs(paths("person-0003", "person-0007"))) == [(False, [3, 7])]
    folders = [tmp_path / f"checkpoint-{n}" / "pytorch_lora_weights.safetensors" for n in (500, 1000)]
    assert names(named_runs(folders)) == [(True, [500, 1000])]
    assert named_runs(paths("cat", "dog", "a1b")) == []


def write(folder, stem, vector):
    """A LoRA of one layer whose change is the vector."""
    down = torch.eye(8)
    return write_lora(folder / f"{stem}.safetensors", {PATH: LoraLayer(down, vector.float().view(-1, 8), 8.0)})


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "loras"
    folder.mkdir()
    for i, row in enumerate(path_of([1, 1, 1, 0, 0, 0])[:, :4000]):
        write(folder, f"style-{i + 1:06d}" if i < 5 else "style", row)
    return folder


def test_the_command_says_a_run_of_n_checkpoints_and_shows_it(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["lora", "report", str(folder), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "style: a run of 6 checkpoints, steps 1 to last" in said and "Wandering from step 3 on [look]" in said
    page = (out / "report.html").read_text()
    assert "a run of 6 checkpoints" in page and "Wandering from step 3 on" in page and page.count("<svg") == 1
    assert "evenly spaced" in page
    (run,) = json.loads((out / "report.json").read_text())["runs"]
    assert run["try_first"] is None and len(run["checkpoints"]) == 6
    rows = torch.nn.functional.normalize(path_of([1, 1, 1, 0, 0, 0]).diff(dim=0))
    assert run["checkpoints"][2]["cosine_with_the_stretch_before"] == pytest.approx(float(rows[0] @ rows[1]), abs=1e-3)


def test_checkpoints_in_the_folder_count_and_are_no_neighbours(folder, tmp_path):
    assert main(["lora", "report", str(folder / "style-000004.safetensors"), "--folder", str(folder),
                 "--out", str(tmp_path / "out")]) == 0  # fmt: skip
    table = json.loads((tmp_path / "out" / "report.json").read_text())
    assert len(table["runs"][0]["checkpoints"]) == 6
    assert table["loras"][0]["summary"][4]["verdict"] == "not measured"


def test_diffusers_folders_are_a_run_and_its_last_file_is_the_last_step_or_one_more(tmp_path):
    folder, rows = tmp_path / "made", path_of([1.0] * 5)
    for number, row in zip((500, 1000, 1500), rows, strict=False):
        write(folder / f"checkpoint-{number}", "pytorch_lora_weights", row)
    final = folder / "pytorch_lora_weights.safetensors"
    write(folder, final.stem, rows[2])
    assert len(checkpoints_beside(final)) == 3, "the last step, written twice"
    write(folder, final.stem, rows[4])
    runs = [checkpoints_beside(path) for path in (final, folder / "checkpoint-500" / final.name)]
    assert runs[0] == runs[1] and len(runs[0]) == 4 and runs[0][-1] == final
    (run,) = runs_among([read_header(final)], runs[0])
    assert run.name == "made" and [point.label for point in run.checkpoints] == ["500", "1000", "1500", "last"]


def test_loras_of_different_people_are_no_run(tmp_path):
    files = sorted(PEOPLE_LORAS.glob("*.safetensors"))[:6]
    assert all(re.search(r"person-\d+$", file.stem) for file in files)
    assert main(["lora", "report", *map(str, files), "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["runs"] == []


def test_copies_come_first_in_the_verdict_and_the_step_before_is_suggested():
    run = course(path_of([1.0] * 5))
    clean, copies = CopiesAtStep(0, 4, 0.1, False), CopiesAtStep(3, 4, 0.9, True)
    judged = with_copies(run, [clean, clean, copies, copies, copies])
    assert judged.headline == "Copies from step 300 on" and judged.verdict == "bad" and judged.suggested == 1
    assert "Try step 200 first" in judged.text and judged.to_dict()["first_that_copies"] == "300"
    assert with_copies(run, [copies] * 5).suggested is None
    assert "None of 2 sampled checkpoints copies" in with_copies(run, [clean, None, None, None, clean]).text
    assert with_copies(run, [None] * 5).text == run.text


def test_the_drawing_has_a_bar_for_each_stretch_and_a_cell_for_each_sampled_checkpoint():
    run = with_copies(
        course(path_of([1.0] * 5)), [CopiesAtStep(0, 4, 0.0, False), None, None, None, CopiesAtStep(4, 4, 1.0, True)]
    )
    svg = drawing(run)
    assert svg.count("<rect") == 4 + 4 + 2 + 1 and ">0/4<" in svg and ">4/4<" in svg and "▼ try this first" in svg
    assert ">500<" in svg and "nan" not in svg
    assert "nan" not in drawing(course(torch.zeros(4, 3)))
    assert "&lt;" in drawing(training_run("<b>", ["<b>", "2", "3"], torch.eye(3)))
