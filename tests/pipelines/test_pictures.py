"""What goes into a tap: sizes, ranges, bit depths and random numbers."""

import numpy as np
import pytest
import torch
from PIL import Image
from vitrine.engine.activations.picture_latents import to_pixels, value_range_of
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines import ActivationTapPipeline, CorrespondencePipeline, SegmentationPipeline
from vitrine.engine.portraits import load_portraits, render, sample_scenes

pytestmark = pytest.mark.rounding
PLACE = "up-level0-repeat0-res-increment"
TAP = {"addresses": [PLACE], "timestep": 50, "seeds": [0]}


@pytest.fixture(scope="module")
def stock():
    return load_portraits().pipeline()


@pytest.fixture(scope="module")
def drawn():
    return render(sample_scenes(range(7_000_000, 7_000_004)))


def pil(picture, size):
    return Image.fromarray((picture * 255).round().byte().permute(1, 2, 0).numpy()).resize(size, Image.BICUBIC)


def activation(pipe, *args, **settings):
    return pipe.tap(*args, addresses=PLACE, output_type="none", **settings).activations[PLACE].tensor


@pytest.mark.parametrize("size", [None, 64])
def test_points_travel_between_pictures_of_different_sizes(stock, drawn, size):
    pipe = CorrespondencePipeline.from_pipe(stock)
    asked = drawn.keypoints[0, :3]
    (same,) = pipe.match(drawn.images[:1], drawn.images[1:2], asked, **TAP)
    (found,) = pipe.match(drawn.images[:1], pil(drawn.images[1], (64, 96)), asked, size=size, **TAP)
    assert float((found.points - same.points).norm(dim=1).median()) < (0.02 if size else 0.1)


def test_size_makes_one_batch_of_targets_of_different_sizes(stock, drawn):
    pipe = CorrespondencePipeline.from_pipe(stock)
    asked = drawn.keypoints[0, :3]
    targets = [pil(drawn.images[1], (70, 90)), pil(drawn.images[2], (128, 128))]
    with pytest.raises(VitrineError, match="set size="):
        pipe.match(drawn.images[:1], targets, asked, **TAP)
    together = pipe.match(pil(drawn.images[0], (50, 60)), targets, asked, size=64, **TAP)
    alone = [pipe.match(pil(drawn.images[0], (50, 60)), t, asked, size=64, **TAP)[0] for t in targets]
    assert all(torch.allclose(a.points, b.points, atol=1e-4) for a, b in zip(together, alone, strict=True))


def test_masks_are_learned_and_given_in_the_pictures_own_sizes(stock, drawn):
    pipe = SegmentationPipeline.from_pipe(stock)
    truth = (drawn.parts == 0).long()
    larger = truth[1].repeat_interleave(2, 0).repeat_interleave(2, 1)
    known = [pil(drawn.images[0], (64, 64)), pil(drawn.images[1], (128, 128))]
    labels = pipe.segment(known, [truth[0], larger], pil(drawn.images[2], (128, 64)), size=64, **TAP)
    assert labels.shape == (1, 64, 128)
    assert float((labels[:, :, ::2] == truth[2:3]).float().mean()) > 0.8
    mixed = pipe.segment(
        known, [truth[0], larger], [pil(p, (64 + 8 * i, 64)) for i, p in enumerate(drawn.images)], size=64, **TAP
    )
    assert mixed.shape == (4, 64, 64)
    with pytest.raises(VitrineError, match="one per picture"):
        pipe.segment(known, [truth[0], truth[1]], known, size=64, **TAP)


def test_the_factor_is_the_vaes(stock, drawn):
    """The portraits' VAE divides by 4, so that 60 pixels are welcome; 62 are refused by every door."""
    fine, odd = (pil(drawn.images[0], (side, side)) for side in (60, 62))
    (match,) = CorrespondencePipeline.from_pipe(stock).match(fine, fine, [[0.5, 0.5]], **TAP)
    assert bool(match.mutual.all())
    segmentation = SegmentationPipeline.from_pipe(stock)
    mask = torch.zeros(1, 60, 60, dtype=torch.long)
    mask[:, 30:] = 1
    assert segmentation.segment(fine, mask, fine, **TAP).shape == (1, 60, 60)
    calls = [
        lambda: CorrespondencePipeline.from_pipe(stock).match(odd, odd, [[0.5, 0.5]], **TAP),
        lambda: segmentation.segment(odd, torch.ones(1, 62, 62).long(), odd, **TAP),
        lambda: segmentation.rank([odd, odd]),
    ]
    for call in calls:
        with pytest.raises(VitrineError, match="multiples of 4"):
            call()


