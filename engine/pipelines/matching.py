"""Correspondence and few-shot segmentation as pipelines over the Look Inside (Activation Tap).

Not postponing annotations here: ``from_pipe`` reads the component types from ``__init__``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..activations.container import Activations
from ..activations.correspondence import Matches, feature_maps, find_correspondence, flip_ensemble, parse_clicks
from ..activations.gdf_protocol import CORRESPONDENCE_SIZE, check_protocol, gdf_features
from ..activations.picture_latents import SIGNED, picture_sizes, to_pixels
from ..activations.qualitative_filter import FilterRule
from ..activations.ranked_pictures import LabelledFolder, MadeOf, Masks, Pictures, in_chunks, known_pairs, wrong_number
from ..activations.ranking import Ranking, RankingConfig, rank_sites
from ..activations.segmentation import ProbeSettings, fit_masks, fit_probe, mask_like_clicks
from ..errors import refuse
from ..io.picture_files import open_picture
from ..network.condition import Condition
from ..runtime.footprint import memory_bytes, rows_within
from ..runtime.processes import ALONE, Workers
from ..runtime.progress import Progress, silent
from ..settings.sizes import check_sides
from .activation_tap import (
    MEANINGLESS,
    ActivationTapPipeline,
    ActivationTapTransformerPipeline,
    ActivationTapXLPipeline,
    TapPipeline,
)
from .components import components_of
from .conventions import masks_of


class PictureList(NamedTuple):
    """How many pictures, what gives pixels (n, 3, H, W) in [-1, 1] and masks (n, H, W) of some by number, and what the
    pixels of one are made of: its file, or themselves."""

    number: int
    pixels: Callable[[Sequence[int]], torch.Tensor]
    masks: Masks | None
    made_of: Callable[[int], object]


def picture_list(
    images: Any, masks: Any, size: int | None, own: int | None, factor: int, value_range: Sequence[float] | None
) -> PictureList:
    """Pictures in any form, a list of paths, or a folder with masks.

    Args:
        size: files are squeezed to a square of this side, others too where it is given.
        own: the model's own side, for files; None where it is unknown.
        factor: divides the sides.
    """
    check_sides("size", size)
    files = isinstance(images, (list, tuple)) and images and all(isinstance(i, (str, Path)) for i in images)
    side = size or own or 0
    if not side and (files or isinstance(images, LabelledFolder)):
        raise refuse("size", None, "a side in pixels", "this model has no usual size")
    if isinstance(images, LabelledFolder):
        folder = images
        return PictureList(
            len(folder),
            lambda numbers: to_pixels(folder.read(numbers, side)[0], None, factor, (-1.0, 1.0)),
            lambda numbers: torch.stack([folder.mask(i, side) for i in numbers]),
            lambda i: [folder.pictures[i], side],
        )
    labels = None if masks is None else torch.stack(masks_of(masks))
    read_labels = None if labels is None else lambda numbers: labels[list(numbers)]
    if files:
        count = len(images)
        pixels_of = lambda numbers: to_pixels([open_picture(images[i]) for i in numbers], side, factor)  # noqa: E731
        made_of = lambda i: [Path(images[i]), side]  # noqa: E731
    else:
        pixels = to_pixels(images, size, factor, value_range)
        count, pixels_of, made_of = len(pixels), lambda numbers: pixels[list(numbers)], lambda i: [pixels[i], side]
    if labels is not None and len(labels) != count:
        raise wrong_number(len(labels), count)
    return PictureList(count, pixels_of, read_labels, made_of)


_ENCODED, _SHARE = 16, 4
"""Most pictures that the VAE encodes at once, and its share of a budget."""


_OUTPUT = dict.fromkeys(("output_type", "return_dict"), "no pictures come back, but what the docstring says")


class _Matching(TapPipeline):
    """Two sets of pictures, tapped alike."""

    _meaningless = MEANINGLESS | _OUTPUT

    def _read_both(self, first: Any, second: Any, tap: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Both sets as pixels (B, 3, H, W) in [-1, 1]; ``tap`` then says that they are."""
        self._refuse_arguments({name: tap[name] for name in _OUTPUT if name in tap})
        size, protocol = tap.pop("size", None), tap.get("protocol", "vitrine")
        left, right = self._pixels([first, second], size, protocol, tap.get("value_range"))
        if size is not None or check_protocol(protocol):
            tap["size"] = left.shape[-1]
        tap["value_range"] = SIGNED
        return left, right

    def _features(
        self, first: torch.Tensor, second: torch.Tensor, prompt: str, flip: bool, tap: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, C, H, W) joined features of both sets; those of one size go through the network together."""
        if first.shape[-2:] == second.shape[-2:]:
            both = self._tapped(torch.cat([first, second]), prompt, flip, tap)
            return both[: len(first)], both[len(first) :]
        mine, theirs = dict(tap), dict(tap)
        if isinstance(tap.get("generator"), list):
            mine["generator"], theirs["generator"] = tap["generator"][: len(first)], tap["generator"][len(first) :]
        return self._tapped(first, prompt, flip, mine), self._tapped(second, prompt, flip, theirs)

    def _tapped(self, pixels: torch.Tensor, prompt: str, flip: bool, tap: dict[str, Any]) -> torch.Tensor:
        call: Any = super().__call__
        features = self._joined(call(pixels, prompt, output_type="none", **tap).activations, tap)
        if flip:
            mirrored = call(pixels.flip(-1), prompt, output_type="none", **tap).activations
            features = flip_ensemble(features, self._joined(mirrored, tap))
        return features

    def _joined(self, taps: Activations, tap: dict[str, Any]) -> torch.Tensor:
        return (
            gdf_features(taps, self._gdf_grid) if check_protocol(tap.get("protocol", "vitrine")) else feature_maps(taps)
        )

    @torch.no_grad()
    def _rank(
        self,
        labelled: tuple[Any, Any, Any],
        prompt: str,
        config: RankingConfig,
        read: tuple[Any, Any],
        settings: dict[str, Any],
    ) -> Ranking:
        """Pictures with masks or known points, how they are read (size, value_range), and settings of the engine."""
        images, masks, points = labelled
        pictures = picture_list(images, masks, read[0], self.own_size(), self.side_step, read[1])
        pairs = None if points is None else known_pairs(points, pictures.number)
        self._refuse_broken_weights()
        with self._in_use():
            first = pictures.pixels([0])
            cond, together = self._adapter.condition([prompt], (first.shape[-2], first.shape[-1])), _ENCODED
            if settings["memory"] is not None:
                budget = memory_bytes(settings["memory"]) // _SHARE
                together = rows_within(budget, lambda: self._adapter.encode(first), _ENCODED)

            def source(numbers: Sequence[int]) -> tuple[torch.Tensor, Condition]:
                runs = (pictures.pixels([numbers[i] for i in run]) for run in in_chunks(len(numbers), together))
                return torch.cat([self._adapter.encode(run) for run in runs]), cond

            made_of = MadeOf({**components_of(self, ("unet", "transformer")), "prompt": prompt}, pictures.made_of)
            chosen = Pictures(pictures.number, source, pictures.masks, pairs, made_of)
            return rank_sites(self._denoiser(), chosen, config, **settings)

    _gdf_grid: tuple[int, int] | None = None


class _Correspondence(_Matching):
    """What the SD and SDXL pipelines share."""

    _gdf_grid = CORRESPONDENCE_SIZE

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
            source: one picture; target: one or more of one size (PIL, arrays, tensors).
            points: (N, 2) x, y in [0, 1] of the source.
            temperature: 0 takes cell centres; above, a soft argmax around the best cell.
            flip: average features with those of the mirror images; they then cannot tell left from right.
            tap: addresses or preset, timestep, seeds, size ... as in :class:`ActivationTapPipeline`. ``size`` squeezes
                every picture to a square, which the points follow; ``protocol="gdf"`` also joins the sites as the
                authors do, without normalisation, at 128 x 128.
        """
        queries = torch.as_tensor(points, dtype=torch.float32)
        first, others = self._read_both(source, target, tap)
        if len(first) != 1:
            raise refuse("source", f"{len(first)} pictures", "one", "call once for each source")
        (wanted, *_), candidates = self._features(first, others, prompt, flip, tap)
        queries = queries.to(wanted)
        return [find_correspondence(wanted, f, queries, temperature=temperature) for f in candidates]

    def rank(
        self,
        images: Any,
        keypoints: Any,
        prompt: str = "",
        *,
        alpha: float = 0.1,
        timestep: float = 50.0,
        rule: FilterRule | None = None,
        budget: int | None = None,
        most: int = 4,
        patterns: str = "*",
        state: str | Path | None = None,
        strips: bool = False,
        memory: int | str | None = None,
        size: int | None = None,
        value_range: Sequence[float] | None = None,
        progress: Progress = silent,
        workers: Workers = ALONE,
    ) -> Ranking:
        """Which sites to tap: filter by noise, granularity and locality, then search by known points.

        Args:
            images: two pictures or more, or a list of paths.
            keypoints: (B, K, 2) x, y in [0, 1] of the same K points in each picture, NaN where hidden: each picture is
                matched with the one half of them away. Or a list of
                :class:`~vitrine.engine.activations.ranked_pictures.Pair`.
            alpha: a point within this share of the picture's longer side is right.
            prompt, timestep, rule, budget, most, patterns, state, strips, memory, size, value_range, progress, workers:
                as in :meth:`SegmentationPipeline.rank`.
        """
        config = RankingConfig(patterns, timestep, rule or FilterRule(), budget, most, strips, alpha=alpha)
        settings = {"state": state, "memory": memory, "progress": progress, "workers": workers}
        return self._rank((images, None, keypoints), prompt, config, (size, value_range), settings)


