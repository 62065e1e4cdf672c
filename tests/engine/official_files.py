"""The files that weights2weights publishes, made from a space of ours."""

import math

import torch


def official_files(space, folder, negative=3):
    """What the published folder holds, from a space of ours."""
    std = space.scale.clone()
    std[:negative] *= -1
    dims = {}
    for layer in space.manifest:
        for role, shape in (("A", layer.down), ("B", layer.up)):
            key = f"base_model.model.{layer.path}.lora_{role}.weight"
            dims[key] = [torch.Size([math.prod(shape)]), torch.Size(shape)]
    basis = space.components.clone()
    basis[:, :negative] *= -1
    torch.save(space.mean, folder / "mean.pt")
    torch.save(std, folder / "std.pt")
    torch.save(basis.T.contiguous(), folder / "V.pt")
    torch.save(dims, folder / "weight_dimensions.pt")
    torch.save(space.coefficients[:, :20].clone(), folder / "proj_1000pc.pt")
