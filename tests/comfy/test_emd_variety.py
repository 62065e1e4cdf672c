"""Measure Variety (EMD) in real ComfyUI: colours or a CLIP vision network, with and without a reference."""

import json

import pytest
import torch
from vitrine.engine.emd import measure_variety, small_pixels
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits import render, sample_scenes


@pytest.fixture(scope="module")
def pictures():
    """(12, H, W, 3) portraits, as ComfyUI holds them."""
    return render(sample_scenes(range(7_910_000, 7_910_012))).images.movedim(1, -1)


def test_colours_are_compared_without_a_network(comfy, pictures):
    images, reference = pictures[:6], pictures[6:]
    distance, vendi, recall, report = comfy.call("VitrineEMDVariety", images=images, reference=reference)
    wanted = measure_variety(*(small_pixels(p.movedim(-1, 1)) for p in (images, reference)))
    assert (distance, vendi, recall) == wanted[:2] + wanted[3:]
    assert f"{vendi:.2f} of 6" in report and f"precision {wanted.precision:.2f}" in report
    same = comfy.call("VitrineEMDVariety", images=images[:1].repeat(6, 1, 1, 1), reference=reference)
    assert same[0] == pytest.approx(0, abs=1e-9) and same[1] == pytest.approx(1) and same[2] <= recall
    assert comfy.call("VitrineEMDVariety", images=images)[2] == -1
    with pytest.raises(VitrineError, match="several seeds"):
        comfy.call("VitrineEMDVariety", images=images[:1])


def test_a_clip_vision_network_is_used(comfy, pictures, tmp_path):
    from comfy.clip_vision import ClipVisionModel

    config = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "image_size": 28,
              "num_attention_heads": 2, "num_channels": 3, "num_hidden_layers": 2, "patch_size": 14,
              "projection_dim": 16, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}  # fmt: skip
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    network = ClipVisionModel(str(tmp_path / "tiny.json"))
    for p in network.model.parameters():
        p.data.normal_(std=0.1)
    with torch.inference_mode():
        features = network.encode_image(pictures[:4])["image_embeds"].float()
    distance, vendi, _, report = comfy.call("VitrineEMDVariety", images=pictures[:4], clip_vision=network)
    assert (distance, vendi) == pytest.approx(measure_variety(features)[:2]) and "CLIP vision" in report
    assert distance != pytest.approx(comfy.call("VitrineEMDVariety", images=pictures[:4])[0], rel=1e-3)
