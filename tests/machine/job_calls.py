"""Calls that are jobs of many steps, on the portraits model; entered beside those of :mod:`.calls`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from vitrine.engine.copies import CheckConfig
from vitrine.engine.pipelines import ActivationTapPipeline, NEMOPipeline, copy_check
from vitrine.engine.portraits import plants

from .calls import PROBE, RESIDUAL, Tensors, _neurons, drawn, entered

ORDINARY = ["a face", "a hat"]
NEMO = {"sd": NEMOPipeline}


def memorized() -> str:
    """A caption whose picture the model has memorized."""
    return plants()[2].captions[0]


@entered("tap.stream", {"sd": ActivationTapPipeline}, slow=True)
def tap_stream(pipe: Any) -> Tensors:
    names = {"first": drawn().images[:1], "second": drawn().images[1:2]}
    with tempfile.TemporaryDirectory() as folder:
        streamed = pipe.stream(names, folder, addresses=RESIDUAL, memory="1GB")
        return [streamed.read(list(names), [RESIDUAL])[RESIDUAL].tensor.clone()]


@entered("nemo.copies", NEMO, slow=True)
def nemo_copies(pipe: Any) -> Tensors:
    copies = pipe.copies(memorized(), _neurons(), drawn().images[:1], ORDINARY, seeds=[0], num_inference_steps=2)
    return [copies.untouched, copies.blocked, copies.ordinary]


@entered("copy_check", NEMO, slow=True)
def check(pipe: Any) -> Tensors:
    config = CheckConfig(ordinary=tuple(ORDINARY), seeds=2, usual=2)
    with tempfile.TemporaryDirectory() as folder:
        pictures = Path(folder) / "pictures"
        pictures.mkdir()
        for number, image in enumerate(drawn().images[:2]):
            Image.fromarray((image.movedim(0, -1) * 255).byte().numpy()).save(pictures / f"{number}.png")
        made = copy_check(
            pipe,
            [memorized()],
            Path(folder) / "out",
            pictures=pictures,
            config=config,
            probe=PROBE,
            num_inference_steps=2,
        )
    return [made.prompts[0].ratios, torch.tensor([made.prompts[0].score])]
