"""Calls of the pipelines that go around another one, on the families they serve; entered beside :mod:`.calls`."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from vitrine.engine.emd import StudentPreset
from vitrine.engine.nemo import NeuronSet, ProbeConfig, SearchConfig, fingerprint_of, value_sites
from vitrine.engine.pipelines import (
    ActivationTapPipeline,
    EMDOneStepPipeline,
    NEMOPipeline,
    W2WPipeline,
)
from vitrine.engine.tracing.fingerprint import width_of
from vitrine.engine.w2w import EditConfig, InvertConfig
from vitrine_tests.pipelines.encoded import READING, SOURCES, source
from vitrine_tests.pipelines.test_w2w_around import space_on

from .calls import Tensors, drawn, entered, generator
from .stock import MAKERS, backbone, modules, stock, valid_for

PROBE = ProbeConfig(seeds=2, timestep_index=1)
SEARCH = SearchConfig(tau=1e-6, theta=0.5, theta_step=0.5, theta_min=0.1)
CAPTIONS = ["a cat", "a horse", "a photo of a hat"]


@functools.cache
def _neurons(family: str) -> NeuronSet:
    net = backbone(stock(family))
    chosen = {s.address: tuple(range(min(3, width_of(net, s)))) for s in value_sites(net, "all")}
    return NeuronSet(chosen, fingerprint_of(net))


@functools.cache
def _space(family: str) -> Any:
    return space_on(backbone(stock(family)))


@functools.cache
def _statistics(family: str) -> Any:
    """Gathered on the float32 model on the CPU, as a file that a user was given."""
    return NEMOPipeline.from_pipe(stock(family)).calibrate(CAPTIONS, ["statistics"])


def _family(pipe: Any) -> str:
    return pipe.__dict__["family"]


def _how(pipe: Any, steps: int) -> dict[str, Any]:
    """A short call; PixArt's positions are built for 128 px."""
    pixart = _family(pipe).startswith("pixart")
    side = 128 if pixart else 64
    size = {"height": side, "width": side} | ({"use_resolution_binning": False} if pixart else {})
    return {"num_inference_steps": steps, "output_type": "latent", **size}


# --- NEMO, W2W and EMD around SDXL and transformers -----
AROUND = dict.fromkeys(("sdxl", "sd3", "flux", "pixart"), NEMOPipeline)


@entered("nemo.around.call", AROUND, steps=2, lent=True)
def nemo_call(pipe: Any, steps: int = 2) -> Tensors:
    return [pipe(prompt="a cat", neurons=_neurons(_family(pipe)), generator=generator(3), **_how(pipe, steps)).images]


@entered("nemo.around.statistics", AROUND, lent=True, slow=True)
def nemo_statistics(pipe: Any) -> Tensors:
    made = pipe.calibrate(CAPTIONS, ["statistics"]).statistics
    return [*made.means.values(), *made.stds.values()]


@entered("nemo.around.score", AROUND, lent=True, slow=True)
def nemo_score(pipe: Any) -> Tensors:
    return [torch.tensor([s.value for s in pipe.detect(CAPTIONS[:2], None, "one step", PROBE)])]


@entered("nemo.around.find", AROUND, lent=True, slow=True)
def nemo_find(pipe: Any) -> Tensors:
    (result,) = pipe.find(["a cat"], valid_for(pipe, _statistics(_family(pipe))), SEARCH, PROBE)
    return [torch.tensor([result.before.value, result.after.value])]


PEOPLE = dict.fromkeys(("sdxl", "sd3", "flux"), W2WPipeline)


@entered("w2w.around.call", PEOPLE, steps=2, lent=True)
def w2w_call(pipe: Any, steps: int = 2) -> Tensors:
    space = _space(_family(pipe))
    person = {"space": space, "model": pipe.sample_models(space, [0]), "edits": {"beard": 1.0}, "seeds": [3]}
    return [pipe("a cat", **person, edit_config=EditConfig(start_timestep=600), **_how(pipe, steps)).images]


@entered("w2w.around.invert_image", PEOPLE, steps=2, lent=True, slow=True)
def w2w_invert(pipe: Any, steps: int = 2) -> Tensors:
    config = InvertConfig(steps=steps, check_every=1000)
    return [pipe.invert_image(_space(_family(pipe)), drawn().images[:1], "a cat", config)[0].coefficients]


@entered("emd.transformer", dict.fromkeys(("sd3", "flux", "pixart"), EMDOneStepPipeline), lent=True)
def emd_one_step(pipe: Any) -> Tensors:
    preset = StudentPreset(timestep=999.0 if _family(pipe) == "pixart" else 1000.0)
    return [pipe("a cat", [0, 1], preset, height=64, width=64, output_type="latent").images]


# --- the families whose networks came later -----
LATER = [name for name in SOURCES if name not in MAKERS]


@functools.cache
def _arguments(family: str) -> dict[str, Any]:
    return source(family)[1]


def _lent(pipe: Any) -> dict[str, Any]:
    """Arguments of a short call: prompts, or encoded ones where the reader is not tiny, in place and precision."""
    place, dtype = pipe._execution_device, backbone(pipe).dtype
    arguments = dict(_arguments(_family(pipe)))
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            arguments[name] = value.to(place, dtype if value.is_floating_point() else None)
    return arguments


def later(family: str) -> Any:
    """A fresh stock pipeline of such a family; its network is shared among tests, and copied."""
    pipe, _ = source(family)
    name = "transformer" if getattr(pipe, "unet", None) is None else "unet"
    setattr(pipe, name, copy.deepcopy(getattr(pipe, name)))
    for part in modules(pipe).values():
        part.requires_grad_(False)
    return pipe


MAKERS.update({name: functools.partial(later, name) for name in LATER})


@entered("tap.later", dict.fromkeys((n for n in LATER if n in READING), ActivationTapPipeline), lent=True, slow=True)
def tap(pipe: Any) -> Tensors:
    out = pipe.tap(drawn().images[:1], "a photo of a cat", "vit-block1-out", seeds=[0], size=64, output_type="none")
    return [a.tensor for a in out.activations.values()]


@entered("nemo.later.call", dict.fromkeys(LATER, NEMOPipeline), lent=True, slow=True)
@torch.no_grad()
def nemo_of_later(pipe: Any) -> Tensors:
    return [pipe(**_lent(pipe), generator=generator(3), neurons=_neurons(_family(pipe)))[0]]


@entered("w2w.later.call", dict.fromkeys(LATER, W2WPipeline), lent=True, slow=True)
@torch.no_grad()
def w2w_of_later(pipe: Any) -> Tensors:
    space = _space(_family(pipe))
    return [pipe(**_lent(pipe), seeds=[3], space=space, model=pipe.sample_models(space, [0]))[0]]
