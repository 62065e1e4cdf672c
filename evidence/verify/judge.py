"""Descriptors of pictures and their distances: pixels, or programs that the user has: SSCD, a face recogniser.

Programs come as TorchScript. Such a file is a program, and runs: open none whose origin you do not know. Nothing else
in this pack opens one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from ...engine.copies.nearest import LENGTH, thumbnails
from ...engine.errors import refuse
from ...engine.io.files import named
from ...engine.nemo.blocked_copies import THIRD
from ..metrics.clip import Clip
from .context import Context
from .records import Need

SSCD = Need(
    "sscd_disc_mixup.torchscript.pt",
    "SSCD's copy descriptor, which the published similarities are",
    "dl.fbaipublicfiles.com/sscd-copy-detection, linked from github.com/facebookresearch/sscd-copy-detection",
    "its README says CC-NC 4.0: read its LICENSE",
    optional=True,
    option="sscd",
)
CLIP = Need(
    "clip-vit-base-patch32",
    "CLIP ViT-B/32, for prompt alignment",
    "huggingface.co/openai/clip-vit-base-patch32",
    "see its page",
    optional=True,
    option="clip",
)
VERBATIM = 0.7
"""NeMo, Appendix C.1: a prompt is memorized verbatim where the largest of ten SSCD similarities is above it."""


@dataclass(frozen=True)
class Judge:
    """Descriptors of pictures, and their similarity.

    Attributes:
        key: ``sscd``, ``pixels``, or another's.
        name: of its similarity, in words.
        level: above it a picture is a copy.
        usual: whether it needs samples of ordinary captions, which give the usual distance.
        describe: (n, 3, H, W) in [0, 1] -> (n, D).
        image: the same, CLIP's, for prompt alignment; None without CLIP.
        texts: n prompts -> (n, E) in CLIP's space.
    """

    key: str
    name: str
    level: float
    usual: bool
    describe: Callable[[torch.Tensor], torch.Tensor]
    image: Callable[[torch.Tensor], torch.Tensor] | None = None
    texts: Callable[[list[str]], torch.Tensor] | None = None

    def similarity(self, samples: torch.Tensor, references: torch.Tensor, usual: torch.Tensor) -> torch.Tensor:
        """(S,) of descriptors (S, D) to S others, or to one (1, D).

        Args:
            usual: (R, D) of samples of unrelated prompts; used by pixels only.
        """
        if not self.usual:
            return torch.cosine_similarity(samples, references)
        away = (samples - references).norm(dim=1)
        level = torch.cdist(references, usual).median(1).values
        return 1 - away / level.clamp_min(1e-6)


def judge_of(context: Context) -> Judge:
    """SSCD and CLIP if the user named them."""
    image, texts = None, None
    if (folder := context.path(CLIP)) is not None:
        clip = Clip.load(str(folder))
        image, texts = clip.pictures, clip.texts
    if (path := context.path(SSCD)) is not None:
        return Judge("sscd", "SSCD", VERBATIM, False, sscd_descriptor(path), image, texts)
    return replace(pixels(), image=image, texts=texts)


def pixels() -> Judge:
    """The descriptor that needs no file."""
    return Judge("pixels", "1 - distance / usual distance at 64 px", 1 - THIRD, True, _flat)


def _flat(pictures: torch.Tensor) -> torch.Tensor:
    """(n, 12288) thumbnails, scaled so that their distance is a root mean square."""
    return thumbnails(pictures).flatten(1) / LENGTH**0.5


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


def _program(path: str | Path) -> torch.nn.Module:
    """A TorchScript file, on the CPU; call it under :class:`named`."""
    model: torch.nn.Module = torch.jit.load(str(path), map_location="cpu").eval()
    return model
