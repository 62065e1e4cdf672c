"""The ways in which a user places a pipeline, and one run of a call under each of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from . import around_calls, job_calls  # noqa: F401 - they enter their calls
from .calls import CALLS
from .pretend import NAME, Accelerator, Counts, DeviceTensor
from .stock import backbone, modules, stock

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _group(kind: str) -> Callable[[Any, str], None]:
    def place(pipe: Any, device: str) -> None:
        # The VAE's blocks are cut through by its own forward, and diffusers leaves them whole at block level.
        whole = {"num_blocks_per_group": 1} if kind == "block_level" else {}
        pipe.enable_group_offload(
            torch.device(device, 0), torch.device("cpu"), offload_type=kind, use_stream=False, **whole
        )

    return place


def _compile(pipe: Any, device: str) -> None:
    """In place, as diffusers advises, after a first forward; ``eager`` traces and compiles nothing."""
    pipe.to(device)
    backbone(pipe).compile(backend="eager")


def _adapter(pipe: Any, device: str) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    net = backbone(pipe)
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"]), net, "extra")
    net.requires_grad_(False)
    pipe.to(device)


def _sliced(pipe: Any, device: str) -> None:
    pipe.to(device)
    pipe.vae.enable_slicing()
    pipe.vae.enable_tiling()
    if hasattr(backbone(pipe), "set_attention_slice"):
        pipe.enable_attention_slicing("max")


MODES: dict[str, Callable[[Any, str], Any]] = {
    "on the device": lambda pipe, device: pipe.to(device),
    "model offload": lambda pipe, device: pipe.enable_model_cpu_offload(device=device),
    "sequential offload": lambda pipe, device: pipe.enable_sequential_cpu_offload(device=device),
    "groups, leaves": _group("leaf_level"),
    "groups, blocks": _group("block_level"),
    "slicing, tiling": _sliced,
    "LoRA loaded": _adapter,
    "compiled": _compile,
}
"""Mode -> function that places a pipeline so, on a device."""

OFFLOADED = ("model offload", "sequential offload", "groups, leaves", "groups, blocks")


def where(pipe: Any) -> dict[str, str]:
    """Network -> where its weights are and in which precision: what a call must leave as it was."""
    found = {}
    for name, part in modules(pipe).items():
        tensors = [*part.parameters(), *part.buffers()]
        found[name] = ", ".join(sorted({f"{t.device.type} {t.dtype}" for t in tensors}))
    return found


def on_the_cpu(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """float32 copies."""
    return [(t.inner if isinstance(t, DeviceTensor) else t).detach().float().cpu().clone() for t in tensors]


@functools.cache
def plain(name: str, family: str, dtype: str = "fp32") -> list[torch.Tensor]:
    """What a call makes on the CPU in a precision: what all other runs are held to."""
    pipe = CALLS[name].pipeline(family).to(DTYPES[dtype])
    before = where(pipe)
    torch.manual_seed(0)
    made = on_the_cpu(CALLS[name].run(pipe))
    assert where(pipe) == before, f"{name} changed {moved(before, where(pipe))}"
    return made


def placed(name: str, family: str, mode: str, dtype: str = "fp32", device: str = NAME) -> list[torch.Tensor]:
    """What it makes on a device, by default the pretended one.

    Raises:
        AssertionError: a module was moved or cast.
    """
    call = CALLS[name]
    with Accelerator() if device == NAME else nullcontext():
        pipe = call.pipeline(family).to(DTYPES[dtype])
        MODES[mode](pipe, device)
        before = where(pipe)
        torch.manual_seed(0)
        made = on_the_cpu(call.run(pipe))
        assert where(pipe) == before, f"{name} moved {moved(before, where(pipe))}"
    return made


def moved(before: dict[str, str], after: dict[str, str]) -> str:
    """What differs, in words."""
    return "; ".join(f"{k}: {v} -> {after[k]}" for k, v in before.items() if after[k] != v)


@dataclass(frozen=True)
class Traffic:
    """What a call made on a device without float64, and what went over between host and device.

    Attributes:
        made: its tensors, on the CPU.
        seen: the notes of a second call, for the first may prepare things.
        forwards: of the backbone in it.
    """

    made: list[torch.Tensor]
    seen: Counts
    forwards: int


@functools.cache
def traffic(name: str, family: str, steps: int = 0) -> Traffic:
    """One call on the device, twice."""
    call, forwards = CALLS[name], []
    told = {"steps": steps} if steps else {}
    with Accelerator(float64=False) as device:
        pipe = call.pipeline(family).to(NAME)
        torch.manual_seed(0)
        made = on_the_cpu(call.run(pipe, **told))
        backbone(pipe).register_forward_pre_hook(lambda module, args: forwards.append(1))
        with device.counting() as seen:
            call.run(pipe, **told)
    return Traffic(made, seen, len(forwards))


@functools.cache
def stock_step(family: str) -> tuple[float, float]:
    """Syncs and uploads a step of the stock diffusers pipeline: its scheduler's own."""

    def run(pipe: Any, steps: int) -> None:
        square = {"use_resolution_binning": False} if family.startswith("pixart") else {}
        told = {"num_inference_steps": steps, "output_type": "latent", **square}
        pipe("a face", generator=torch.Generator().manual_seed(0), **told)

    def count(steps: int) -> Counts:
        with Accelerator() as device:
            pipe = stock(family.split("-")[0]).to(NAME)
            run(pipe, steps)
            with device.counting() as seen:
                run(pipe, steps)
        return seen

    few, many = count(2), count(3)
    return float(many.syncs - few.syncs), float(many.uploads - few.uploads)


def per_step(name: str, family: str) -> tuple[float, float]:
    """Syncs and uploads that each further step of a call costs."""
    few, many = (traffic(name, family, n).seen for n in (2, 3))
    return float(many.syncs - few.syncs), float(many.uploads - few.uploads)


def pairs(*names: str) -> list[tuple[str, str]]:
    """(call, family) for the calls of these names, by default all."""
    return [(name, family) for name in names or CALLS for family in CALLS[name].kinds]


def difference(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest error of any of the tensors, relative in the Euclidean norm; NaN where one is not finite."""
    errors = []
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        errors.append(float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12)))
    return float(torch.tensor(errors).max())
