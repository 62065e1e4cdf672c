"""Rank Layers and preset files in real ComfyUI, against the pipeline."""

from dataclasses import replace

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines import ActivationTapPipeline
from vitrine.engine.portraits import load_portraits, render, sample_scenes
from vitrine.engine.settings.ranking_options import FilterRule, RankingConfig

PLACES = "up-level0-repeat0-*-q, up-level0-repeat0-vit-out, down-level0-repeat0-res-out, up-level0-upsampler-out"


@pytest.fixture(scope="module")
def parts(comfy):
    return comfy.call("VitrineLoadPortraits")


@pytest.fixture(scope="module")
def pictures():
    drawn = render(sample_scenes(range(7_900_000, 7_900_006)))
    return drawn.images, (drawn.parts > 0).float()


def rank(comfy, parts, pictures, prompt="a smiling dark face", **told):
    model, clip, vae = parts
    positive = comfy.nodes.NODE_CLASS_MAPPINGS["CLIPTextEncode"]().encode(clip, prompt)[0]
    settings = {"layers": PLACES, "timestep": 50.0, "noise": 0.8, "granularity": 2.0, "budget": 0, "most": 2} | told
    return comfy.call(
        "VitrineRankActivations",
        model=model,
        vae=vae,
        positive=positive,
        images=pictures[0].permute(0, 2, 3, 1),
        masks=pictures[1],
        **settings,
    )


def test_the_node_ranks_as_the_pipeline_does(comfy, parts, pictures):
    preset, addresses, report, kept, dropped = rank(comfy, parts, pictures)
    pipe = ActivationTapPipeline.from_pipe(load_portraits().pipeline())
    ours = pipe.rank(
        pictures[0] * 2 - 1,
        pictures[1].long(),
        "a smiling dark face",
        config=RankingConfig(PLACES, rule=FilterRule(0.8, 2.0), most=2),
    )
    assert addresses.split("\n") == list(ours.chosen) and preset.preset.addresses == ours.chosen
    for address, score in preset.preset.numbers["single"].items():
        assert abs(score - ours.search.singles[address]) < 1e-3
    for address, found in preset.preset.numbers["properties"].items():
        assert abs(found["noise"] - ours.properties[address].noise) < 1e-4
    assert kept.shape == (len(ours.kept), 64, 6 * 64, 3) and dropped.shape[0] == len(ours.dropped)
    assert "sites kept" in report


def test_splits_classes_and_keypoints_rank_as_the_pipelines_do(comfy, parts, pictures):
    drawn = render(sample_scenes(range(7_900_000, 7_900_006)))
    images, labels = drawn.images, (drawn.parts > 0).long()
    labels[[0, 3], :6, :6] = 2
    labels[:, -1] = 255
    words = {"prompt": "a smiling dark face", "layers": PLACES, "most": 1}
    preset = rank(comfy, parts, (images, labels / 255), split="crossed", folds=2, classes=3, memory="64MiB", **words)[0]
    stock = load_portraits().pipeline()
    pipe, config = ActivationTapPipeline.from_pipe(stock), RankingConfig(PLACES, rule=FilterRule(0.8, 2.0), most=1)
    crossed = replace(config, split="crossed", folds=2)
    ours = pipe.rank(images * 2 - 1, labels, words["prompt"], config=crossed)
    assert preset.preset.addresses == ours.chosen
    for address, score in preset.preset.numbers["single"].items():
        assert abs(score - ours.search.singles[address]) < 2e-3
    points = drawn.keypoints
    lines = ["; ".join("-" if x != x else f"{x:.6f} {y:.6f}" for x, y in row) for row in points.tolist()]
    preset = rank(comfy, parts, (images, None), keypoints="\n".join(lines), **words)[0]
    ours = pipe.rank(images * 2 - 1, None, words["prompt"], keypoints=points, config=config)
    assert preset.preset.addresses == ours.chosen
    for address, score in preset.preset.numbers["single"].items():
        assert abs(score - ours.search.singles[address]) < 0.02  # one point more or less
    with pytest.raises(VitrineError, match="grey values"):
        rank(comfy, parts, (images, (labels + 40) / 255), classes=3, **words)


def test_presets_are_saved_loaded_and_refused(comfy, parts, pictures):
    preset = rank(comfy, parts, pictures)[0]
    comfy.call("VitrineSaveFeaturePreset", preset=preset, name="mine")
    again, addresses, timestep = comfy.call("VitrineLoadFeaturePreset", file="mine.json", model=parts[0])
    assert again.preset.addresses == preset.preset.addresses and timestep == 50.0
    image = pictures[0][:1].permute(0, 2, 3, 1)
    positive = comfy.nodes.NODE_CLASS_MAPPINGS["CLIPTextEncode"]().encode(parts[1], "")[0]
    taps, *_ = comfy.call(
        "VitrineActivationTap",
        model=parts[0],
        vae=parts[2],
        image=image,
        positive=positive,
        selection="layers below",
        layers=addresses,
        timestep=timestep,
        seed=0,
        ensemble=1,
        dtype="float32",
    )
    assert set(taps) == set(preset.preset.addresses)
    from dataclasses import replace

    comfy.call("VitrineSaveFeaturePreset", preset=replace(again, fingerprint="feedfeedfeedfeed"), name="other")
    with pytest.raises(VitrineError, match="this model"):
        comfy.call("VitrineLoadFeaturePreset", file="other.json", model=parts[0])
    for bad in ("../mine.json", "absent.json"):
        with pytest.raises(VitrineError):
            comfy.call("VitrineLoadFeaturePreset", file=bad, model=parts[0])


def test_masks_of_another_size_are_refused(comfy, parts, pictures):
    said = "given 6 of 32 x 32; accepted: 6 of 64 x 64.* same order"
    with pytest.raises(VitrineError, match=said):
        rank(comfy, parts, (pictures[0], torch.zeros(6, 32, 32)))


def test_a_lora_does_not_change_which_model_it_is(comfy, parts, pictures):
    """The fingerprint is the checkpoint's, so a preset still fits under a LoRA."""
    model = parts[0].clone()
    key = "diffusion_model.output_blocks.0.1.transformer_blocks.0.attn2.to_v.weight"
    weight = model.model.state_dict()[key]
    assert model.add_patches({key: (torch.ones_like(weight),)}, 1.0)
    preset = rank(comfy, parts, pictures)[0]
    comfy.call("VitrineSaveFeaturePreset", preset=preset, name="lora")
    rank(comfy, (model, *parts[1:]), pictures)  # loads the patched weights
    assert comfy.call("VitrineLoadFeaturePreset", file="lora.json", model=model)[0].preset.addresses