def test_a_generator_draws_the_posterior_sample_and_then_the_noise(stock, drawn):
    pipe = ActivationTapPipeline.from_pipe(stock)
    pixels = drawn.images[:2]
    taps = [
        activation(pipe, pixels, posterior="sample", generator=torch.Generator().manual_seed(seed))
        for seed in (0, 9, 9)
    ]
    assert torch.equal(taps[1], taps[2]) and not torch.allclose(taps[0], taps[1], atol=1e-2)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        posterior = pipe.vae.encode(pixels * 2 - 1).latent_dist
    latents = posterior.sample(generator) * pipe.vae.config.scaling_factor
    assert torch.allclose(activation(pipe, latents, generator=generator), taps[1], atol=1e-5)
    # only the posterior sample differs, the noise is the same
    clean = [
        activation(pipe, pixels, posterior="sample", generator=[torch.Generator().manual_seed(s)] * 2) for s in (1, 1)
    ]
    assert torch.equal(*clean) and not torch.allclose(clean[0][0], clean[0][1], atol=1e-3)


def test_bright_tensors_keep_their_meaning(stock, drawn):
    bright = 0.5 + drawn.images[:1] / 2  # in [-1, 1] nothing of it is negative
    pipe, signed = ActivationTapPipeline.from_pipe(stock), bright * 2 - 1
    expected = activation(pipe, bright)
    assert torch.allclose(activation(pipe, signed, value_range=(-1, 1)), expected, atol=1e-5)
    dark = drawn.images[1] * 2 - 1
    assert torch.allclose(activation(pipe, [signed[0], dark])[:1], expected, atol=1e-4), "one call, one range"
    with pytest.raises(VitrineError, match="value_range"):
        pipe.tap(signed, addresses=PLACE, value_range=(0, 255))
    with pytest.raises(VitrineError, match="image values"):
        pipe.tap(dark, addresses=PLACE, value_range=(0, 1))
    assert value_range_of([bright, [dark]]) == (-1, 1) and value_range_of([bright]) == (0, 1)


def test_bright_pictures_are_converted_once(stock, drawn):
    """Correspondence handed its pixels on as if they were a caller's, who meant [0, 1]."""
    bright = 0.5 + drawn.images[:2] / 2
    pipe = CorrespondencePipeline.from_pipe(stock)
    asked = drawn.keypoints[0, :3]
    (tensors,) = pipe.match(bright[:1], bright[1:], asked, **TAP)
    arrays = bright.permute(0, 2, 3, 1).numpy()
    (expected,) = pipe.match(arrays[:1], np.concatenate([arrays[1:], np.zeros_like(arrays[:1])]), asked, **TAP)[:1]
    assert torch.allclose(tensors.similarity, expected.similarity, atol=1e-4)


@pytest.mark.parametrize("mode", ["I;16", "I"])
def test_sixteen_bit_pictures_are_read_whole(tmp_path, drawn, mode):
    grey = drawn.images[0].mean(0)
    deep = Image.fromarray((grey * 65535).round().to(torch.int32).numpy().astype("uint16"))
    deep.save(tmp_path / "deep.png")
    opened = Image.open(tmp_path / "deep.png")
    opened = opened.convert("I") if mode == "I" else opened
    assert opened.mode == mode
    pixels = to_pixels(opened)
    assert torch.allclose(pixels[0], (grey * 2 - 1).expand(3, -1, -1), atol=1e-4)
    assert torch.allclose(to_pixels(np.repeat(np.array(opened).astype("uint16")[..., None], 3, -1)), pixels)
    with pytest.raises(VitrineError, match="8 or 16 bits"):
        to_pixels(Image.fromarray(np.full((8, 8), 70000, dtype="int32")))