class CorrespondencePipeline(_Correspondence, ActivationTapPipeline):
    """Points of one picture found in others by nearest activations (GDF, section 5; DIFT); SD 1.x and 2.x.

    Example:
        >>> pipe = CorrespondencePipeline.from_pipe(stable_diffusion)
        >>> (match,) = pipe(source, target, points=[[0.4, 0.3]], preset="Ours-v1.5")
        >>> match.points, match.mutual
    """


class CorrespondenceXLPipeline(_Correspondence, ActivationTapXLPipeline):
    """:class:`CorrespondencePipeline` for SDXL, e.g. with ``preset="Ours-XL"``."""


class CorrespondenceTransformerPipeline(_Correspondence, ActivationTapTransformerPipeline):
    """:class:`CorrespondencePipeline` for transformers of every known family."""


CorrespondencePipeline._forms = {"xl": CorrespondenceXLPipeline, "transformer": CorrespondenceTransformerPipeline}


def _clicks(examples: Any, masks: Any, points: str) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = picture_sizes(examples)
    if masks is not None or len(sizes) != 1:
        shown = f"points, {len(sizes)} examples{'' if masks is None else ', masks'}"
        raise refuse("examples", shown, "points in one picture, or a mask for each", "give one or the other")
    ((height, width),) = sizes
    return parse_clicks(points, width, height)


