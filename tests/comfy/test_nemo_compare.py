"""Compare Copies (NEMO), a memorized picture of Render Portrait, and words instead of positions in Find Neurons."""

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo.neuron_effects import held_by
from vitrine.engine.portraits import plants, render

PLANT = plants()[0]


@pytest.fixture(scope="module")
def pictures(comfy):
    reference = comfy.call("VitrineRenderPortrait", seed=0, count=1, size=64, memorized=PLANT.name)[0]
    ordinary = comfy.call("VitrineRenderPortrait", seed=400_000, count=12, size=64)[0]
    return reference, ordinary


def test_a_memorized_picture_is_what_training_repeated(pictures):
    assert torch.equal(pictures[0], render(PLANT.scenes, 64).images.permute(0, 2, 3, 1))


@pytest.mark.parametrize(("kept", "copies"), [(0, 0), (1, 1), (4, 4)])
def test_copies_are_counted_and_shown(comfy, pictures, kept, copies):
    reference, ordinary = pictures
    noisy = (reference + 0.01 * torch.randn(4, 64, 64, 3, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    after = torch.cat([noisy[:kept], ordinary[: 4 - kept]])
    told = {"training_picture": reference, "ordinary": ordinary[4:]}
    verdict, shown, count = comfy.call("VitrineNEMOCompareCopies", before=noisy, after=after, **told)
    assert count == copies and f"{copies or 'none'} of 4" in verdict and verdict.startswith("Untouched, 4 of 4")
    assert shown.shape == (1, 544, 3 * 512 + 16, 3)


def test_sizes_may_differ_and_one_sample_is_enough(comfy, pictures):
    reference, ordinary = pictures
    large = reference.repeat_interleave(2, 1).repeat_interleave(2, 2)
    told = {"before": reference, "after": ordinary[:1], "training_picture": large, "ordinary": ordinary}
    verdict, shown, count = comfy.call("VitrineNEMOCompareCopies", **told)
    assert verdict.startswith("Untouched, 1 of 1") and count == 0 and shown.shape[1] == 544
    with pytest.raises(VitrineError, match="ordinary"):
        comfy.call("VitrineNEMOCompareCopies", **told | {"ordinary": ordinary[:0]})


def test_neurons_name_words_where_the_text_encoder_is_connected(comfy):
    prompt = PLANT.captions[0]
    graph = {
        "1": {"class_type": "VitrineLoadPortraits", "inputs": {}},
        "2": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 1], "text": prompt}},
        "3": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "4": {"class_type": "VitrineNEMOCalibrate", "inputs": {
            "model": ["1", 0], "clip": ["1", 1], "latent": ["3", 0], "prompts": "a face\na smile\na hat",
            "measure": "statistics", "scope": "down+mid", "samples": 4, "steps": 4, "cfg": 3.0, "first_seed": 1,
            "seeds": 2, "timestep_index": 4}},
        "5": {"class_type": "VitrineNEMOFindNeurons", "inputs": {
            "model": ["1", 0], "positive": ["2", 0], "latent": ["3", 0], "calibration": ["4", 0], "clip": ["1", 1],
            "effect_fraction": 0.3, "mode": "chain", "seeds": 2, "timestep_index": 4, "scope": "down+mid"}},
        "6": {"class_type": "VitrineSaveNeurons", "inputs": {"neurons": ["5", 0], "name": "words"}},
    }  # fmt: skip
    _, error = comfy.run(graph)
    assert error is None, error
    neurons = comfy.call("VitrineLoadNeurons", file="words.json")[0]
    records = [record for several in held_by(neurons).values() for record in several]
    known = {*prompt.split(), "<start>", "<end>", "<padding>"}
    assert records and all(r["prompt"] == prompt for r in records)
    for record in records:
        assert len(record["words"]) == len(record["tokens"]) and set(record["words"]) <= known
        for (at, _), word in zip(record["tokens"], record["words"], strict=True):
            assert word == (["<start>", *prompt.split(), *20 * ["<end>"]][at])
