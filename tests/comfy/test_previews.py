"""Pictures that appear on a node while it works, as ComfyUI's own bar is given them."""

import numpy as np
import pytest
import torch


@pytest.fixture(scope="module")
def runs(comfy, beside, tmp_path_factory):
    return beside("hard").Scene(comfy, tmp_path_factory.mktemp("previews")).runs()


@pytest.fixture
def pictures(comfy, monkeypatch):
    """What the bar showed: (step, total, picture or None)."""
    from comfy import utils
    from vitrine.nodes.comfy import progress

    seen = []
    monkeypatch.setattr(progress, "REST", 0.0)
    monkeypatch.setattr(
        utils, "PROGRESS_BAR_HOOK", lambda step, total, preview, **_: seen.append((step, total, preview and preview[1]))
    )
    return seen


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", ["Verify Blocking (NEMO)", "Person from Picture (W2W)", "Train One-Step Student (EMD)"]
)
def test_long_nodes_show_what_they_have_come_to(runs, pictures, name):
    runs[name]()
    shown = [np.asarray(p) for _, _, p in pictures if p is not None]
    assert len(shown) >= (1 if name == "Train One-Step Student (EMD)" else 3), "Distill: after its last step"
    for picture in shown:
        assert picture.shape == (512, 512, 3) and picture.std() > 5
        cell = 8 if name == "Train One-Step Student (EMD)" else 32  # of 64 pixels, of latents of 16 cells: crisp
        assert (picture[:cell, :cell] == picture[0, 0]).all()
    assert len(shown) == 1 or not np.array_equal(shown[0], shown[-1])


def test_pictures_rest_between_steps_and_the_last_is_shown(comfy, pictures, monkeypatch):
    from vitrine.nodes.comfy import progress

    monkeypatch.setattr(progress, "REST", 3600.0)
    advance = progress.progress()
    for step in range(1, 6):
        advance(step, 5, torch.full((1, 3, 8, 12), step / 5))
    assert [step for step, _, picture in pictures if picture is not None] == [1, 5]
    last = pictures[-1][2]
    assert last.size == (504, 336) and np.asarray(last).min() == 255


def test_latents_without_colours_have_no_picture(comfy, pictures):
    from comfy.latent_formats import LatentFormat
    from vitrine.nodes.comfy.progress import progress

    model = comfy.call("VitrineLoadPortraits")[0].clone()
    model.add_object_patch("latent_format", LatentFormat())
    progress(model)(1, 2, torch.zeros(1, 4, 8, 8))
    assert pictures == [(1, 2, None)]
