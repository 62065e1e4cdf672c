"""The rendered world: exact, seeded, and consistent between pictures, labels, keypoints and captions."""

import numpy as np
import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits import ATTRIBUTES, KEYPOINTS, PARTS, caption, plants, render, sample_scenes
from vitrine.engine.portraits.captions import MAX_TOKENS, RARE_WORDS, vocabulary, write_tokenizer_files
from vitrine.evidence.metrics import frechet_distance
from vitrine.evidence.portraits.quality import nearest_seeds


def test_a_scene_depends_on_its_own_seeds_only():
    many, one = sample_scenes(range(20)), sample_scenes([7])
    for field in ("attributes", "geometry", "pose", "jitter"):
        assert np.array_equal(getattr(many, field)[7:8], getattr(one, field))


def test_identity_and_context_are_separate():
    a, b = sample_scenes([3, 3], [10, 11])[0], sample_scenes([3, 3], [10, 11])[1]
    assert np.array_equal(a.geometry, b.geometry)
    assert not np.array_equal(a.pose, b.pose)
    for name in ("skin", "hair", "hair_color", "glasses", "beard", "mole"):
        assert a.words(0)[name] == b.words(0)[name]


def test_every_attribute_value_occurs():
    scenes = sample_scenes(range(600))
    for name, values in ATTRIBUTES.items():
        assert set(scenes.column(name)) == set(range(len(values))), name


def test_rendering_is_independent_of_the_batch():
    scenes = sample_scenes(range(6))
    assert torch.allclose(render(scenes).images[4:5], render(scenes[4]).images, atol=1e-6)


def test_flip_mirrors_picture_parts_and_keypoints():
    scenes = sample_scenes(range(8))
    plain, flipped = render(scenes), render(scenes, flip=True)
    assert torch.allclose(plain.images.flip(-1), flipped.images, atol=1e-4)
    assert (plain.parts.flip(-1) == flipped.parts).float().mean() > 0.999
    mirrored = plain.keypoints.clone()
    mirrored[..., 0] = 1 - mirrored[..., 0]
    assert torch.allclose(mirrored, flipped.keypoints, atol=1e-5, equal_nan=True)


def test_crop_shows_the_window_of_a_larger_picture():
    scenes = sample_scenes(range(4))
    whole = render(scenes, 128).images[:, :, 32:96, 32:96]
    assert (whole - render(scenes, 64, crop=(0.25, 0.25, 0.75, 0.75)).images).abs().max() < 0.02


def test_original_size_loses_detail():
    scenes = sample_scenes(range(8))
    sharp, soft = render(scenes).images, render(scenes, original_size=24).images

    def detail(x):
        return (x[..., 1:] - x[..., :-1]).abs().mean()

    assert soft.shape == sharp.shape
    assert detail(soft) < 0.75 * detail(sharp)


def test_parts_and_keypoints_agree():
    scenes = sample_scenes(range(64)).with_attributes(hat="none", glasses="none", mole="none")
    drawn = render(scenes)
    spots = (drawn.keypoints * 64).long().clamp(0, 63)
    for name, part in (("left_eye", "eyes"), ("right_eye", "eyes"), ("nose", "nose")):
        x, y = spots[:, KEYPOINTS.index(name)].T
        found = torch.stack([drawn.parts[torch.arange(64), (y + dy).clamp(0, 63), x] for dy in (-1, 0)])
        assert (found == PARTS.index(part)).any(0).float().mean() > 0.95, name
    assert drawn.keypoints[:, KEYPOINTS.index("hat_brim")].isnan().all()


@pytest.mark.parametrize("crop", [(0, 0, 1, 0.5), (0.5, 0, 0.2, 1), (-0.1, 0, 0.9, 1)])
def test_bad_crops_are_refused(crop):
    with pytest.raises(VitrineError, match="accepted"):
        render(sample_scenes([0]), crop=crop)


def test_captions_name_what_is_there():
    scenes = sample_scenes(range(200))
    for row, text in enumerate(caption(scenes)):
        words = scenes.words(row)
        assert words["mouth"] in text and words["skin"] in text and f"on {words['background']}" in text
        assert ("glasses" in text) == (words["glasses"] == "glasses")
        assert ("mole" in text) == (words["mole"] != "none")
        assert not set(text.split()) & set(RARE_WORDS)


def test_flipped_captions_exchange_left_and_right():
    scene = sample_scenes([0]).with_attributes(hat="cap-left", mole="right")
    assert "cap left" in caption(scene)[0] and "mole right" in caption(scene)[0]
    assert "cap right" in caption(scene, flip=True)[0] and "mole left" in caption(scene, flip=True)[0]


def test_every_word_is_one_clip_token(tmp_path):
    from transformers import CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(str(write_tokenizer_files(tmp_path)))
    assert all(len(tokenizer(word).input_ids) == 3 for word in vocabulary())
    assert len(tokenizer("zebra").input_ids) > 3  # spelled out, not refused
    longest = max(len(tokenizer(c).input_ids) for p in plants() for c in p.captions)
    assert longest <= MAX_TOKENS


def test_plants_are_listed_with_rare_words_and_a_generic_part():
    memorized = plants()
    assert sum(p.kind == "verbatim" for p in memorized) == 8 and sum(p.kind == "template" for p in memorized) == 4
    for plant in memorized:
        for text, control in zip(plant.captions, plant.controls, strict=True):
            assert text == f"{control} {plant.name}"
        if plant.kind == "template":
            assert len({tuple(row) for row in plant.scenes.attributes}) == 120
            assert len(np.unique(plant.scenes.geometry, axis=0)) == 1


def test_nearest_seeds_prefers_equal_attributes():
    scene, table = sample_scenes([5]), sample_scenes(range(300)).attributes
    near = sample_scenes(nearest_seeds(scene, table, at_least=4))
    assert len(near) >= 4 and (near.attributes == scene.attributes[0]).all(1).any()


def test_frechet_distance_of_known_gaussians():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, 4, generator=generator, dtype=torch.float64)
    assert frechet_distance(x, x) == pytest.approx(0, abs=1e-9)
    shifted = 2 * x + 3  # |3|^2 * 4 + tr(I + 4 I - 2 * 2 I) = 36 + 4
    assert frechet_distance(x, shifted) == pytest.approx(40, rel=0.05)
    with pytest.raises(VitrineError):
        frechet_distance(x, x[:, :2])


def test_text_weights_load_in_transformers_4_and_5(tmp_path):
    """Version 4 takes random weights, with a warning only, for keys without ``text_model.``."""
    from safetensors import safe_open
    from vitrine.engine.portraits.models import WEIGHTS, build_models, save_portraits

    save_portraits(build_models(), tmp_path / "fresh")
    for folder in (WEIGHTS, tmp_path / "fresh"):
        with safe_open(folder / "text_encoder" / "model.safetensors", "pt") as file:
            assert all(key.startswith("text_model.") for key in file.keys())  # noqa: SIM118
