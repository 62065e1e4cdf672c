"""Correspondence and few-shot segmentation as pipelines over the Activation Tap.

Not postponing annotations here: ``from_pipe`` reads the component types from ``__init__``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..activations.correspondence import Matches, feature_maps, find_correspondence, flip_ensemble
from ..activations.filter import FilterRule
from ..activations.images import encode_pixels, to_pixels
from ..activations.ranking import Ranking, RankingConfig, rank_places
from ..activations.segmentation import PixelProbe, ProbeSettings, fit_probe
from ..errors import refuse
from ..progress import Progress, silent
from .activation_tap import ActivationTapPipeline, ActivationTapXLPipeline, _TapPipeline

_ENCODED = 16
"""Pictures that the VAE encodes at once."""


class _Correspondence(_TapPipeline):
    """What the SD and SDXL pipelines share."""

    @torch.no_grad()
    def __call__(  # type: ignore[override]  # another task takes other inputs
        self,
        source: Any,
        target: Any,
        points: Sequence[Sequence[float]] | torch.Tensor,
        prompt: str = "",
        *,
        temperature: float = 0.02,
        flip: bool = False,
        **tap: Any,
    ) -> list[Matches]:
        """One :class:`Matches` for each target picture.

        Args:
            source: one picture; target: one or more of the same size (PIL, arrays, tensors).
            points: (N, 2) x, y in [0, 1] of the source.
            temperature: 0 takes cell centres; above, a soft argmax around the best cell.
            flip: average features with those of the mirror images; they then cannot tell left from right.
            tap: addresses or preset, timestep, seeds ... as in :class:`ActivationTapPipeline`.

        Raises:
            VitrineError: If pictures differ in size, a point lies outside the picture, or an address is unknown.
        """
        first, others = to_pixels(source), to_pixels(target)
        if len(first) != 1 or first.shape[-2:] != others.shape[-2:]:
            shapes = (tuple(first.shape), tuple(others.shape))
            raise refuse("pictures", shapes, "one source, targets of its size", "resize them first")
        queries = torch.as_tensor(points, dtype=torch.float32)
        features = self._features(torch.cat([first, others]), prompt, flip, tap)
        queries = queries.to(features)
        return [find_correspondence(features[0], f, queries, temperature=temperature) for f in features[1:]]

    def _features(self, pixels: torch.Tensor, prompt: str, flip: bool, tap: dict) -> torch.Tensor:
        """(B, C, H, W) joined unit features."""
        call: Any = super().__call__
        features = feature_maps(call(pixels, prompt, output_type="none", **tap).activations)
        if flip:
            mirrored = call(pixels.flip(-1), prompt, output_type="none", **tap).activations
            features = flip_ensemble(features, feature_maps(mirrored))
        return features


class CorrespondencePipeline(_Correspondence, ActivationTapPipeline):
    """Points of one picture found in others by nearest activations (GDF, section 5; DIFT); SD 1.x and 2.x.

    Example:
        >>> pipe = CorrespondencePipeline.from_pipe(stable_diffusion)
        >>> (match,) = pipe(source, target, points=[[0.4, 0.3]], preset="Ours-v1.5")
        >>> match.points, match.mutual
    """


class CorrespondenceXLPipeline(_Correspondence, ActivationTapXLPipeline):
    """:class:`CorrespondencePipeline` for SDXL, e.g. with ``preset="Ours-XL"``."""


class _Segmentation(_TapPipeline):
    """What the SD and SDXL pipelines share."""

    @torch.no_grad()
    def __call__(  # type: ignore[override]  # another task takes other inputs
        self,
        examples: Any,
        masks: torch.Tensor,
        images: Any,
        prompt: str = "",
        *,
        classes: int | None = None,
        probe: ProbeSettings | None = None,
        **tap: Any,
    ) -> torch.Tensor:
        """(B, H, W) int64 class of every pixel of ``images``.

        Args:
            examples: 1 to 50 labelled pictures.
            masks: (N, H, W) integers, 255 where nobody knows.
            images: pictures to label, of the same size.
            classes: number of classes; by default one more than the largest label.
            probe: linear by default; ``ProbeSettings(hidden=64)`` for a small MLP.
            tap: addresses or preset, timestep, seeds ... as in :class:`ActivationTapPipeline`.

        Raises:
            VitrineError: If masks and examples differ in number or size, or only one class is labelled.
        """
        known, new = to_pixels(examples), to_pixels(images)
        if known.shape[-2:] != new.shape[-2:] or tuple(masks.shape[-2:]) != tuple(known.shape[-2:]):
            shapes = (tuple(known.shape), tuple(masks.shape), tuple(new.shape))
            raise refuse("examples, masks, images", shapes, "one picture size", "resize them first")
        fitted, features = self.fit(known, masks, prompt, classes, probe, new, tap)
        return fitted.predict(features, (new.shape[-2], new.shape[-1]))

    def fit(
        self, known: torch.Tensor, masks: torch.Tensor, prompt: str, classes: int | None,
        probe: ProbeSettings | None, new: torch.Tensor, tap: dict,
    ) -> tuple[PixelProbe, torch.Tensor]:  # fmt: skip
        """The probe, and the features of the new pictures: all pictures are tapped together."""
        call: Any = super().__call__
        taps = call(torch.cat([known, new]), prompt, output_type="none", **tap).activations
        labelled, unlabelled = feature_maps(taps).split([len(known), len(new)])
        return fit_probe(labelled, masks.to(labelled.device), classes, probe), unlabelled

    @torch.no_grad()
    def rank(
        self, images: Any, masks: torch.Tensor | None = None, prompt: str = "", *, timestep: float = 50.0,
        rule: FilterRule | None = None, budget: int | None = None, most: int = 4, patterns: str = "*",
        state: str | Path | None = None, strips: bool = False, memory: int | str | None = None,
        progress: Progress = silent,
    ) -> Ranking:  # fmt: skip
        """Which places to tap: filter by noise, granularity and locality, then search on the masks (GDF, section 5).

        Args:
            images: at least two pictures, at least four with masks; more give steadier scores.
            masks: (N, H, W) integers, 255 where nobody knows; None runs the filter alone.
            prompt: one for all pictures.
            timestep, rule, budget, most, patterns, strips: as in
                :class:`vitrine.engine.activations.ranking.RankingConfig`.
            state: a folder for finished scores; the same call resumes from it.
            memory: budget in bytes or as "2GB", for thousands of pictures; see
                :func:`~vitrine.engine.activations.ranking.rank_places`.

        Raises:
            VitrineError: If there are too few pictures, only one class, or the filter keeps nothing.
        """
        pixels = to_pixels(images)
        height, width = pixels.shape[-2:]
        config = RankingConfig(patterns, timestep, rule or FilterRule(), budget, most, strips)
        self._refuse_broken_weights("unet", "vae", "text_encoder", "text_encoder_2")
        with self._in_use():
            latents = torch.cat([encode_pixels(self.vae, part) for part in pixels.split(_ENCODED)])
            cond = self._condition([prompt], height, width)
            told: dict[str, Any] = {"masks": masks, "state": state, "memory": memory, "progress": progress}
            return rank_places(self._denoiser(), latents, cond, config, **told)


class SegmentationPipeline(_Segmentation, ActivationTapPipeline):
    """Masks for pictures from a few labelled ones: a probe on activations (GDF, label-scarce setting); SD 1.x and 2.x.

    Example:
        >>> pipe = SegmentationPipeline.from_pipe(stable_diffusion)
        >>> labels = pipe(examples, masks, images, preset="Ours-v1.5")   # (B, H, W) class numbers
    """


class SegmentationXLPipeline(_Segmentation, ActivationTapXLPipeline):
    """:class:`SegmentationPipeline` for SDXL, e.g. with ``preset="Ours-XL"``."""
