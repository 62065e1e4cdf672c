"""Teaching a model what a told flip means, by mirror images of its own predictions.

With noise as the target, the side a caption says and the flip it is told are an exclusive or: its gradient drowns, and
a small model forgets sides before it finds it. Against a copy of itself the same lesson has no noise.
"""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch

from ...engine.condition import Condition
from ...engine.control.inject import injected
from ...engine.control.train import Batch
from ...engine.families import call_of
from .controlled_transformer import SiblingTrainer


class FlipLessons(SiblingTrainer):
    """Pairs of x_t told 0 and its mirror image told 1, under one caption.

    The first shall be what the model said when the lessons began, the second the mirror image of that: what a mirrored
    picture under an unchanged caption is, as far as mirrored latents are the latents of the mirrored picture. Pictures
    must not be mirrored. Training on noise afterwards, mirrored pictures among the rest, undoes the lesson.
    """

    def __init__(self, transformer: Any, embedder: Any, *args: Any, **settings: Any) -> None:
        self.teacher = copy.deepcopy(transformer).eval().requires_grad_(False)
        self.teacher_embedder = copy.deepcopy(embedder).requires_grad_(False)
        raw = call_of(self.teacher)
        self.told = injected(self.teacher, lambda x, t, text: raw(x, t, Condition(text)))
        self._teachers = hashlib.sha256()
        for module in (self.teacher, self.teacher_embedder):
            for value in module.state_dict().values():
                self._teachers.update(value.detach().float().cpu().numpy().tobytes())
        super().__init__(transformer, embedder, *args, **settings)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean square error to the teacher, half of the batch's rows, each twice."""
        self.set_learning_rate()
        batch = Batch(*(part[: max(1, len(part) // 2)] for part in batch))
        u, gamma, t = self.config.gamma.u(batch.t), self.config.gamma, batch.t.float()
        x = self.schedule.add_noise(batch.x0, batch.noise, batch.t)
        plain, mirrored = batch.values.clone(), batch.values.clone()
        plain[:, self._flip], mirrored[:, self._flip] = 0.0, 1.0
        with torch.no_grad():
            said = self.told(x, t, batch.semantics, self.teacher_embedder(plain, u, gamma, batch.drop))
        twice = lambda part: torch.cat([part, part])  # noqa: E731
        added = self.embedder(torch.cat([plain, mirrored]), twice(u), gamma, twice(batch.drop))
        found = self.network(torch.cat([x, x.flip(-1)]), twice(t), twice(batch.semantics), added)
        signal, noise = self.schedule.scales(batch.t)
        weight = twice((noise / signal).clamp(max=1.0).float())
        return ((found - torch.cat([said, said.flip(-1)])).square().flatten(1).mean(1) * weight).mean()

    def _identity(self) -> dict[str, Any]:
        """A run goes on with the teacher it began with, or not at all."""
        return super()._identity() | {"teacher": self._teachers.hexdigest()[:16]}

    @property
    def _flip(self) -> int:
        return self.embedder.spec.names.index("flip")
