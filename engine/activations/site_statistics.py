"""Streaming mean and variance of activations over seeds: memory does not grow with the number of seeds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..diffusion.schedule import append_dims
from ..errors import refuse
from ..io.number_checks import all_finite
from ..tracing.hooks import Activation

FLOAT16_MAX = 65504.0


@dataclass
class RunningMoments:
    """Welford's mean and sum of squared deviations, float32, of each image at one site.

    Attributes:
        mean: (pictures, ...) in the memory order of the activations.
        deviations: the same, or None without variance.
        counts: samples of each picture.
    """

    address: str
    grid: tuple[int, int] | None
    mean: torch.Tensor
    deviations: torch.Tensor | None
    counts: list[int]

    @classmethod
    def like(cls, activation: Activation, pictures: int, variance: bool) -> RunningMoments:
        """Empty statistics, on the activation's device."""
        tensor = activation.tensor
        turned = not tensor.is_contiguous()  # tokens: channels come last in memory
        shape = tensor.movedim(1, -1).shape if turned else tensor.shape
        mean = torch.zeros(pictures, *shape[1:], device=tensor.device)
        mean = mean.movedim(-1, 1) if turned else mean
        deviations = torch.zeros_like(mean) if variance else None
        return cls(activation.address, activation.grid, mean, deviations, [0] * pictures)

    @classmethod
    def of_one_each(cls, activation: Activation, variance: bool) -> RunningMoments:
        """Of one sample of each picture, which is not copied: nothing else may use the activation."""
        mean = activation.tensor.float()
        mean = mean.clone() if 0 in mean.stride() else mean  # one row for all pictures
        return cls(
            activation.address, activation.grid, mean, torch.zeros_like(mean) if variance else None, [1] * len(mean)
        )

    def add(self, picture: int, value: torch.Tensor) -> None:
        """Adds one sample of one image."""
        self.counts[picture] += 1
        mean = self.mean[picture]
        if self.counts[picture] == 1:
            mean.copy_(value)
            return
        # Welford 1962: m += (x - m) / n, S += (x - m_old)(x - m_new).
        difference = value.float() - mean
        mean += difference / self.counts[picture]
        if self.deviations is not None:
            self.deviations[picture] += difference * (value.float() - mean)

    def variance(self) -> torch.Tensor | None:
        """Unbiased variance over the samples, or None if it is off."""
        if self.deviations is None:
            return None
        counts = torch.tensor(self.counts, device=self.mean.device, dtype=torch.float32)
        return self.deviations / append_dims((counts - 1).clamp_min(1), self.mean.ndim)


def store(tensor: torch.Tensor, dtype: torch.dtype, address: str) -> torch.Tensor:
    """Cast for storage and move to the CPU."""
    stored = tensor.to(dtype).cpu()  # checked on the CPU: the transfer is the only device synchronisation
    if all_finite(stored):
        return stored
    if not all_finite(tensor):
        remedy = "the network overflowed; run it in float32 or bfloat16, and check its weights"
        raise refuse(f"activation {address}", "NaN or infinite values", "finite values", remedy)
    largest = f"{tensor.abs().amax().item():.3g}"
    raise refuse(f"activation {address}", largest, f"up to {FLOAT16_MAX:.0f} in float16", "use dtype='float32'")
