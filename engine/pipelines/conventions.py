"""Arguments that diffusers' pipelines share, made what our sampling takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..diffusion.noise import generators
from ..diffusion.sampling import Revise
from ..errors import refuse

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

Generators = torch.Generator | list[torch.Generator]
StepEnd = Callable[[Any, int, torch.Tensor, dict[str, torch.Tensor]], dict[str, torch.Tensor] | None]
"""diffusers' ``callback_on_step_end``: (pipeline, step, t, {"latents": x}) -> the latents to continue with."""


def noise_sources(
    seeds: Sequence[int] | None, generator: Generators | None, latents: torch.Tensor | None, count: int
) -> Generators | None:
    """What noise is sampled from: one generator, or one for each picture; None where the noise is given."""
    sources: dict[str, Any] = {"seeds": seeds, "generator": generator, "latents": latents}
    chosen = [name for name, value in sources.items() if value is not None]
    if len(chosen) > 1:
        raise refuse(", ".join(chosen), "all of them", "one of them", "each of them decides the noise")
    rows = range(count) if not chosen else sources[chosen[0]]
    if not isinstance(rows, torch.Generator) and len(rows) != count:
        raise refuse(chosen[0], len(rows), f"{count}, one for each picture", "repeat or remove some")
    if latents is not None:
        return None
    return generator if generator is not None else generators(range(count) if seeds is None else seeds)


def accepted_by(kind: type) -> Mapping[str, inspect.Parameter]:
    """Parameters of a pipeline's call, with its parent's where it hands ``**kwargs`` on."""
    parameters: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        if "__call__" in vars(base):
            of_base = inspect.signature(base.__call__).parameters
            parameters = {**of_base, **parameters}
            if not any(p.kind is p.VAR_KEYWORD for p in of_base.values()):
                break
    return parameters


def inputs_of_blocks(pipe: DiffusionPipeline) -> list[str]:
    """What a modular pipeline's call accepts: the inputs of its blocks; nothing of other pipelines."""
    return [i.name for i in getattr(getattr(pipe, "blocks", None), "inputs", ()) if i.name]


def refuse_unknown(kind: type, arguments: Mapping[str, Any], known: Sequence[str] = ()) -> None:
    """diffusers' older pipelines and its modular ones swallow arguments they do not know.

    Args:
        known: accepted as well as what the class names.
    """
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    accepted = [name for name, p in accepted_by(kind).items() if p.kind not in kinds and name != "self"]
    accepted += known
    unknown = sorted(set(arguments) - {*accepted, *_DEPRECATED})
    if unknown:
        raise refuse("arguments", unknown, accepted, f"{kind.__name__} would ignore them")


def refuse_arguments(
    calls: Sequence[Callable[..., Any]],
    unknown: Mapping[str, Any],
    reasons: Mapping[str, str],
    accepted: Sequence[str] = (),
) -> None:
    """An argument that cannot be honoured must not be swallowed.

    Args:
        calls: of the signatures that say what is accepted.
        reasons: arguments of the stock pipelines that have no meaning here, and why.
        accepted: names that are taken beyond those of the signatures.
    """
    if unknown:
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        parameters = [p for call in calls for p in inspect.signature(call).parameters.values()]
        known = dict.fromkeys(p.name for p in parameters if p.kind not in kinds and p.name != "self")
        remedy = "; ".join(dict.fromkeys(reasons[name] for name in sorted(unknown) if name in reasons))
        raise refuse("arguments", sorted(unknown), [*known, *accepted], remedy or "see the docstring")


_DEPRECATED = ("callback", "callback_steps")
"""diffusers takes them from ``**kwargs``."""


def masks_of(masks: Any) -> list[torch.Tensor]:
    """(H, W) of each mask, in its own numbers, of a tensor, an array, a PIL picture, or a list of these."""
    forms = "(H, W) or (N, H, W) tensors or arrays, PIL pictures of one channel, or a list of them"
    several = masks if isinstance(masks, (list, tuple)) else [masks]
    try:
        tensors = [m if isinstance(m, torch.Tensor) else torch.from_numpy(np.array(m)) for m in several]
    except TypeError as error:
        raise refuse("masks", ", ".join(type(m).__name__ for m in several[:3]), forms, "convert them first") from error
    if not tensors or any(t.ndim not in (2, 3) or t.is_complex() for t in tensors):
        raise refuse("masks", [tuple(t.shape) for t in tensors], forms, "convert them first")
    tensors = [t.float() if t.is_floating_point() and t.element_size() == 1 else t for t in tensors]
    return [mask for t in tensors for mask in (t[None] if t.ndim == 2 else t)]


def soft_masks(masks: Any, size: Sequence[int]) -> torch.Tensor:
    """(B, H, W) float32 in [0, 1], from masks of that range, of 0..255 bytes, or of truth values.

    Args:
        size: (B, H, W) that is wanted.
    """
    each = masks_of(masks)
    if [tuple(m.shape) for m in each] != [tuple(size[1:])] * size[0]:
        raise refuse("masks", [tuple(m.shape) for m in each], f"{tuple(size)}", "one for each picture, as large as it")
    soft = torch.stack([m.float() / 255 if m.dtype == torch.uint8 else m.float() for m in each])
    if not bool(((soft >= 0) & (soft <= 1)).all()):  # NaN is neither
        shown = f"{float(soft.min()):g} to {float(soft.max()):g}"
        raise refuse("masks", shown, "numbers from 0 to 1, bytes, or truth values", "divide 0..255 values by 255")
    return soft


def revision(pipe: DiffusionPipeline, callback: StepEnd | None) -> Revise | None:
    """A callback of diffusers as our sampling loop calls it."""
    if callback is None:
        return None

    def revise(step: int, t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (callback(pipe, step, t, {"latents": x}) or {}).get("latents", x)

    return revise
