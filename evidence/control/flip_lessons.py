"""Trains the flip condition by mirror images of the model's own predictions.

With noise as the target, the side in a caption and the flip condition form an exclusive or, whose gradient is lost in
the noise: a small model forgets sides before it learns it. With its own copy as the teacher there is no noise.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch

from ...engine.control.control_trainer import Batch, ControlTrainConfig
from ...engine.control.embedding_hook import injected
from ..portraits.transformer import TransformerData
from .controlled_transformer import ControlledTransformer, TransformerTrainer, text_call


class FlipLessons(TransformerTrainer):
    """Pairs of x_t at flip 0 and its mirror image at flip 1, under one caption.

    The target of the first is the prediction of the original model, that of the second its mirror image:
    a mirrored image under an unchanged caption, as far as mirrored latents are latents of the mirrored
    image. The training images must not be mirrored. Later training on noise with mirrored images
    undoes it.
    """

    def __init__(
        self,
        model: ControlledTransformer,
        data: TransformerData,
        config: ControlTrainConfig,
        folder: str | Path,
        decay_from: int | None = None,
        warmup: int = 100,
    ) -> None:
        self.teacher = copy.deepcopy(model.transformer).eval().requires_grad_(False)
        self.teacher_embedder = copy.deepcopy(model.embedder).float().requires_grad_(False)
        self.teacher_network = injected(self.teacher, text_call(self.teacher))
        super().__init__(model, data, config, folder, decay_from, warmup)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Weighted mean square distance from the teacher, on half of the batch rows, each twice."""
        self.set_learning_rate()
        batch = Batch(*(rows[: max(1, len(rows) // 2)] for rows in batch))
        u, gamma, t = self.config.gamma.u(batch.t), self.config.gamma, batch.t.to(self.device, torch.float32)
        x = self.schedule.add_noise(batch.x0, batch.noise, batch.t)
        plain, mirrored = batch.values.clone(), batch.values.clone()
        plain[:, self._flip], mirrored[:, self._flip] = 0.0, 1.0
        with torch.no_grad():
            target = self.teacher_network(x, t, batch.semantics, self.teacher_embedder(plain, u, gamma, batch.drop))
        twice = lambda rows: torch.cat([rows, rows])  # noqa: E731
        added = self.embedder(torch.cat([plain, mirrored]), twice(u), gamma, twice(batch.drop))
        prediction = self.network(torch.cat([x, x.flip(-1)]), twice(t), twice(batch.semantics), added)
        signal, noise = self.schedule.scales(batch.t)
        weight = twice((noise / signal).clamp(max=1.0).to(prediction))
        return ((prediction - torch.cat([target, target.flip(-1)])).square().flatten(1).mean(1) * weight).mean()

    @property
    def _flip(self) -> int:
        return self.embedder.spec.names.index("flip")
