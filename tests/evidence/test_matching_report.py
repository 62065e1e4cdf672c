"""The demo's pictures of matching, on an untrained portraits model."""

import pytest
import torch
from vitrine.engine.io.html_page import Report
from vitrine.engine.portraits import PARTS, build_models, render, sample_scenes
from vitrine.evidence.activations import matching_page as matching_report
from vitrine.evidence.activations.matching_page import colour_parts
from vitrine.evidence.activations.measures import by_pair


@pytest.mark.nightly
def test_the_section_has_its_pictures_and_tables(monkeypatch, tmp_path):
    monkeypatch.setattr(matching_report, "SHOTS", 2)
    monkeypatch.setattr(matching_report, "_MEASURED", 4)
    # two labelled portraits lack some parts: take two that together show all of them
    scenes = sample_scenes(range(matching_report.LABELLED, matching_report.LABELLED + 60))
    parts = render(scenes).parts.flatten(1).long()
    shown = torch.nn.functional.one_hot(parts, len(PARTS)).any(1)
    first, second = next((i, j) for i in range(60) for j in range(i) if bool((shown[i] | shown[j]).all()))
    real = matching_report.tap_pictures

    def tapped(model, start, count, sites, progress, misaligned):
        assert misaligned, "copied coordinates would do"
        if start != matching_report.LABELLED:
            return real(model, start, count, sites, progress, misaligned=True)
        return real(model, start, 60, sites, progress).take([first, second])

    monkeypatch.setattr(matching_report, "tap_pictures", tapped)
    page = Report("t")
    matching_report.section(page, model=build_models(seed=0))
    text = page.write(tmp_path / "r.html").read_text()
    assert text.count("<table>") == 2 and text.count("<img") == 3 + 3 + len(PARTS) + 4 + 4 + 4
    assert all(
        name in text for name in ("Find Same Points", "Segment Like This", "portraits-legacy", "copied coordinates")
    )


def test_parts_have_a_colour_each():
    drawn = colour_parts(torch.arange(len(PARTS))[None])
    assert drawn.shape == (3, 1, len(PARTS)) and len(drawn[:, 0].unique(dim=1).T) == len(PARTS)


def test_a_pair_there_and_back_counts_once():
    assert by_pair(torch.tensor([1.0, 0.0, 0.0, float("nan")])).tolist() == [0.5, 0.0]
