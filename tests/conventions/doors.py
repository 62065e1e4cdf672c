"""The pipelines as a user of diffusers meets them: how each is made, called, and what it hands back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from vitrine.engine import pipelines as ours
from vitrine.engine.nemo import NeuronSet, ProbeConfig, fingerprint_of, value_sites
from vitrine.engine.pipelines.nemo_jobs import verify_blocking
from vitrine.engine.resolution import ResolutionTransferConfig
from vitrine.engine.w2w import InvertConfig
from vitrine_tests.machine.calls import RESIDUAL, _checkpoint_file, _neurons, _space, around, drawn
from vitrine_tests.machine.stock import backbone, stock
from vitrine_tests.pipelines.test_w2w_around import space_on

PROMPT = "a smiling pale face with curly red hair"
SIDE, STEPS = 64, 2
WIDE = ResolutionTransferConfig((SIDE, SIDE), (SIDE, SIDE))
"""No other size than the model's: what is asked of diffusers' arguments, not of the method."""


@dataclass(frozen=True)
class Door:
    """One pipeline.

    Attributes:
        title: of its column.
        family: of the stock pipeline it is made from.
        kind: its class.
        run: (pipe, **arguments of the call) -> what the call returns.
        samples: it draws pictures; the others read them.
        pictures: (pipe, pictures) -> a tensor, where a method takes pictures.
        masks: (pipe, masks) -> a tensor, where one takes masks.
        refused: convention -> arguments that are refused, and words of the reason.
        absent: conventions without meaning here, where there is no argument to refuse.
        lent: it keeps the pipeline it was made from, whose text encoders it uses.
        config: what it takes beside the pipeline that it is put around.
    """

    title: str
    family: str
    kind: Any
    run: Callable[..., Any]
    samples: bool = True
    pictures: Callable[[Any, Any], torch.Tensor] | None = None
    masks: Callable[[Any, Any], torch.Tensor] | None = None
    refused: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    lent: bool = False
    config: tuple[Any, ...] = ()

    def pipeline(self) -> Any:
        """A fresh one."""
        if self.lent or self.config:
            return self.kind.from_pipe(stock(self.family), *self.config)
        return around(self.kind, stock(self.family))

    def shared(self) -> Any:
        """One for all checks that leave it as it was."""
        return _shared(self.title)


@functools.cache
def _shared(title: str) -> Any:
    return DOORS[title].pipeline()


def _plain(pipe: Any, prompt: Any = PROMPT, **arguments: Any) -> Any:
    return pipe(prompt, **{"num_inference_steps": STEPS, "output_type": "latent", **arguments})


def _blocked(pipe: Any, prompt: Any = PROMPT, **arguments: Any) -> Any:
    return _plain(pipe, prompt, neurons=_neurons(), **arguments)


def _person(pipe: Any, prompt: Any = PROMPT, **arguments: Any) -> Any:
    return _plain(pipe, prompt, space=_space(), model=pipe.sample_models(_space(), [0]), **arguments)


def _sized(pipe: Any, prompt: Any = PROMPT, **arguments: Any) -> Any:
    return _plain(pipe, prompt, **{"height": SIDE, "width": SIDE, **arguments})


def _checkpointed(pipe: Any, prompt: Any = PROMPT, **arguments: Any) -> Any:
    return _plain(pipe, prompt, checkpoint=pipe.load_control(_checkpoint_file()), **arguments)


@functools.cache
def _any_neurons(family: str) -> NeuronSet:
    net = backbone(stock(family))
    return NeuronSet({site.address: (0, 1, 2) for site in value_sites(net, "all")}, fingerprint_of(net))


def _blocked_sdxl(pipe: Any, prompt: Any = PROMPT, **arguments: Any) -> Any:
    return _sized(pipe, prompt, neurons=_any_neurons("sdxl"), **arguments)


@functools.cache
def _any_space(family: str) -> Any:
    return space_on(backbone(stock(family)))


def _person_sdxl(pipe: Any, prompt: Any = PROMPT, **arguments: Any) -> Any:
    space = _any_space("sdxl")
    return _sized(pipe, prompt, space=space, model=pipe.sample_models(space, [0]), **arguments)


def _one_step(pipe: Any, prompt: Any = PROMPT, **arguments: Any) -> Any:
    return pipe(prompt, **{"output_type": "latent", **arguments})


def _one_step_sized(pipe: Any, prompt: Any = PROMPT, **arguments: Any) -> Any:
    return _one_step(pipe, prompt, **{"height": SIDE, "width": SIDE, **arguments})


def _tap(pipe: Any, prompt: Any = PROMPT, *, image: Any = None, **arguments: Any) -> Any:
    image = drawn().images[:2] if image is None else image
    return pipe.tap(image, "" if prompt is None else prompt, RESIDUAL, **{"output_type": "none", **arguments})


def _tap_block(pipe: Any, prompt: Any = PROMPT, *, image: Any = None, **arguments: Any) -> Any:
    image = drawn().images[:2] if image is None else image
    return pipe.tap(image, "" if prompt is None else prompt, "vit-block1-out", **{"output_type": "none", **arguments})


def _match(pipe: Any, prompt: Any = PROMPT, *, image: Any = None, **arguments: Any) -> Any:
    image = drawn().images[:2] if image is None else image
    return pipe.match(image[:1], image[1:2], [[0.3, 0.4]], prompt or "", addresses=RESIDUAL, **arguments)


def _label(pipe: Any, prompt: Any = PROMPT, *, image: Any = None, masks: Any = None, **arguments: Any) -> Any:
    image = drawn().images[:2] if image is None else image
    masks = (drawn().parts[:1] == 0).long() if masks is None else masks
    return pipe.segment(image[:1], masks, image[1:2], prompt or "", addresses=RESIDUAL, **arguments)


def _verified(pipe: Any, pictures: Any) -> torch.Tensor:
    """Its first step shows which picture the attack started from."""
    seen: list[torch.Tensor] = []
    handle = pipe.vae.encoder.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].clone()))

    class Stop(Exception):
        pass

    def stop(*progress: Any) -> None:
        raise Stop

    try:
        verify_blocking(
            pipe, PROMPT, _neurons(), 0.5, pictures[:1], ProbeConfig(seeds=3, timestep_index=15), progress=stop
        )
    except Stop:
        pass
    finally:
        handle.remove()
    return seen[0]


def _inverted(pipe: Any, pictures: Any, masks: Any = None) -> torch.Tensor:
    config = InvertConfig(steps=1, check_every=1000)
    return pipe.invert_image(_space(), pictures, PROMPT, config, mask=masks)[0].coefficients


def _inverted_within(pipe: Any, masks: Any) -> torch.Tensor:
    return _inverted(pipe, drawn().images[:2], masks)


ONE_FORWARD, ONE_STEP, DISTILLED = "a tap is one forward", "there is one step", "distilled"
ADAPTERS = {"cross_attention_kwargs": {"scale": 0.5}}
READS = {
    "num_images_per_prompt": ({"num_images_per_prompt": 2}, "pictures come in"),
    "negative_prompt": ({"negative_prompt": "x"}, ONE_FORWARD),
    "height, width": ({"height": SIDE, "width": SIDE}, "use size="),
    "callback_on_step_end": ({"callback_on_step_end": print}, ONE_FORWARD),
    "cross_attention_kwargs": (ADAPTERS, "set_adapters"),
    "guidance_scale": ({"guidance_scale": 2.0}, ONE_FORWARD),
}
TASKS = READS | {
    "output_type": ({"output_type": "np"}, "no pictures come back"),
    "return_dict": ({"return_dict": False}, "no pictures come back"),
}
TAPS = READS | {"output_type": ({"output_type": "np"}, "activations come back")}
CONTROL = {"cross_attention_kwargs": (ADAPTERS, "set_adapters")}
STUDENT = {
    "negative_prompt": ({"negative_prompt": "x"}, DISTILLED),
    "guidance_scale": ({"guidance_scale": 7.5}, DISTILLED),
    "callback_on_step_end": ({"callback_on_step_end": print}, ONE_STEP),
    "cross_attention_kwargs": (ADAPTERS, "set_adapters"),
}
PERSON = {"cross_attention_kwargs": (ADAPTERS, "its strength is its coefficients'")}
NO_PICTURES = ("pictures", "masks")

DOORS = {
    door.title: door
    for door in (
        Door("Tap", "sd", ours.ActivationTapPipeline, _tap, False, lambda p, x: read(_tap(p, image=x)),
             refused=TAPS, absent=("masks",)),
        Door("Tap XL", "sdxl", ours.ActivationTapPipeline, _tap, False, lambda p, x: read(_tap(p, image=x)),
             refused=TAPS, absent=("masks",)),
        Door("Tap, transformers", "flux", ours.ActivationTapPipeline, _tap_block, False,
             lambda p, x: read(_tap_block(p, image=x)), absent=("masks",), lent=True,
             refused=TAPS),
        Door("Match", "sd", ours.CorrespondencePipeline, _match, False, lambda p, x: read(_match(p, image=x)),
             refused=TASKS, absent=("masks",)),
        Door("Segment", "sd", ours.SegmentationPipeline, _label, False, lambda p, x: read(_label(p, image=x)),
             lambda p, x: read(_label(p, masks=x[:1])), refused=TASKS),
        Door("NEMO", "sd", ours.NEMOPipeline, _blocked, True, _verified, absent=("masks",)),
        Door("W2W", "sd", ours.W2WPipeline, _person, True, _inverted, _inverted_within, refused=PERSON),
        Door("EMD", "sd", ours.EMDOneStepPipeline, _one_step, refused=STUDENT, absent=NO_PICTURES),
        Door("EMD XL", "sdxl", ours.EMDOneStepPipeline, _one_step, refused=STUDENT, absent=NO_PICTURES),
        Door("EMD, transformers", "flux", ours.EMDOneStepPipeline, _one_step_sized, refused=STUDENT,
             absent=NO_PICTURES, lent=True),
        Door("Size conditioning", "sd", ours.ControlConditionedPipeline, _checkpointed, refused=CONTROL,
             absent=NO_PICTURES),
        Door("Size conditioning XL", "sdxl", ours.ControlConditionedPipeline, _sized, refused=CONTROL,
             absent=NO_PICTURES),
        Door("PixArt", "pixart-1024", ours.ControlConditionedPipeline, _sized, refused=CONTROL,
             absent=NO_PICTURES),
        Door("NEMO XL", "sdxl", ours.NEMOPipeline, _blocked_sdxl, absent=NO_PICTURES, lent=True),
        Door("W2W XL", "sdxl", ours.W2WPipeline, _person_sdxl, absent=NO_PICTURES, lent=True, refused=PERSON),
        Door("Resolution", "sd", ours.ResolutionTransferPipeline, _plain, absent=NO_PICTURES, config=(WIDE,)),
    )
}  # fmt: skip


def read(output: Any) -> torch.Tensor:
    """Whatever a call returned as one tensor of a row for each picture."""
    if isinstance(output, tuple):
        output = output[0]
    if isinstance(output, list):  # matches
        return torch.stack([match.points for match in output])
    output = getattr(output, "activations", output)
    output = getattr(output, "images", output)
    if isinstance(output, torch.Tensor):
        return output.float()
    return torch.cat([activation.tensor for activation in output.values()])


@functools.cache
def plain(title: str) -> torch.Tensor:
    """The result of the untouched call with two pictures."""
    return read(DOORS[title].run(DOORS[title].shared(), [PROMPT] * 2, **noise(DOORS[title], 1, 2)))


def noise(door: Door, *seeds: int) -> dict[str, Any]:
    """One generator for each seed."""
    return {"generator": [torch.Generator().manual_seed(seed) for seed in seeds]}
