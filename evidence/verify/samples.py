"""Samples of many prompts under a treatment: descriptors are stored prompt by prompt, so a kill loses at most one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...engine.activations.picture_latents import to_pixels
from ...engine.diffusion.noise import generators
from ...engine.errors import VitrineError
from ...engine.io.picture_files import open_picture
from ...engine.io.table_on_disk import RowFile
from .context import Context
from .judge import Judge
from .records import Need

ORIGINALS = Need(
    "originals",
    "the training pictures, each file named by its prompt's line in the list, from 0000 on",
    "column URL of the list; many of these links are dead",
    "whatever each picture's owner says",
    optional=True,
)


class Samples:
    """Descriptors (S, D) of the samples of each prompt, by pixels or SSCD, and CLIP's.

    Args:
        prompts: one per row.
        name: of the treatment, for files and the progress bar.
        facts: what identifies the treatment in a later run.
        arguments: row -> further arguments of the pipeline's call, such as ``neurons``.
        seeds: samples of each prompt; None takes the settings'.
    """

    def __init__(
        self,
        context: Context,
        judge: Judge,
        prompts: Sequence[str],
        name: str,
        facts: object = None,
        arguments: Callable[[int], Mapping[str, Any]] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> None:
        self.context, self.judge, self.prompts, self.name = context, judge, list(prompts), name
        first = context.settings.first_seed
        self.seeds = list(range(first, first + context.settings.seeds)) if seeds is None else list(seeds)
        self._arguments = arguments or (lambda row: {})
        chosen = context.settings
        sampling = [chosen.steps, chosen.guidance, chosen.size, dict(chosen.call)]
        descriptors = context.data_sums_of("sscd", "clip")
        inputs = [name, self.prompts, facts, self.seeds, sampling, context.settings.scheduler, descriptors, judge.key]
        self.folder = context.state(f"samples-{name}", inputs)

    def all(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, S, D) of the descriptor and (N, S, E) of CLIP, E 0 without it; samples missing prompts."""
        described = [torch.zeros(1, 3, 64, 64)]
        widths = [self.judge.describe(described[0]).shape[1]]
        widths.append(0 if self.judge.image is None else self.judge.image(described[0]).shape[1])
        count, bar = len(self.seeds), self.context.bar(f"samples, {self.name}")
        with RowFile(self.folder, (len(self.prompts), count * sum(widths))) as table:
            for i in range(len(self.prompts)):
                if not table.done[i]:
                    pictures = sampled(self.context, self.prompts[i], self.seeds, self._arguments(i))
                    table.write(i, self._described(pictures).flatten()[None])
                bar(i + 1, len(self.prompts), None)
            rows = table.rows(range(len(self.prompts))).view(len(self.prompts), count, sum(widths))
        return rows[..., : widths[0]], rows[..., widths[0] :]

    def _described(self, pictures: torch.Tensor) -> torch.Tensor:
        parts = [self.judge.describe(pictures)]
        if self.judge.image is not None:
            parts.append(self.judge.image(pictures))
        return torch.cat(parts, 1)


def sampled(context: Context, prompt: str, seeds: Sequence[int], arguments: Mapping[str, Any]) -> torch.Tensor:
    """(S, 3, H, W) in [0, 1] on the CPU, in batches that fit the budget."""
    settings, images = context.settings, []
    together = context.pace.pictures_within(context.budget, len(seeds))
    size = {"height": settings.size, "width": settings.size} if settings.size else {}
    with _scheduler(context):
        for start in range(0, len(seeds), together):
            part = list(seeds[start : start + together])
            texts = {k: [v] * len(part) if isinstance(v, str) else v for k, v in settings.call.items()}
            own = dict(arguments)
            own = own if "prompt_embeds" in own else own | {"prompt": [prompt] * len(part)}
            own |= {k: v.expand(len(part), -1, -1) for k, v in own.items() if k == "prompt_embeds"}
            images.append(context.nemo(
                generator=generators(part), output_type="pt", num_inference_steps=settings.steps,
                guidance_scale=settings.guidance, **size, **texts, **own,
            ).images.float().cpu().clamp(0, 1))  # fmt: skip
    return torch.cat(images)


@contextmanager
def _scheduler(context: Context) -> Iterator[None]:
    """The settings' scheduler, with the pipeline's configuration; none for a model without a UNet."""
    import diffusers

    pipe, before = context.nemo, context.nemo.scheduler
    if context.settings.scheduler and context.kind == "SD":
        pipe.scheduler = getattr(diffusers, context.settings.scheduler).from_config(before.config)
    try:
        yield
    finally:
        pipe.scheduler = before


def originals(context: Context, rows: Sequence[int]) -> dict[int, torch.Tensor]:
    """Row number of the list -> its training picture (1, 3, H, W) in [0, 1], if there is one and it can be read."""
    folder = context.path(ORIGINALS)
    if folder is None:
        return {}
    files = {path.name[:4]: path for path in sorted(folder.iterdir(), reverse=True) if path.name[:4].isdigit()}
    pictures = {}
    for row in rows:
        path = files.get(f"{row:04d}")
        if path is None:
            continue
        try:
            pictures[row] = (to_pixels(open_picture(path), None, 1) + 1) / 2
        except VitrineError:  # a dead link often leaves a page in the picture's place
            continue
    return pictures
