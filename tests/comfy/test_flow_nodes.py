"""The flow portraits through the nodes and through the pipelines around FluxPipeline: what stands inside a picture."""

from types import SimpleNamespace

import pytest
import torch
from vitrine.engine.pipelines import ActivationTapPipeline, CorrespondencePipeline, SegmentationPipeline
from vitrine.engine.portraits import PARTS, render, sample_scenes
from vitrine.engine.portraits.flow import load_flow_portraits
from vitrine_tests.families.twin import EqualEpsilon

PROMPT = "a smiling pale face with curly red hair glasses navy shirt on yellow"
PLACES = "vit-block1-out\nvit-block3-out"
NODE = {"selection": "addresses below", "addresses": PLACES, "timestep": 260.0, "seed": 0, "ensemble": 2}
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
            parts={"model": model, "vae": vae, "positive": positive}, stock=stock,
            told={"prompt_embeds": text, "pooled_prompt_embeds": pooled},
        )  # fmt: skip


@pytest.fixture(scope="module")
def pictures():
    return render(sample_scenes(range(7_000_000, 7_000_004)), 128, details=True)


def image(pictures, rows):
    return pictures.images[rows].permute(0, 2, 3, 1)


def test_a_tap(comfy, doors, pictures):
    taps, _, _ = comfy.call("VitrineActivationTap", **doors.parts, image=image(pictures, [0, 1]), dtype="float32",
                            **NODE)  # fmt: skip
    pipe = ActivationTapPipeline.from_pipe(doors.stock)
    ours = pipe(pictures.images[:2], **TAP, **doors.told, output_type="none").activations
    assert list(taps) == list(ours) == PLACES.split()
    for address in ours:
        wanted = ours[address].tensor
        assert (taps[address].tensor - wanted).abs().max() <= 1e-5 * wanted.abs().max(), address


def test_points_and_masks(comfy, doors, pictures):
    asked = pictures.keypoints[0, :3]
    text = "\n".join(f"{x} {y}" for x, y in asked.tolist())
    told = {"source": image(pictures, [0]), "target": image(pictures, [1]), "points": text, "softness": 0.02}
    found, _ = comfy.call("VitrineFindCorrespondence", **doors.parts, **told, **NODE)
    rows = torch.tensor([[float(v) for v in line.split()[:2]] for line in found.splitlines()])
    pipe = CorrespondencePipeline.from_pipe(doors.stock)
    (match,) = pipe(pictures.images[:1], pictures.images[1:2], asked, **TAP, **doors.told)
    assert torch.allclose(rows, match.points, atol=1e-3)
    background = (pictures.parts == PARTS.index("background")).float()
    told = {"examples": image(pictures, [0, 1]), "masks": background[:2], "images": image(pictures, [2, 3])}
    hard, _ = comfy.call("VitrineSegmentLikeThis", **doors.parts, **told, hidden=0, **NODE)
    pipe = SegmentationPipeline.from_pipe(doors.stock)
    ours = pipe(pictures.images[:2], background[:2].long(), pictures.images[2:], **TAP, **doors.told)
    assert float((ours.float() == hard).float().mean()) > 0.999
    assert float((hard == background[2:]).float().mean()) > 0.8, "it was trained"
