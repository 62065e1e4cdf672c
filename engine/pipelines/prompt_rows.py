"""Which batch rows of a sampling pipeline have the prompt, by their texts: guidance orders a batch in many ways."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..errors import refuse

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class PromptRows:
    """What a pipeline encoded in a run: the prompts' texts and the negative prompts'.

    Perturbed-attention guidance appends a third part to the batch, self-attention guidance and skipped layers run one
    part again, and pipelines that edit pictures begin with the prompt; so no order is assumed.
    """

    def __init__(self) -> None:
        self._prompts: list[torch.Tensor] = []
        self._negatives: list[torch.Tensor] = []

    def add(self, prompts: Any, negatives: Any) -> None:
        """Texts (n, N, C) of a call of ``encode_prompt``; None or empty where there are none."""
        for known, texts in ((self._prompts, prompts), (self._negatives, negatives)):
            known += [] if texts is None else list(texts)

    def of(self, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        """(B,) bool: the batch rows of a forward of the network whose text is a prompt's."""
        text: torch.Tensor = kwargs["encoder_hidden_states"] if "encoder_hidden_states" in kwargs else args[2]
        positive, negative = (_among(text, known) for known in (self._prompts, self._negatives))
        if bool((positive ^ negative).all()):
            return positive
        stacked = len(text) == 2 * len(self._prompts) == 2 * len(self._negatives)
        if bool((positive & negative).any()) and bool((positive | negative).all()) and stacked:
            return torch.arange(len(text)) >= len(text) // 2  # one text as both: the negative prompt comes first
        shown = f"{int((~positive & ~negative).sum())} of {len(text)} batch rows of unknown text"
        accepted = "texts that the pipeline's encode_prompt gave"
        raise refuse("the prompt's part of the batch", shown, accepted, "let it act on both branches")


def _among(text: torch.Tensor, known: list[torch.Tensor]) -> torch.Tensor:
    texts = [own.to(text) for own in known]
    return torch.tensor([any(torch.equal(row, own) for own in texts) for row in text], dtype=torch.bool)


@contextmanager
def noted_prompts(pipe: DiffusionPipeline) -> Iterator[PromptRows]:
    """While open, the texts that a pipeline encodes are noted."""
    rows, encode = PromptRows(), getattr(pipe, "encode_prompt", None)
    if encode is None:
        yield rows
        return

    @functools.wraps(encode)
    def noted(*args: Any, **kwargs: Any) -> Any:
        texts = encode(*args, **kwargs)
        rows.add(*texts[:2])
        return texts

    pipe.__dict__["encode_prompt"] = noted
    try:
        yield rows
    finally:
        del pipe.__dict__["encode_prompt"]
