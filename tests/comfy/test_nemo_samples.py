"""NEMO's nodes that judge by samples, in real ComfyUI, and against the pipeline."""

from dataclasses import replace

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import FewStepConfig, ProbeConfig, SearchConfig
from vitrine.engine.pipelines import NEMOPipeline
from vitrine.engine.portraits import caption, load_portraits, plants, sample_scenes

ORDINARY = caption(sample_scenes(range(200, 216)))
PLANT = plants()[0].captions[0]
MADE = {"samples": 4, "steps": 4, "cfg": 3.0, "first_seed": 1}


@pytest.fixture(scope="module")
def pipe():
    return NEMOPipeline.from_pipe(load_portraits().pipeline())


@pytest.fixture(scope="module")
def parts(comfy):
    return comfy.call("VitrineLoadPortraits")


@pytest.fixture(scope="module")
def told(parts):
    return {"model": parts[0], "latent": {"samples": torch.zeros(1, 4, 16, 16)}}


@pytest.fixture(scope="module")
def threshold(comfy, parts, told):
    made, report = comfy.call(
        "VitrineNEMOSampleThreshold", clip=parts[1], prompts="\n".join(ORDINARY), **told, **MADE
    )  # fmt: skip
    assert report == made.text() and "16 ordinary captions: 4 samples of 4 steps, guidance 3" in report
    return made


def encode(comfy, clip, text):
    return comfy.nodes.NODE_CLASS_MAPPINGS["CLIPTextEncode"]().encode(clip, text)[0]


def detect(comfy, parts, told, prompt, **more):
    positive, negative = encode(comfy, parts[1], prompt), encode(comfy, parts[1], "")
    return comfy.call("VitrineNEMODetect", positive=positive, negative=negative, **told, **MADE | more)


def test_threshold_and_verdicts_equal_the_pipelines(comfy, pipe, parts, told, threshold):
    ours = pipe.calibrate_samples(ORDINARY)
    assert (ours.count, ours.config, ours.fingerprint) == (threshold.count, threshold.config, threshold.fingerprint)
    assert ours.distance == pytest.approx(threshold.distance, abs=1e-5)
    assert torch.allclose(ours.places, threshold.places, atol=1e-5)
    for prompt, memorized in ((PLANT, True), (ORDINARY[0], False)):
        (found,) = pipe.detect(prompt, ours, keep=True)
        said, distance, report, samples, where = detect(comfy, parts, told, prompt, threshold=threshold, vae=parts[2])
        assert said is memorized is found.memorized and distance == pytest.approx(found.distance, abs=1e-5)
        assert ("agrees: whole picture" in report) is memorized
        assert report.splitlines()[0] == found.text().splitlines()[0]
        assert samples.shape == (4, 64, 64, 3) and where.shape == (1, 64, 64, 3)
    once, (staged,) = pipe.detect([PLANT], ours)[0], pipe.detect([PLANT], ours, FewStepConfig(two_stage=True))
    assert staged.count == 4 and staged.samples is None and staged.distance == pytest.approx(once.distance, abs=1e-5)


def test_without_a_threshold_there_is_no_verdict(comfy, parts, told, threshold):
    memorized, distance, report, samples, where = detect(comfy, parts, told, PLANT, steps=2)
    assert memorized is False and distance > 0 and report.startswith("no verdict") and "2 steps" in report
    other = replace(threshold, fingerprint="0" * 64)
    with pytest.raises(VitrineError, match="this model"):
        detect(comfy, parts, told, PLANT, threshold=other)


@pytest.mark.nightly
def test_a_search_is_judged_by_samples_as_the_pipelines_is(comfy, pipe, parts, told, threshold):
    captions = caption(sample_scenes(range(40)))
    statistics, _ = comfy.call(
        "VitrineNEMOStatistics", model=parts[0], clip=parts[1], prompts="\n".join(captions), scope="down+mid"
    )
    found, report, _ = comfy.call(
        "VitrineNEMOFindNeurons", **told, positive=encode(comfy, parts[1], PLANT), statistics=statistics, tau=0.0,
        effect_fraction=0.9, mode="fast", seeds=4, timestep_index=4, scope="down+mid",
        negative=encode(comfy, parts[1], ""), threshold=threshold,
    )  # fmt: skip
    sampler = pipe.sampler(threshold=pipe.calibrate_samples(ORDINARY))
    probe, config = ProbeConfig(seeds=4, timestep_index=4), SearchConfig(effect_fraction=0.9, mode="fast")
    (result,) = pipe.find([PLANT], pipe.statistics(captions), config, probe, sampler=sampler)
    assert found.neurons == pipe.neurons(result).neurons and len(found)
    assert found.info["verdict"] == result.verdict and result.verdict in ("changed", "reduced")
    assert "4 samples differ by" in report and "first seed 1" in report
    with pytest.raises(VitrineError, match="negative"):
        comfy.call(
            "VitrineNEMOFindNeurons", **told, positive=encode(comfy, parts[1], PLANT), statistics=statistics, tau=0.0,
            effect_fraction=0.9, mode="fast", seeds=4, timestep_index=4, scope="down+mid", threshold=threshold,
        )  # fmt: skip
