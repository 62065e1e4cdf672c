"""Samples of the flow portraits above their training size, with every scaling of rotary positions.

Nothing is tuned: modes and constants are the papers'. Prompts and seeds are used nowhere else. Metrics are whether an
image is still one portrait of the prompt (attribute classifier at 64 px) and whether it is as detailed as a render of
that size; the trivial baseline is the enlarged image of 128 px.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from ...engine.pipelines import ResolutionTransferPipeline
from ...engine.portraits.captions import caption
from ...engine.portraits.dataset import shown_mask
from ...engine.portraits.flow import FlowPortraits
from ...engine.portraits.render import render
from ...engine.portraits.scenes import ATTRIBUTE_NAMES, Scenes, sample_scenes
from ...engine.resolution import ResolutionTransferConfig
from ...engine.runtime.progress import Progress
from ..intervals import mean_interval
from ..metrics import fine_detail, frechet_distance
from ..portraits.classifier import AttributeClassifier, Reading, read
from ..registry import Arm, Table, arms
from .heads import Count

FIRST_SCENE, REFERENCE_SCENE, FIRST_SEED, PROMPT_COUNT = 8_600_000, 8_700_000, 40_000, 16
TRAINED_SIDE, STEPS, GUIDANCE, BATCH = 128, 20, 3.0, 8
ENLARGED, EXTRAPOLATED = "128 px, enlarged", "as it stands"
ARMS = (EXTRAPOLATED, *(f"rope_{name}{kind}" for name in ("pi", "ntk", "yarn") for kind in ("", "_dynamic")))


@dataclass(frozen=True)
class Look:
    """One arm at one size.

    Attributes:
        hits: (images,) fraction of the prompt's attributes in each image.
        frechet: distance to renders of that size in classifier features.
        detail: energy of the finest octave relative to the renders.
        heads: (images,) number of heads in each image.
        coarse: (images,) root mean square error, in [0, 1], to the scene's render, both at 16 x 16.
    """

    hits: torch.Tensor
    frechet: float
    detail: float
    heads: torch.Tensor
    coarse: torch.Tensor


def draw(model: FlowPortraits, arm: str, size: tuple[int, int], scenes: Scenes, progress: Progress) -> torch.Tensor:
    """Samples (N, 3, H, W) in [0, 1]: one image per scene of that (width, height), with a resampled schedule."""
    pipe, prompts = model.pipeline(), caption(scenes)
    pipe.set_progress_bar_config(disable=True)
    width, height = (TRAINED_SIDE, TRAINED_SIDE) if arm == ENLARGED else size
    positions = "keep" if arm in (ENLARGED, EXTRAPOLATED) else arm
    config = ResolutionTransferConfig((width, height), train_size=(TRAINED_SIDE, TRAINED_SIDE), pos_embed=positions)
    larger = ResolutionTransferPipeline.from_pipe(pipe, config)
    pictures = []
    for start in range(0, len(prompts), BATCH):
        rows = prompts[start : start + BATCH]
        made = larger(
            rows,
            seeds=[FIRST_SEED + start + k for k in range(len(rows))],
            negative_prompt=[""] * len(rows),
            true_cfg_scale=GUIDANCE,
            num_inference_steps=STEPS,
            max_sequence_length=24,
            output_type="pt",
        )
        pictures.append(made.images.float().clamp(0, 1))
        progress(start + len(rows), len(prompts), None)
    images = torch.cat(pictures)
    if arm != ENLARGED:
        return images
    return functional.interpolate(images, (size[1], size[0]), mode="bicubic").clamp(0, 1)


def shown_arms(looks: Mapping[str, Look], ours: str, trivial: str) -> tuple[Arm, ...]:
    """Fraction of attributes shown by each arm of one size."""
    roles = {name: "reference" if name.endswith("enlarged") else "rival" for name in looks}
    roles |= {trivial: "trivial", ours: "ours"}
    spans = {name: mean_interval(look.hits) for name, look in looks.items()}
    return arms({name: float(look.hits.mean()) for name, look in looks.items()}, roles, spans)


def head_table(looks: Mapping[tuple[int, int], Mapping[str, Look]]) -> Table:
    """Attributes shown and heads counted, by arm and size."""
    names = list(next(iter(looks.values())))
    head = ("arm", *(f"{w} x {h}: {what}" for w, h in looks for what in ("shown", "heads")))
    figures = {n: [f(by[n]) for by in looks.values() for f in (_mean_hits, _mean_heads)] for n in names}
    return Table("Attributes shown, heads counted", head, tuple((n, *values) for n, values in figures.items()))


def _mean_hits(look: Look) -> float:
    return float(look.hits.mean())


def _mean_heads(look: Look) -> float:
    return float(look.heads.float().mean())


def judge(net: AttributeClassifier, count: Count, images: torch.Tensor, scenes: Scenes, details: bool = True) -> Look:
    """Metrics of images of one size, against renders of other scenes of that size.

    Args:
        count: from :func:`~.heads.head_counter`.
        details: render with the flow portraits' details.
    """
    others = sample_scenes(range(REFERENCE_SCENE, REFERENCE_SCENE + len(images)))
    drawn = square(render(others, images.shape[-2], details=details).images)
    seen, reference = _at_64(net, square(images)), _at_64(net, drawn)
    hits = shown_share(seen, scenes)
    detail = float(fine_detail(square(images)).mean() / fine_detail(drawn).mean())
    distance = frechet_distance(seen.features, reference.features)
    return Look(hits, distance, detail, count(images), coarse_error(square(images), scenes, details))


def shown_share(seen: Reading, scenes: Scenes) -> torch.Tensor:
    """(N,) fraction of the attributes in each scene's prompt that the classifier reads in its image."""
    wanted = torch.as_tensor(scenes.attributes)
    shown = shown_mask(wanted)
    right = torch.stack([seen.logits[n].argmax(1) == wanted[:, k] for k, n in enumerate(ATTRIBUTE_NAMES)], 1)
    return (right & shown).sum(1) / shown.sum(1)


def coarse_error(images: torch.Tensor, scenes: Scenes, details: bool = False) -> torch.Tensor:
    """(N,) root mean square error of (N, 3, S, S) images to their scenes' renders, both averaged to 16 x 16.

    Prompts do not give the head's position, so it is not 0 for a perfect image: compare differences.
    """
    renders = render(scenes, images.shape[-1], details=details).images
    coarse = [functional.interpolate(x, (16, 16), mode="area") for x in (images, renders)]
    return (coarse[0] - coarse[1]).square().flatten(1).mean(1).sqrt()


def square(images: torch.Tensor) -> torch.Tensor:
    """The central square of wide images."""
    height, width = images.shape[-2:]
    left = (width - height) // 2
    return images[..., left : left + height]


def _at_64(net: AttributeClassifier, images: torch.Tensor) -> Reading:
    return read(net, functional.interpolate(images, (64, 64), mode="area"))
