"""Streaming mean and variance of activations over seeds: memory does not grow with the number of seeds."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..diffusion.schedule import append_dims
from ..errors import refuse
from ..tracing.hooks import Activation

FLOAT16_MAX = 65504.0


@dataclass
class RunningMoments:
    """Welford's mean and sum of squared deviations, float32, of each image at one site."""

    address: str
    grid: tuple[int, int] | None
    mean: torch.Tensor
    deviations: torch.Tensor | None
    counts: list[int] = field(default_factory=list)

    @classmethod
    def like(cls, activation: Activation, pictures: int, variance: bool) -> RunningMoments:
        """Empty statistics of ``pictures`` images, on the activation's device."""
        tensor = activation.tensor
        zeros = torch.zeros(pictures, *tensor.shape[1:], dtype=torch.float32, device=tensor.device)
        return cls(activation.address, activation.grid, zeros, zeros.clone() if variance else None, [0] * pictures)

    def add(self, picture: int, value: torch.Tensor) -> None:
        """Adds one sample of one image."""
        self.counts[picture] += 1
        # Welford 1962: m += (x - m) / n, S += (x - m_old)(x - m_new).
        difference = value.float() - self.mean[picture]
        self.mean[picture] += difference / self.counts[picture]
        if self.deviations is not None:
            self.deviations[picture] += difference * (value.float() - self.mean[picture])

    def variance(self) -> torch.Tensor | None:
        """Unbiased variance over the samples, or None if it is off."""
        if self.deviations is None:
            return None
        counts = torch.tensor(self.counts, device=self.mean.device, dtype=torch.float32)
        return self.deviations / append_dims((counts - 1).clamp_min(1), self.mean.ndim)


def store(tensor: torch.Tensor, dtype: torch.dtype, address: str) -> torch.Tensor:
    """Cast for storage and move to the CPU.

    Raises:
        VitrineError: If a value is NaN or infinite, or too large for float16.
    """
    stored = tensor.to(dtype).cpu()  # checked on the CPU: the transfer is the only device synchronisation
    if torch.isfinite(stored).all():
        return stored
    if not torch.isfinite(tensor).all():
        remedy = "the network overflowed; run it in float32 or bfloat16, and check its weights"
        raise refuse(f"activation {address}", "NaN or infinite values", "finite values", remedy)
    largest = f"{tensor.abs().amax().item():.3g}"
    raise refuse(f"activation {address}", largest, f"up to {FLOAT16_MAX:.0f} in float16", "use dtype='float32'")
