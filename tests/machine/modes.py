"""The ways in which a user places a pipeline, and one run of a call under each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .calls import CALLS, Call
from .pretend import DEVICE, NAME, Accelerator, Counts, DeviceTensor
from .stock import backbone, modules

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _group(kind: str) -> Callable[[Any], None]:
    def place(pipe: Any) -> None:
        # The VAE's blocks are cut through by its own forward, and diffusers leaves them whole at block level.
        whole = {"num_blocks_per_group": 1} if kind == "block_level" else {}
        pipe.enable_group_offload(
            torch.device(NAME, 0), torch.device("cpu"), offload_type=kind, use_stream=False, **whole
        )

    return place


def _compile(pipe: Any) -> None:
    """In place, as diffusers advises, after a first forward; ``eager`` traces and compiles nothing."""
    pipe.to(NAME)
    backbone(pipe).compile(backend="eager")


def _adapter(pipe: Any) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    net = backbone(pipe)
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"]), net, "extra")
    net.requires_grad_(False)
    pipe.to(NAME)


def _sliced(pipe: Any) -> None:
    pipe.to(NAME)
    pipe.vae.enable_slicing()
    pipe.vae.enable_tiling()
    if hasattr(backbone(pipe), "set_attention_slice"):
        pipe.enable_attention_slicing("max")


MODES: dict[str, Callable[[Any], Any]] = {
    "on the device": lambda pipe: pipe.to(NAME),
    "model offload": lambda pipe: pipe.enable_model_cpu_offload(device=NAME),
    "sequential offload": lambda pipe: pipe.enable_sequential_cpu_offload(device=NAME),
    "groups, leaves": _group("leaf_level"),
    "groups, blocks": _group("block_level"),
    "slicing, tiling": _sliced,
    "LoRA loaded": _adapter,
    "compiled": _compile,
}
"""Mode -> function that places a pipeline so."""

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
    return [(t.inner if isinstance(t, DeviceTensor) else t).detach().float().clone() for t in tensors]


def plain(call: Call, family: str, dtype: str = "fp32") -> list[torch.Tensor]:
    """The call on the CPU, in a precision."""
    torch.manual_seed(0)
    return on_the_cpu(call.run(call.pipeline(family).to(DTYPES[dtype])))


def placed(call: Call, family: str, mode: str, dtype: str = "fp32", float64: bool = True) -> list[torch.Tensor]:
    """The call on the pretend device, twice: the second run must be the first, and leave all modules where they were.

    Raises:
        AssertionError: a module was moved or cast, or the second run differs.
    """
    with Accelerator(float64):
        pipe = call.pipeline(family).to(DTYPES[dtype])
        MODES[mode](pipe)
        before = where(pipe)
        torch.manual_seed(0)
        first = on_the_cpu(call.run(pipe))
        assert where(pipe) == before, f"{call.name} moved {moved(before, where(pipe))}"
    return first


def moved(before: dict[str, str], after: dict[str, str]) -> str:
    """What differs, in words."""
    return "; ".join(f"{k}: {v} -> {after[k]}" for k, v in before.items() if after[k] != v)


def counted(call: Call, family: str, steps: int = 0, float64: bool = True) -> Counts:
    """What the host and the device exchange in one call, the second with a pipeline: the first may prepare things."""
    with Accelerator(float64) as device:
        pipe = call.pipeline(family).to(NAME)
        told = {"steps": steps} if steps else {}
        call.run(pipe, **told)
        with device.counting() as seen:
            call.run(pipe, **told)
    return seen


def pairs(*names: str) -> list[tuple[str, str]]:
    """(call, family) for the calls of these names, by default all."""
    return [(name, family) for name in names or CALLS for family in CALLS[name].kinds]


def difference(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest relative error, in the Euclidean norm, of any of the tensors; NaN where one is not finite."""
    errors = []
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        if not bool(torch.isfinite(ours).all()):
            return float("nan")
        errors.append(float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12)))
    return max(errors)
