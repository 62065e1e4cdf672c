"""Text padding: zeros, or copies of the prompt's own tokens with noise (Berrada et al. 2024, 2.1 and appendix C)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch

from ..errors import refuse
from ..settings.option import Option, Options

MODES = ("zero", "replicate", "noisy_replicate")
SCOPES = ("all", "copies")
AXES = ("channel", "feature")


@dataclass(frozen=True)
class PaddingConfig(Options):
    """How token positions after the prompt are filled."""

    mode: Annotated[
        str,
        Option(
            "noisy_replicate is the paper's; replicate has no noise; zero empties the positions.",
            choices=MODES,
        ),
    ] = "noisy_replicate"
    beta_txt: Annotated[
        float,
        Option(
            "Variance of the noise.",
            ge=0,
            top=1,
            step=0.001,
            details="Relative to the tokens' variance; the paper does not give it.",
        ),
    ] = 1e-2
    scope: Annotated[
        str,
        Option(
            "copies leaves the prompt's own tokens untouched; all is the paper's, for trained models.",
            choices=SCOPES,
        ),
    ] = "copies"
    axis: Annotated[
        str,
        Option(
            "What the noise is scaled by.",
            choices=AXES,
            details="The standard deviation over the prompt's tokens per "
            "channel, or over the channels per token; the paper allows both readings.",
        ),
    ] = "channel"


def pad_text(
    embeds: torch.Tensor,
    lengths: Sequence[int] | torch.Tensor,
    config: PaddingConfig | None = None,
    seeds: int | Sequence[int] = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill the positions after each prompt.

    Args:
        embeds: (B, T, C) text states; positions after a prompt are not read.
        lengths: (B,) tokens of each prompt, its start and end tokens included; 1 to T.
        seeds: of the noise, one, or one per row. A row's noise does not depend on the rest of the batch.

    Returns:
        (B, T, C) of the same dtype, and the attention mask (B, T): all ones, since every position is attended to.
    """
    config = config or PaddingConfig()
    counts = torch.as_tensor(lengths).reshape(-1).tolist()
    if embeds.ndim != 3 or len(counts) != len(embeds):
        shapes = (tuple(embeds.shape), len(counts))
        raise refuse("embeds, lengths", shapes, "(B, T, C) and B lengths", "one length per prompt")
    if not all(1 <= n <= embeds.shape[1] for n in counts):
        raise refuse("lengths", counts, f"1 to {embeds.shape[1]}", "count the start and end tokens too")
    seeds = [seeds] * len(counts) if isinstance(seeds, int) else list(seeds)
    if len(seeds) != len(counts):
        raise refuse("seeds", len(seeds), f"1 or {len(counts)}", "one per prompt")
    rows = [_pad(row, int(n), config, s) for row, n, s in zip(embeds, counts, seeds, strict=True)]
    return torch.stack(rows), torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device)


def _pad(row: torch.Tensor, count: int, config: PaddingConfig, seed: int) -> torch.Tensor:
    total = len(row)
    if config.mode == "zero":
        return torch.cat([row[:count], torch.zeros_like(row[count:])])
    copies = math.ceil(total / count)
    tiled = row[:count].repeat(copies, 1)[:total]
    if config.mode == "replicate" or copies == 1 or config.beta_txt == 0:
        return tiled
    tokens = row[:count].float()
    # The population standard deviation, so that a prompt of one token has 0, not NaN.
    spread = tokens.std(0, correction=0) if config.axis == "channel" else tiled.float().std(1, True, keepdim=True)
    noise = torch.randn(tiled.shape, generator=torch.Generator().manual_seed(seed)).to(row.device)
    # Berrada et al. 2024, appendix C: phi + sqrt(beta_txt) sqrt(m - 1) sigma_ch(phi) eps
    noisy = (tiled.float() + math.sqrt(config.beta_txt * (copies - 1)) * spread * noise).to(row.dtype)
    return noisy if config.scope == "all" else torch.cat([row[:count], noisy[count:]])
