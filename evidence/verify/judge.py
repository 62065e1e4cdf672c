"""The copy descriptor: SSCD if the user has its file, else pixel distance relative to the usual one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ...engine.copies.nearest import LENGTH, thumbnails
from ...engine.nemo.blocked_copies import THIRD
from ...engine.pipelines.descriptors import sscd_descriptor
from ..emd.clip_score import Clip
from .context import Context
from .records import Need

SSCD = Need(
    "sscd_disc_mixup.torchscript.pt", "SSCD's copy descriptor, which the published similarities are",
    "dl.fbaipublicfiles.com/sscd-copy-detection, linked from github.com/facebookresearch/sscd-copy-detection",
    "its README says CC-NC 4.0: read its LICENSE", optional=True, option="sscd",
)  # fmt: skip
CLIP = Need(
    "clip-vit-base-patch32", "CLIP ViT-B/32, for prompt alignment", "huggingface.co/openai/clip-vit-base-patch32",
    "see its page", optional=True, option="clip",
)  # fmt: skip
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
