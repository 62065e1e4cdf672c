"""The flow portraits through the nodes and through the pipelines around FluxPipeline: what stands inside a picture."""

from types import SimpleNamespace

import pytest
import torch
from vitrine.engine.portraits import render, sample_scenes
from vitrine.engine.portraits.flow import load_flow_portraits
from vitrine_tests.comfy.two_doors import test_a_tap, test_masks_travel, test_points_travel  # noqa: F401
from vitrine_tests.families.twin import EqualEpsilon

PROMPT = "a smiling pale face with curly red hair glasses navy shirt on yellow"
PLACES = "vit-block1-out\nvit-block3-out"
NODE = {"selection": "layers below", "layers": PLACES, "timestep": 260.0, "seed": 0, "ensemble": 2}
TAP = {"addresses": PLACES.split(), "timestep": 260, "seeds": [0, 1]}


@pytest.fixture(scope="module")
def doors(comfy):
    """One network as a MODEL with its prompt, and in FluxPipeline with its states encoded, 24 as it was trained."""
    model, clip, vae = comfy.call("VitrineLoadPortraits", model="flow portraits, 128 px")
    with torch.inference_mode():
        positive = clip.encode_from_tokens_scheduled(clip.tokenize(PROMPT))
    stock = load_flow_portraits().pipeline()
    stock.set_progress_bar_config(disable=True)
    with torch.no_grad():
        text, pooled, _ = stock.encode_prompt(PROMPT, None, max_sequence_length=24)
    with EqualEpsilon("flux", stock.transformer):
        yield SimpleNamespace(
            parts={"model": model, "vae": vae, "positive": positive},
            stock=stock,
            encoded={"prompt_embeds": text, "pooled_prompt_embeds": pooled},
            node=NODE,
            tap=TAP,
        )


@pytest.fixture(scope="module")
def pictures():
    return render(sample_scenes(range(7_000_000, 7_000_004)), 128, details=True)
