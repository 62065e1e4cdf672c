"""What an inversion prepares: the space on its device, in float32, as flat weights in a manifest's order; and masks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...errors import refuse
from ...io.lora_layer import LoraLayer
from ...settings.one_line import one_line
from ..space.delta_space import DeltaSpace, Space
from ..space.factor_stacks import Stack
from ..space.manifest import Manifest
from ..space.space import WeightSpace


@dataclass(frozen=True)
class Products:
    """A delta space prepared for inversion: a model is the scaled factors of all training LoRAs."""

    space: DeltaSpace
    manifest: Manifest

    @classmethod
    def of(cls, space: DeltaSpace) -> Products:
        layers = {}
        for path, stack in space.stacks.items():
            ends = (1,) * (stack.down.ndim - 2)
            up = stack.up.reshape(*stack.up.shape, *ends)
            layers[path] = LoraLayer(stack.down, up, float(len(stack.down)))
        return cls(space, Manifest.of(layers))

    @property
    def dimension(self) -> int:
        """K."""
        return self.space.dimension

    @property
    def unit(self) -> float:
        """The unit of trained coefficients, such that learning rates suit both modes.

        In factors mode each of D standardised weights has variance 1, so the variances of the coefficients sum to D.
        Here they sum to the variance of the products; in this unit, to the number of weights of one LoRA.
        """
        return (self.space.total_variance * self.space.count / self.manifest.size) ** 0.5

    @property
    def deviations(self) -> torch.Tensor:
        """(K,) deviations in this unit."""
        return self.space.deviations / self.unit

    def decode(self, coefficients: torch.Tensor) -> torch.Tensor:
        """(M, k) -> (M, D) in the manifest's order, differentiable; the same products as ``DeltaSpace.stacked``."""
        weights, parts = self.space.weights(coefficients * self.unit), []
        for layer in self.manifest:
            stack = self.space.stacks[layer.path]
            parts.append(stack.down.flatten().expand(len(weights), -1))
            parts.append((stack.up * weights[:, None, stack.owner]).flatten(1))
        return torch.cat(parts, 1)


@one_line
@dataclass(frozen=True)
class Posterior:
    """The VAE posterior of B images: scaled means and deviations, both (B, C, H, W)."""

    means: torch.Tensor
    deviations: torch.Tensor

    def clone(self) -> Posterior:
        """A copy, outside inference mode if made there."""
        return Posterior(self.means.clone(), self.deviations.clone())


def latents_of(latents: torch.Tensor | Posterior, posterior: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(means, deviations) for ``posterior`` "sample", (means, None) for "mean"."""
    if isinstance(latents, Posterior):
        return latents.means, latents.deviations if posterior == "sample" else None
    if posterior == "sample":
        raise refuse("posterior", "sample, of latents without deviations", "a Posterior", "give both, or take the mean")
    return latents, None


def placed(space: Space, device: torch.device) -> WeightSpace | Products:
    """The space on the inversion's device, in float32: each step decodes with the whole basis."""

    # Loaded inside torch.inference_mode(), in which ComfyUI runs its nodes; autograd accepts copies only.
    def there(value: torch.Tensor) -> torch.Tensor:
        value = value.to(device, torch.float32) if value.is_floating_point() else value.to(device)
        return value.clone() if value.is_inference() else value

    if isinstance(space, WeightSpace):
        mean, scale, singular = there(space.mean), there(space.scale), there(space.singular_values)
        return replace(space, mean=mean, scale=scale, components=there(space.components), singular_values=singular)
    stacks = {path: Stack(there(v.down), there(v.up), there(v.ranks)) for path, v in space.stacks.items()}
    vectors, singular = there(space.vectors), there(space.singular_values)
    return Products.of(replace(space, stacks=stacks, vectors=vectors, singular_values=singular))


def spread(deviations: torch.Tensor, prior: float) -> torch.Tensor:
    """(K,) deviations for the prior: they decrease, so the last known one bounds unknown ones (zero)."""
    known = deviations[deviations > 0]
    if prior and not len(known):
        raise refuse("prior", prior, "0 in a space without the spread of its models", "import proj_1000pc.pt with it")
    return torch.where(deviations > 0, deviations, known.min()) if len(known) else deviations


def latent_mask(mask: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """An image-size mask (B, H, W) or (B, 1, H, W) in [0, 1] -> (B, 1, height, width) by area means.

    Crop or resize it together with its image first; the published code resizes the mask to a square while it crops
    the image at random.
    """
    mask = mask[:, None] if mask.ndim == 3 else mask
    return torch.nn.functional.adaptive_avg_pool2d(mask.float(), (height, width))


def mask_for(mask: torch.Tensor | None, latents: torch.Tensor) -> torch.Tensor:
    """(B, 1, H, W) weights for latents (B, C, H, W), (B, 1, 1, H, W) for (B, C, T, H, W); ones without a mask."""
    if mask is None:
        return torch.ones(len(latents), *[1] * (latents.ndim - 1), device=latents.device)
    mask = mask.float().to(latents.device)
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[-2:] != latents.shape[-2:]:
        shown = tuple(mask.shape)
        raise refuse("mask", shown, f"(B, 1, {latents.shape[-2]}, {latents.shape[-1]})", "resize it to latent size")
    if float(mask.min()) < 0 or float(mask.max()) > 1:
        span = (float(mask.min()), float(mask.max()))
        raise refuse("mask values", span, "0 .. 1", "divide an 8-bit mask by 255")
    if not float(mask.flatten(1).sum(1).min()) > 0:
        raise refuse("mask", "empty", "a mask that covers the subject", "paint the subject white")
    weights = mask.expand(len(latents), *mask.shape[1:])
    return weights[:, :, None] if latents.ndim == 5 else weights
