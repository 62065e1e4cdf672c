"""The shipped space of people: its size, its directions, and that a model is one person in every picture."""

import pytest
import torch
from vitrine.engine.portraits.shipped import PEOPLE_SPACE
from vitrine.engine.w2w import quality, read_header, read_lora, sample
from vitrine.evidence.w2w.measures import PEOPLE, distances
from vitrine.evidence.w2w.people import LABELS, Studio, labels, name, people_space


def test_it_is_what_the_docs_say():
    space = people_space()
    assert PEOPLE_SPACE.stat().st_size <= 4_000_000 and space.count >= 500
    assert set(LABELS) <= set(space.directions)
    assert {layer.path.rsplit(".", 1)[1] for layer in space.manifest} == {"to_q", "to_v"}
    assert {layer.rank for layer in space.manifest} == {1}


def test_labels_come_from_the_seeds():
    from vitrine.engine.portraits import sample_scenes

    space = people_space()
    table, scenes = labels(space.names), sample_scenes([20_000_000])
    assert space.names[0] == name(20_000_000)
    assert table["beard"][0] == float(scenes.words(0)["beard"] == "beard")


def test_directions_tell_people_they_never_saw():
    space = people_space()
    table = {k: labels(space.names)[k] for k in ("glasses", "beard", "bald", "dark skin")}
    assert min(quality(space, table, components=120).balanced.values()) > 0.95


@pytest.mark.nightly
def test_a_sampled_model_is_one_person(no_hooks_left):
    studio = Studio.open()
    rows = sample(studio.space, [1, 2, 3], PEOPLE)
    features, _ = studio.read(studio.draw(rows, 4))
    within, between = distances(features)
    assert float(within.mean()) < 0.3 * float(between.mean()) and (within[:, None] < between).all()
    images = studio.draw(rows[:1], 4)
    assert torch.equal(images, studio.draw(rows[:1], 4))
    no_hooks_left(studio.portraits.unet)


def test_its_lora_round_trips(tmp_path):
    from vitrine.engine.w2w import materialise, write_lora

    space = people_space()
    path = write_lora(tmp_path / "p.safetensors", materialise(space, space.coefficients[3]))
    back = space.encode_lora(read_lora(read_header(path)))
    torch.testing.assert_close(back, space.coefficients[3], atol=2e-2, rtol=1e-2)