class _Segmentation(_Matching):
    """What the SD and SDXL pipelines share."""

    @torch.no_grad()
    def __call__(  # type: ignore[override]  # another task takes other inputs
        self,
        examples: Any,
        masks: Any,
        images: Any,
        prompt: str = "",
        *,
        classes: int | None = None,
        probe: ProbeSettings | None = None,
        points: str | None = None,
        **tap: Any,
    ) -> torch.Tensor:
        """(B, H, W) int64 class of every pixel of ``images``.

        Args:
            examples: 1 to 50 labelled pictures.
            masks: (N, H, W) integers, 255 where unknown, or a list of masks, each of its picture's size; PIL
                pictures and arrays too. None with ``points``.
            images: pictures to label, of one size or with ``size``.
            classes: number of classes; by default one more than the largest label.
            probe: linear by default; ``ProbeSettings(hidden=64)`` for a small MLP.
            points: instead of masks, what was clicked in the one example: lines ``x y``, and ``not x y`` for what is
                not wanted, in fractions or pixels, or the JSON of KJNodes and SAM nodes; the result is 1 where wanted.
            tap: addresses or preset, timestep, seeds, size ... as in :class:`ActivationTapPipeline`. ``size`` squeezes
                every picture to a square; ``protocol="gdf"`` also joins the sites without normalisation.

        Returns:
            Labels as large as the images, where these have one size, else (B, size, size).
        """
        sizes = set(picture_sizes(images))
        known, new = self._read_both(examples, images, tap)
        side = sizes.pop() if len(sizes) == 1 else (new.shape[-2], new.shape[-1])
        if points is not None:
            clicks = _clicks(examples, masks, points)
            example, unlabelled = self._features(known, new, prompt, False, tap)
            return (mask_like_clicks(example[0], *clicks, unlabelled, side) > 0.5).long()
        labels = fit_masks(masks_of(masks), picture_sizes(examples), tap.get("size"))
        labelled, unlabelled = self._features(known, new, prompt, False, tap)
        return fit_probe(labelled, labels.to(labelled.device), classes, probe).predict(unlabelled, side)

    def rank(
        self,
        images: Any,
        masks: Any = None,
        prompt: str = "",
        *,
        timestep: float = 50.0,
        rule: FilterRule | None = None,
        budget: int | None = None,
        most: int = 4,
        patterns: str = "*",
        state: str | Path | None = None,
        strips: bool = False,
        memory: int | str | None = None,
        size: int | None = None,
        value_range: Sequence[float] | None = None,
        progress: Progress = silent,
        workers: Workers = ALONE,
        split: str = "halves",
        folds: int = 4,
    ) -> Ranking:
        """Which sites to tap: filter by noise, granularity and locality, then search on the masks (GDF, section 5).

        Args:
            images: at least two pictures, at least four with masks; more give steadier scores. Thousands are given as a
                :class:`~vitrine.engine.activations.ranked_pictures.LabelledFolder` with its masks, or as a list of
                paths: files are read when their turn comes.
            masks: (N, H, W) integers, 255 where unknown, or PIL pictures or arrays of them, with any number of
                classes; None runs the filter alone.
            size, value_range: as in :class:`ActivationTapPipeline`; files are squeezed to the model's own size where
                none is given.
            prompt: one for all pictures.
            timestep, rule, budget, most, patterns, strips, split, folds: as in
                :class:`vitrine.engine.activations.ranking.RankingConfig`.
            state: a folder for finished scores; the same call resumes from it.
            memory: budget in bytes or as "2GB", for thousands of pictures; see
                :func:`~vitrine.engine.activations.ranking.rank_sites`.
            workers: processes that share the pictures, from :func:`~vitrine.engine.runtime.processes.launched`.
        """
        config = RankingConfig(patterns, timestep, rule or FilterRule(), budget, most, strips, split, folds)
        settings = {"state": state, "memory": memory, "progress": progress, "workers": workers}
        return self._rank((images, masks, None), prompt, config, (size, value_range), settings)


class SegmentationPipeline(_Segmentation, ActivationTapPipeline):
    """Masks for pictures from a few labelled ones: a probe on activations (GDF, label-scarce setting); SD 1.x and 2.x.

    Example:
        >>> pipe = SegmentationPipeline.from_pipe(stable_diffusion)
        >>> labels = pipe(examples, masks, images, preset="Ours-v1.5")   # (B, H, W) class numbers
    """


class SegmentationXLPipeline(_Segmentation, ActivationTapXLPipeline):
    """:class:`SegmentationPipeline` for SDXL, e.g. with ``preset="Ours-XL"``."""


class SegmentationTransformerPipeline(_Segmentation, ActivationTapTransformerPipeline):
    """:class:`SegmentationPipeline` for transformers of every known family."""


SegmentationPipeline._forms = {"xl": SegmentationXLPipeline, "transformer": SegmentationTransformerPipeline}
