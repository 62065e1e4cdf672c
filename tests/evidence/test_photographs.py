"""The outside check: points follow the pixels of real photographs, and what must win on them wins."""

import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from vitrine.cli.main import main
from vitrine.engine.activations.correspondence import find_correspondence, pck
from vitrine.engine.errors import VitrineError
from vitrine.evidence import reproduce
from vitrine.evidence.activations.measures import part_agreement_by_picture
from vitrine.evidence.activations.photograph_claims import _pairs, corners, daisy_maps, raw_patches
from vitrine.evidence.photograph_folder import available, composed, read_cutouts, whole_photographs
from vitrine.evidence.registry import Claim, ClaimResult


def test_points_follow_the_pixels_of_the_objects():
    """Around every point, source and target show the same colours: warps of whole photographs as objects."""
    pytest.importorskip("skimage")
    rgba = torch.cat([whole_photographs(), torch.ones(5, 1, 512, 512)], 1)
    small = F.interpolate(rgba, (256, 256), mode="bilinear", antialias=True)
    pairs = _pairs(small.repeat(4, 1, 1, 1), 64)
    assert len(pairs.points) == 20 and sum(map(len, pairs.points)) > 300
    near, far = [], []
    for n, (points, truth) in enumerate(zip(pairs.points, pairs.truth, strict=True)):
        soft = [F.avg_pool2d(p[n : n + 1], 3, 1, 1) for p in (pairs.sources, pairs.targets)]
        colours = [
            F.grid_sample(p, (at * 2 - 1)[None, None], align_corners=False)[0, :, 0]
            for p, at in zip(soft, (points, truth), strict=True)
        ]
        near.append((colours[0] - colours[1]).abs().mean())
        far.append((colours[0] - colours[1].roll(5, 1)).abs().mean())
    assert float(torch.stack(near).mean()) < 0.35 * float(torch.stack(far).mean())


@pytest.mark.parametrize("describe", [raw_patches, daisy_maps])
def test_descriptors_find_points_of_a_shifted_copy(describe):
    pytest.importorskip("skimage")
    squares = whole_photographs()
    pictures = F.interpolate(squares, (64, 64), mode="bicubic", antialias=True).clamp(0, 1)
    points = [corners(square.mean(0), 64) for square in squares]
    first, second = describe(pictures), describe(pictures.roll(4, 3))  # one cell to the right
    truth = [p + torch.tensor([4 / 64, 0]) for p in points]
    matched = [
        find_correspondence(a, b, p, temperature=0.02).points for a, b, p in zip(first, second, points, strict=True)
    ]
    assert pck(matched, truth, [1.0] * len(matched), 0.05)[0] > 0.9


def test_without_scikit_image_the_refusal_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "skimage", None)
    with pytest.raises(VitrineError, match=r"'\.\[demo\]'"):
        whole_photographs()


def test_copied_positions_score_as_labels_coincide():
    parts = torch.zeros(3, 16, 16, dtype=torch.long)
    parts[:, 4:8, 4:8] = 1
    assert torch.equal(part_agreement_by_picture(None, parts), torch.ones(3))
    parts[2] = parts[2].roll(2, 1)
    assert float(part_agreement_by_picture(None, parts)[0]) == pytest.approx(0.75)


# --- a folder of photographed objects --------------------------------------------------------------------------------
@pytest.fixture
def stamps(tmp_path):
    """Two photographs with masks, and what is left out: a drawing, a picture without a mask, one without a caption."""
    noise = np.random.default_rng(0).integers(0, 256, (60, 90, 4), dtype=np.uint8)
    noise[..., 3] = 255
    noise[:10, :, 3] = 0
    folder = tmp_path / "animals" / "deep"
    folder.mkdir(parents=True)
    for name, picture in {
        "ox": Image.fromarray(noise),
        "ant": Image.fromarray(noise[:, ::-1]),
        "uncaptioned": Image.fromarray(noise),
        "drawing": Image.new("RGBA", (60, 60), (200, 0, 0, 255)),
        "whole": Image.fromarray(noise[..., :3]),
    }.items():
        picture.save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"A {name}.\nde.utf8=Ein {name}\n", encoding="utf-8")
    (folder / "uncaptioned.txt").unlink()
    return tmp_path


def test_a_folder_gives_its_photographed_objects(stamps):
    cutouts = read_cutouts(stamps, 64)
    assert [(c.name, c.caption) for c in cutouts] == [("ant", "A ant."), ("ox", "A ox.")]
    rgba = cutouts[1].rgba
    inside = rgba[3] > 0.5
    rows, columns = inside.any(1).nonzero(), inside.any(0).nonzero()
    assert rgba.shape == (4, 64, 64) and int(columns.max() - columns.min()) + 1 == round(0.85 * 64)
    assert int(rows.min()) == 64 - 1 - int(rows.max())  # in the middle
    assert available(stamps) and not available(stamps / "animals")
    with pytest.raises(VitrineError, match="tuxpaint-stamps-default"):
        read_cutouts(stamps / "animals", 64)


def test_objects_stand_before_crops_of_other_photographs():
    pytest.importorskip("skimage")
    rgba = torch.zeros(3, 4, 256, 256)
    rgba[:, :, 64:192, 64:192] = 1
    pictures = composed(rgba, range(5, 8))
    assert (pictures[:, :, 64:192, 64:192] == 1).all()
    assert len({float(p[:, :64].mean()) for p in pictures}) == 3 and torch.equal(pictures, composed(rgba, range(5, 8)))


def test_claims_on_photographs_take_a_folder_and_are_left_out_without_one(stamps, tmp_path, monkeypatch, capsys):
    taken = []

    def measure(model=None, progress=None, quick=False, photographs=None):
        taken.append(photographs)
        return ClaimResult(1.0, None, True)

    claims = [Claim(f"test.{n}", "none", "a figure", ">= 1", m) for n, m in (("a", measure), ("b", lambda **_: None))]
    monkeypatch.setattr(reproduce, "pick_claims", lambda names: claims[:1])
    assert main(["reproduce", "test.a", "--photographs", str(stamps), "--out", str(tmp_path / "out")]) == 0
    assert taken == [str(stamps)]
    monkeypatch.setattr(reproduce, "available", lambda: False)
    assert main(["reproduce", "--out", str(tmp_path / "out")]) == 1 and len(taken) == 1  # nothing was shown
    assert "test.a: not measured, it needs Debian's package tuxpaint-stamps-default" in capsys.readouterr().out
    monkeypatch.setattr(reproduce, "pick_claims", lambda names: claims[1:])
    assert main(["reproduce", "test.b", "--photographs", str(stamps)]) == 2
