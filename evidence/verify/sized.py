"""The shipped model with size conditions in the role of SDXL, which was trained under a constant weight of them too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch

from ...engine.control import GammaConfig, GuidanceConfig, Injection, SizeCondition, blend
from ...engine.diffusion.denoiser import Denoiser
from ...engine.diffusion.forward_clock import Forward, rows_for
from ...engine.diffusion.noise import seeded_noise
from ...engine.diffusion.sampling import sample
from ...engine.network.condition import Condition
from ...engine.portraits.shipped import TRANSFORMERS
from ...engine.runtime.footprint import Peak
from ..control.controlled_transformer import ControlledTransformer
from ..portraits.sampling import decode
from .context import Context
from .estimate import Pace, timed

FOLDER = TRANSFORMERS / "constant"
_WEIGHTS = ("control.safetensors", "diffusion_pytorch_model.safetensors")


class BlendedInjection(Injection):
    """Sizes blended with the picture's own by gamma, without training: what ``ReferenceBlend`` does in SDXL.

    Args:
        neutral: (1, F), the same controls with the picture's own size.
        others: as of :class:`~vitrine.engine.control.Injection`.
    """

    def __init__(
        self, backbone: Any, embedder: Any, values: torch.Tensor, neutral: torch.Tensor, gamma: GammaConfig,
        drop: torch.Tensor,
    ) -> None:  # fmt: skip
        super().__init__(backbone, embedder, values, gamma, drop)
        self.neutral = embedder.spec.checked(neutral)

    def _prepare(self, forward: Forward) -> torch.Tensor:
        count = len(forward.t)
        high, low = self._terms(count)
        drop = None if self.drop is None else rows_for(self.drop, count, "drop")
        _, own = self.embedder.terms(rows_for(self.neutral, count, "size values"), drop)
        return blend(high + low, high + own, self.gamma.at(forward.t))


class SizedPortraits:
    """The parts that a verification looks at, and a call as :class:`ControlConditionedPipeline` has it."""

    def __init__(self) -> None:
        self.model = ControlledTransformer.open(FOLDER.name)
        self.transformer, self.vae, self.scheduler = self.model.transformer, self.model.vae, self.model.scheduler
        self.components = {
            "transformer": self.transformer, "embedder": self.model.embedder, "vae": self.vae,
            "text_encoder": self.model.portraits.text_encoder,
        }  # fmt: skip

    def set_progress_bar_config(self, **settings: Any) -> None:
        """There is no bar."""

    @torch.no_grad()
    def __call__(
        self, prompt: list[str], *, size_condition: Sequence[SizeCondition], gamma: GammaConfig,
        guidance: GuidanceConfig, seeds: Sequence[int], num_inference_steps: int, output_type: str = "pt",
    ) -> Any:  # fmt: skip
        """``images``: (B, 3, 64, 64) in [0, 1]; the unconditional half drops its controls, as in training."""
        model, side, spec = self.model, (self.model.side, self.model.side), self.model.embedder.spec
        asked, own = (
            torch.cat([spec.rows(each.controls(side, spec)) for each in conditions])
            for conditions in (size_condition, [SizeCondition()] * len(size_condition))
        )
        halves = 1 if guidance.scale == 1 else 2
        drop = torch.arange(halves * len(prompt)) >= len(prompt)
        cond, null = (Condition(model.portraits.encode(texts)) for texts in (prompt, [""]))
        noise = seeded_noise(list(seeds), (4, model.side // 4, model.side // 4))
        denoiser, rows = Denoiser.from_diffusers(self.transformer, self.scheduler), (halves, 1)
        with BlendedInjection(
            self.transformer, model.embedder, asked.repeat(*rows), own.repeat(*rows), gamma, drop
        ):  # fmt: skip
            latents = sample(
                denoiser, noise, self.scheduler, num_inference_steps, cond, null=null, guidance=guidance.scale
            )
        return SimpleNamespace(images=decode(model.portraits, latents))


class SizedContext(Context):
    """A verification of it: no other claim is about such a model."""

    def _loaded(self) -> Any:
        return SizedPortraits()

    @cached_property
    def controlled(self) -> Any:
        """The model itself."""
        return self.pipe

    @cached_property
    def own_side(self) -> int:
        """Side of its pictures."""
        return int(self.pipe.model.side)

    @cached_property
    def weights(self) -> dict[str, str]:
        """File of the model -> SHA-256."""
        return self.sums.table([FOLDER / name for name in _WEIGHTS], FOLDER)

    @cached_property
    def pace(self) -> Pace:
        """One step of one picture, its decoding included."""
        parts = {p.data_ptr(): p for part in self.pipe.components.values() for p in part.parameters()}

        def step() -> None:
            self.pipe(
                [""], size_condition=[SizeCondition()], gamma=GammaConfig("constant"), guidance=GuidanceConfig(),
                seeds=[0], num_inference_steps=1,
            )  # fmt: skip

        with Peak() as held:
            step()
        return Pace(timed(step), held.peak, sum(p.numel() * p.element_size() for p in parts.values()))
