"""Calls that are jobs of many steps, on the portraits model; entered beside those of :mod:`.calls`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from vitrine.engine.nemo import AttackConfig, CheckConfig, EraseConfig, ProbeConfig, SearchConfig
from vitrine.engine.pipelines import ActivationTapPipeline, NEMOPipeline, copy_check
from vitrine.engine.pipelines.nemo_erase import SurrogateConfig
from vitrine.engine.portraits import plants

from .calls import PROBE, RESIDUAL, Tensors, _neurons, _statistics, drawn, entered
from .stock import valid_for

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


@entered("nemo.consensus", NEMO, slow=True)
def nemo_consensus(pipe: Any) -> Tensors:
    config = SearchConfig(tau=0.3, share=0.05, theta=4.0, theta_step=3.0, mode="fast")
    probe = ProbeConfig(seeds=2, timestep_index=15)
    (neurons,) = pipe.consensus([memorized()], valid_for(pipe, _statistics()), config, probe, seeds=(1, 2))
    assert len(neurons)
    score = pipe.verify(memorized(), neurons, 0.5, None, PROBE)
    return [torch.tensor([score.untouched.value])]


@entered("nemo.copies", NEMO, slow=True)
def nemo_copies(pipe: Any) -> Tensors:
    copies = pipe.copies(memorized(), _neurons(), drawn().images[:1], ORDINARY, seeds=[0], num_inference_steps=2)
    return [copies.untouched, copies.blocked, copies.ordinary]


@entered("nemo.erase", NEMO, slow=True)
def nemo_erase(pipe: Any) -> Tensors:
    config = EraseConfig(rounds=1, updates=2, batch=1, attack=AttackConfig(steps=2, batch=1))
    sources = SurrogateConfig(count=1, steps=2)
    erased = pipe.erase([memorized()], [drawn().images[:1]], ORDINARY, _neurons(), config, sources)
    return [erased.weights["conv_in.weight"], erased.weights["conv_out.weight"]]


@entered("copy_check", NEMO, slow=True)
def check(pipe: Any) -> Tensors:
    config = CheckConfig(ordinary=tuple(ORDINARY), seeds=2, usual=2)
    with tempfile.TemporaryDirectory() as folder:
        pictures = Path(folder) / "pictures"
        pictures.mkdir()
        for number, image in enumerate(drawn().images[:2]):
            Image.fromarray((image.movedim(0, -1) * 255).byte().numpy()).save(pictures / f"{number}.png")
        made = copy_check(
            pipe, [memorized()], Path(folder) / "out", pictures=pictures, config=config, probe=PROBE,
            num_inference_steps=2,
        )  # fmt: skip
    return [made.prompts[0].ratios, torch.tensor([made.prompts[0].score])]
