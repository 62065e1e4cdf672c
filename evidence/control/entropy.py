"""Samples of the portraits transformer under entropy rectifying guidance (Berrada et al. 2025) and baselines.

Every arm has the same number of UNet evaluations per image: 30 steps without guidance, 15 with plain guidance or ERG,
10 with the three evaluations of Eq. 2. The weakened layer was chosen among all layers and each alone, on 96 other
prompts and seeds at 24 evaluations; tau is ACE-Step's, for the whole run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...engine.control import GuidanceConfig, Injection
from ...engine.control.entropy_guidance import EntropyConfig, query_sites, weakened
from ...engine.diffusion.denoiser import Denoiser
from ...engine.diffusion.noise import seeded_noise
from ...engine.diffusion.sampling import sample
from ...engine.network.condition import Condition
from ..portraits.sampling import decode
from .controlled_transformer import NEUTRAL, SIDE, ControlledTransformer
from .guided import BATCH, draw_guided

TAU, BETA, ROWS = 0.01, 1.375, 30
EVERYWHERE, CHOSEN = "*-self-q", "vit-block1-self-q"


class Arm(NamedTuple):
    """What guidance moves away from: nothing at ``scale`` 1; the empty prompt, the weakened network, or both.

    Attributes:
        tau: of the weakened network; 1 weakens nothing.
        empty: its condition is the empty prompt without control, else that of the full network.
        beta: of Eq. 2; 1 is none, otherwise tau and empty are ignored.
        places: names of the weakened query sites.
    """

    scale: float
    tau: float = 1.0
    empty: bool = False
    beta: float = 1.0
    places: str = CHOSEN

    @property
    def evaluations(self) -> int:
        """Network evaluations per image and step."""
        return 3 if self.beta != 1 else 1 if self.scale == 1 else 2


NONE, PLAIN, ENTROPY, BOTH = "no guidance", "plain, 2", "ERG, 2", "ERG and plain, 2"
ARMS = {
    NONE: Arm(1.0),
    PLAIN: Arm(2.0, empty=True),
    "plain, 3": Arm(3.0, empty=True),
    "Eq. 2, 2 and beta 1.375": Arm(2.0, empty=True, beta=BETA),
    ENTROPY: Arm(2.0, TAU),
    "ERG in every layer, 2": Arm(2.0, TAU, places=EVERYWHERE),
    BOTH: Arm(2.0, TAU, empty=True),
}


def draw(
    model: ControlledTransformer, arm: Arm, prompts: list[str], seeds: list[int], rows: int = ROWS
) -> torch.Tensor:
    """Samples images (N, 3, 64, 64) in [0, 1] at the training size, with ``rows`` network evaluations per image."""
    steps = rows // arm.evaluations
    if arm.beta != 1:
        return draw_guided(model, prompts, seeds, GuidanceConfig(arm.scale, arm.beta), steps)
    if arm.scale == 1:
        return model.draw(prompts, seeds, steps=steps, guidance=1.0)
    values = model.embedder.spec.rows(NEUTRAL | {"height": float(SIDE), "width": float(SIDE)})
    images = []
    for start in range(0, len(prompts), BATCH):
        part = slice(start, start + BATCH)
        noise = seeded_noise(seeds[part], (4, SIDE // 4, SIDE // 4))
        images.append(decode(model.portraits, _latents(model, arm, prompts[part], noise, values, steps)))
    return torch.cat(images)


def _latents(
    model: ControlledTransformer, arm: Arm, prompts: list[str], noise: torch.Tensor, values: torch.Tensor, steps: int
) -> torch.Tensor:
    """Batch layout as in :meth:`ControlledTransformer.draw`: the second half is what guidance moves away from."""
    count, config = len(prompts), EntropyConfig(arm.scale, arm.tau, arm.places)
    full = Condition(model.portraits.encode(prompts))
    away = Condition(model.portraits.encode([""])) if arm.empty else full
    second = torch.arange(2 * count) >= count
    injection = Injection(
        model.transformer, model.embedder, values.expand(2 * count, -1), model.gamma, second & arm.empty
    )
    flat = weakened(
        model.transformer, query_sites(model.transformer, config), arm.tau, lambda n, device: second.to(device)
    )
    with injection, flat:
        denoiser = Denoiser.from_diffusers(model.transformer, model.scheduler)
        return sample(denoiser, noise, model.scheduler, steps, full, null=away, guidance=arm.scale)
