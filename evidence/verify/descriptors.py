"""Descriptors and distances of pictures from programs that the user has: SSCD, a face recogniser, LPIPS.

They come as TorchScript. Such a file is a program, and runs: open none whose origin you do not know. Nothing else here
opens one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from ...engine.errors import refuse
from ...engine.io.files import named


def sscd_descriptor(path: str | Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """SSCD's descriptors (n, D) of (n, 3, H, W) in [0, 1], as NeMo's authors take them: squeezed to 320 x 320.

    Args:
        path: of the authors' TorchScript file, which is a program.
    """
    path = Path(path)
    if not path.is_file():
        raise refuse("SSCD file", str(path), "the authors' TorchScript file", "sscd_disc_mixup.torchscript.pt")
    with named(path, "SSCD file", "the authors' TorchScript file", "sscd_disc_mixup.torchscript.pt"):
        model = torch.jit.load(str(path), map_location="cpu").eval()
    # the statistics of ImageNet, as in the authors' README
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))

    @torch.no_grad()
    def describe(pictures: torch.Tensor) -> torch.Tensor:
        small = F.interpolate(pictures.float().cpu(), (320, 320), mode="bilinear", antialias=True).clamp(0, 1)
        described: torch.Tensor = model((small - mean) / std)
        return described.float()

    return describe


def face_descriptor(path: str | Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """A face recogniser's descriptors (n, D) of (n, 3, H, W) in [0, 1], squeezed to 160 x 160 as FaceNet takes them.

    Args:
        path: of a TorchScript file that takes (n, 3, 160, 160) in [-1, 1], such as facenet-pytorch's network, traced.
    """
    with named(
        path, "face recogniser", "a TorchScript file of (n, 3, 160, 160) in [-1, 1]", "trace a network and save it"
    ):
        model = _program(path)

    @torch.no_grad()
    def describe(pictures: torch.Tensor) -> torch.Tensor:
        small = F.interpolate(pictures.float().cpu(), (160, 160), mode="bilinear", antialias=True).clamp(0, 1)
        # facenet-pytorch, fixed_image_standardization: (255 x - 127.5) / 128
        described: torch.Tensor = model((255 * small - 127.5) / 128)
        return described.float().flatten(1)

    return describe


def lpips_distance(path: str | Path) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(n,) LPIPS distances between two batches (n, 3, H, W) in [0, 1].

    Args:
        path: of a TorchScript file that takes two batches in [-1, 1], such as its authors' network, traced.
    """
    with named(path, "LPIPS file", "a TorchScript file of two batches in [-1, 1]", "trace a network and save it"):
        model = _program(path)

    @torch.no_grad()
    def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        away: torch.Tensor = model(*(2 * each.float().cpu() - 1 for each in (a, b)))
        return away.float().flatten()

    return distance


def _program(path: str | Path) -> torch.nn.Module:
    """A TorchScript file, on the CPU; call it under :class:`named`."""
    model: torch.nn.Module = torch.jit.load(str(path), map_location="cpu").eval()
    return model
