"""Points and masks carried from pictures to others, by the activations of any pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..activations.container import Activations
from ..activations.correspondence import Matches, feature_maps, find_correspondence, flip_ensemble, parse_clicks
from ..activations.gdf_protocol import CORRESPONDENCE_SIZE, check_protocol, gdf_features
from ..activations.picture_latents import SIGNED, picture_sizes
from ..activations.segmentation import ProbeSettings, fit_masks, fit_probe, mask_like_clicks
from ..errors import refuse
from . import activation_tap
from .activation_tap import ActivationTapPipeline, pixels_of
from .conventions import masks_of, refuse_arguments

_OUTPUT = dict.fromkeys(("output_type", "return_dict"), "no pictures come back, but what the docstring says")
MEANINGLESS = activation_tap.MEANINGLESS | _OUTPUT
"""What the stock pipelines' calls take and matching does not, and what to do instead."""


class CorrespondencePipeline(ActivationTapPipeline):
    """Points of one picture are found in others by nearest activations (GDF, section 5; DIFT).

    Example:
        >>> pipe = CorrespondencePipeline.from_pipe(stable_diffusion)
        >>> (match,) = pipe.match(source, target, points=[[0.4, 0.3]], preset="Ours-v1.5")
        >>> match.points, match.mutual
    """

    @torch.no_grad()
    def match(
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
            tap: addresses or preset, timestep, seeds, size ... as in :meth:`ActivationTapPipeline.tap`. ``size``
                squeezes every picture to a square, which the points follow; ``protocol="gdf"`` also joins the sites as
                the authors do, without normalisation, at 128 x 128.
        """
        try:
            queries = torch.as_tensor(points, dtype=torch.float32)
        except (TypeError, ValueError):
            raise refuse("points", type(points).__name__, "(N, 2) numbers", "e.g. points=[[0.4, 0.3]]") from None
        _refuse_arguments(self, self.match, tap)
        first, others = _read_both(self, source, target, tap)
        if len(first) != 1:
            raise refuse("source", f"{len(first)} pictures", "one", "call once for each source")
        (wanted, *_), candidates = _features(self, first, others, prompt, flip, tap, CORRESPONDENCE_SIZE)
        queries = queries.to(wanted)
        return [find_correspondence(wanted, f, queries, temperature=temperature) for f in candidates]


class SegmentationPipeline(ActivationTapPipeline):
    """Masks for pictures from a few labelled ones: a probe on activations (GDF, label-scarce setting).

    Example:
        >>> pipe = SegmentationPipeline.from_pipe(stable_diffusion)
        >>> labels = pipe.segment(examples, masks, images, preset="Ours-v1.5")   # (B, H, W) class numbers
    """

    @torch.no_grad()
    def segment(
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
            tap: addresses or preset, timestep, seeds, size ... as in :meth:`ActivationTapPipeline.tap`. ``size``
                squeezes every picture to a square; ``protocol="gdf"`` also joins the sites without normalisation.

        Returns:
            Labels as large as the images, where these have one size, else (B, size, size).
        """
        _refuse_arguments(self, self.segment, tap)
        sizes = set(picture_sizes(images))
        known, new = _read_both(self, examples, images, tap)
        side = sizes.pop() if len(sizes) == 1 else (new.shape[-2], new.shape[-1])
        if points is not None:
            clicks = _clicks(examples, masks, points)
            example, unlabelled = _features(self, known, new, prompt, False, tap)
            return (mask_like_clicks(example[0], *clicks, unlabelled, side) > 0.5).long()
        labels = fit_masks(masks_of(masks), picture_sizes(examples), tap.get("size"))
        labelled, unlabelled = _features(self, known, new, prompt, False, tap)
        return fit_probe(labelled, labels.to(labelled.device), classes, probe).predict(unlabelled, side)


def _refuse_arguments(pipe: ActivationTapPipeline, call: Callable[..., Any], tap: dict[str, Any]) -> None:
    """Refuse what neither the call nor a tap takes."""
    masks = pipe._adapter.masks
    known = {*inspect.signature(pipe.tap).parameters, *masks} - set(_OUTPUT)
    unknown = {name: value for name, value in tap.items() if name not in known}
    refuse_arguments([call, pipe.tap], unknown, MEANINGLESS, masks)


def _read_both(
    pipe: ActivationTapPipeline, first: Any, second: Any, tap: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both sets as pixels (B, 3, H, W) in [-1, 1]; ``tap`` then says that they are."""
    size, protocol = tap.pop("size", None), tap.get("protocol", "vitrine")
    left, right = pixels_of(pipe._adapter, [first, second], size, protocol, tap.get("value_range"))
    if size is not None or check_protocol(protocol):
        tap["size"] = left.shape[-1]
    tap["value_range"] = SIGNED
    return left, right


def _features(
    pipe: ActivationTapPipeline,
    first: torch.Tensor,
    second: torch.Tensor,
    prompt: str,
    flip: bool,
    tap: dict[str, Any],
    gdf_grid: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, C, H, W) joined features of both sets; those of one size go through the network together.

    Args:
        gdf_grid: to which GDF's protocol resizes the layers; None is the largest.
    """

    def joined(taps: Activations) -> torch.Tensor:
        return gdf_features(taps, gdf_grid) if check_protocol(tap.get("protocol", "vitrine")) else feature_maps(taps)

    def tapped(pixels: torch.Tensor, how: dict[str, Any]) -> torch.Tensor:
        features = joined(pipe.tap(pixels, prompt, output_type="none", **how).activations)
        if flip:
            mirrored = pipe.tap(pixels.flip(-1), prompt, output_type="none", **how).activations
            features = flip_ensemble(features, joined(mirrored))
        return features

    if first.shape[-2:] == second.shape[-2:]:
        both = tapped(torch.cat([first, second]), tap)
        return both[: len(first)], both[len(first) :]
    mine, theirs = dict(tap), dict(tap)
    if isinstance(tap.get("generator"), list):
        mine["generator"], theirs["generator"] = tap["generator"][: len(first)], tap["generator"][len(first) :]
    return tapped(first, mine), tapped(second, theirs)


def _clicks(examples: Any, masks: Any, points: str) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = picture_sizes(examples)
    if masks is not None or len(sizes) != 1:
        shown = f"points, {len(sizes)} examples{'' if masks is None else ', masks'}"
        raise refuse("examples", shown, "points in one picture, or a mask for each", "give one or the other")
    ((height, width),) = sizes
    return parse_clicks(points, width, height)
