"""What copies are judged by: which training picture is nearest, and where."""

import pytest
import torch
from vitrine.engine.copies.nearest import LENGTH, PictureIndex, overlay, thumbnails
from vitrine.engine.io.table_on_disk import RowFile
from vitrine.engine.portraits import render, sample_scenes


@pytest.fixture(scope="module")
def pictures():
    return render(sample_scenes(range(12))).images


@pytest.fixture(scope="module")
def table(pictures, tmp_path_factory):
    table = RowFile(tmp_path_factory.mktemp("pictures"), (4, LENGTH), torch.float16)
    table.write(0, pictures[:4].flatten(1))
    return table


@pytest.mark.parametrize("rows", [1, 3, 1024])
def test_the_nearest_picture_and_the_part_that_is_copied(pictures, table, rows):
    index = PictureIndex(table, pictures[4:10], rows)
    half = pictures[10].clone()
    half[:, :, :32] = pictures[2][:, :, :32]
    near = index.nearest(torch.stack([pictures[1], half, pictures[11]]))
    assert near.copied.tolist() == [True, False, False] and near.numbers[:2].tolist() == [1, 2]
    assert float(near.ratios[0]) < 0.01 and float(near.similar[0]) > 0.99
    copied = near.maps[1] < 1 / 3
    differing = (pictures[2] - pictures[10]).abs().amax(0) > 0.1  # both may have the same plain colour there
    assert float(copied[:, :24].float().mean()) > 0.6 and float(copied[:, 40:][differing[:, 40:]].float().mean()) < 0.05
    shown = overlay(half, near.maps[1])
    assert torch.equal(shown[:, copied & (near.maps[1] < 1 / 3)], half[:, copied])
    assert float(shown[:, 0, -1].std(correction=0)) == pytest.approx(0, abs=1e-6), "what is not copied is grey"


def test_what_is_usual_is_each_pictures_own_and_plain_places_tell_nothing(pictures, tmp_path):
    grey, vivid = torch.full_like(pictures[0], 0.5), pictures[0]
    with RowFile(tmp_path, (2, LENGTH), torch.float16) as table:
        table.write(0, torch.stack([grey, vivid]).flatten(1))
        index = PictureIndex(table, pictures[4:10])
        assert index._levels[0] < index._levels[1]
        same = PictureIndex(table, grey.expand(3, -1, -1, -1) + 0.02)
        near = same.nearest(grey[None])
    assert float(near.areas) == 0 and bool(near.maps.isinf().all())


def test_without_pictures_samples_meet_each_other_and_never_themselves(pictures):
    near = PictureIndex(None, pictures[4:10]).nearest(torch.stack([pictures[0], pictures[1], pictures[0]]))
    assert near.numbers.tolist()[::2] == [2, 0] and near.copied.tolist() == [True, False, True]
    assert float(near.ratios[1]) > 0.3


def test_thumbnails_are_means_of_areas():
    large = torch.rand(2, 3, 128, 192)
    assert torch.allclose(thumbnails(large)[0, 1, 3, 5], large[0, 1, 6:8, 15:18].mean(), atol=1e-6)
