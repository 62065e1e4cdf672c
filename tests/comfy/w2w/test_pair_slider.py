"""Slider from Pictures (W2W) in real ComfyUI gives what the pipeline gives, and refuses what does not pair."""

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines import W2WPipeline
from vitrine.engine.portraits import load_portraits, render, sample_scenes
from vitrine.engine.w2w import PairConfig
from vitrine.evidence.w2w.people import people_space


def test_it_is_the_pipelines(comfy):
    space = people_space()
    scenes = sample_scenes(range(300_000, 300_003))
    before, after = (render(s, 64).images for s in (scenes, scenes.with_attributes(glasses="glasses")))
    model, clip, vae = comfy.call("VitrineLoadPortraits")
    positive = comfy.nodes.NODE_CLASS_MAPPINGS["CLIPTextEncode"]().encode(clip, "a face")[0]
    told = {
        "model": model,
        "vae": vae,
        "positive": positive,
        "space": space,
        "seed": 3,
        "start_timestep": 900.0,
        "lr": 0.08,
    }
    told["label"] = " own "
    nhwc = [x.permute(0, 2, 3, 1) for x in (before, after)]
    made, strength, report = comfy.call(
        "VitrineTrainW2WSlider", before=nhwc[0], after=nhwc[1], steps=3, save_as="", **told
    )
    pipe = W2WPipeline.from_pipe(load_portraits().pipeline())
    config = PairConfig(steps=3, start_timestep=900.0, seed=3)
    change = pipe.train_pair_slider(space, before, after, "a face", torch.zeros(1, space.dimension), config)
    ours = strength * made.directions["own"]
    cosine = float(torch.nn.functional.cosine_similarity(ours.float(), change, dim=0))
    assert cosine > 0.999 and float(ours.norm() / change.norm()) == pytest.approx(1, abs=0.01)
    assert report.startswith("own: 3 pairs, 3 steps") and set(made.directions) == {*space.directions, "own"}
    with pytest.raises(VitrineError, match="pictures after"):
        comfy.call("VitrineTrainW2WSlider", before=nhwc[0], after=nhwc[1][:2], steps=1, save_as="", **told)
    with pytest.raises(VitrineError, match="label"):
        comfy.call("VitrineTrainW2WSlider", before=nhwc[0], after=nhwc[1], steps=1, save_as="", **told | {"label": " "})
