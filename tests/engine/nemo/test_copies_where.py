"""What the copy check measures: which picture is nearest and where."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.noise import seeded_noise
from vitrine.engine.io.table_on_disk import RowFile
from vitrine.engine.nemo.nearest import LENGTH, PictureIndex, overlay, thumbnails
from vitrine.engine.network.condition import Condition
from vitrine.engine.portraits import load_portraits, render, sample_scenes
from vitrine.evidence.nemo.guidance_difference import guidance_difference

SHAPE = (4, 16, 16)


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
        same = PictureIndex(table, grey.expand(3, -1, -1, -1))
        near = same.nearest(grey[None])
    assert float(near.areas) == 0 and bool(near.maps.isinf().all())


def test_without_pictures_samples_meet_each_other_and_never_themselves(pictures):
    near = PictureIndex(None, pictures[4:10]).nearest(torch.stack([pictures[0], pictures[1], pictures[0]]))
    assert near.numbers.tolist()[::2] == [2, 0] and near.copied.tolist() == [True, False, True]
    assert float(near.ratios[1]) > 0.3


def test_thumbnails_are_means_of_areas():
    large = torch.rand(2, 3, 128, 192)
    assert torch.allclose(thumbnails(large)[0, 1, 3, 5], large[0, 1, 6:8, 15:18].mean(), atol=1e-6)


# --- rival scores --------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def portraits():
    return load_portraits()


def conditions(portraits, *texts):
    with torch.no_grad():
        return [Condition(row[None]) for row in portraits.encode(list(texts))]


def test_the_empty_prompt_makes_no_guidance_difference(portraits):
    (empty,) = conditions(portraits, "")
    scores = guidance_difference(Denoiser.from_diffusers(portraits.pipeline()), empty, empty, SHAPE, [51, 52])
    assert scores["norm"] < 1e-4 and scores["sharpness"] < 1e-4
    assert abs(scores["cosine"]) < 1 and math.isfinite(scores["anisotropy"])


def test_norm_cosine_and_sharpness_against_their_formulas(portraits):
    denoiser = Denoiser.from_diffusers(portraits.pipeline())
    cond, empty = conditions(portraits, "a smiling tan face with bald head on blue", "")
    scores = guidance_difference(denoiser, cond, empty, SHAPE, [7], weights=(2.0, 0.5), stride=1e-3)
    x, both = seeded_noise([7], SHAPE), Condition.batch([cond, empty])

    def eps(x, t):
        return portraits.unet(torch.cat([x, x]), torch.tensor(t), both.text).sample.chunk(2)

    with torch.no_grad():
        (c, u), (late_c, late_u) = eps(x, 981.0), eps(x, 41.0)
    cosine = torch.nn.functional.cosine_similarity(late_u, late_c - late_u, dim=1).mean()
    assert scores["norm"] == pytest.approx(float((c - u).norm()), rel=1e-4)
    assert scores["cosine"] == pytest.approx(float(cosine), abs=1e-4)
    assert scores["anisotropy"] == pytest.approx(2 * scores["norm"] + 0.5 * scores["cosine"], rel=1e-5)
    sigma = float(denoiser.schedule.scales(981.0)[1])

    def score(x):  # eps is minus sigma times the score
        c, u = eps(x, 981.0)
        return -(c - u) / sigma

    with torch.no_grad():
        d = score(x)
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        _, along = torch.autograd.functional.jvp(score, x, d)
    assert scores["sharpness"] == pytest.approx(float(along.norm()), rel=0.02)
