"""Control checkpoints: safetensors with ``ctrl.h.*`` and ``ctrl.l.*``, and the training settings as JSON.

The header has ``ccs_format`` (the format version) and ``ccs`` (the JSON of :class:`ControlMetadata`). In addition to
the embedder a file may have ``base.*`` (weights of a fully trained model) or ``lora.*``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import refuse
from ..io.files import check_tensors, named, parse_table, read_safetensors, refuse_pickle, save_safetensors
from ..io.number_checks import LARGEST_SIDE, integer
from ..settings.config import Config
from ..tracing.fingerprint import same_weights, short
from .embedder import ControlEmbedder, embedder_shapes
from .embedding_hook import control_width, time_embedding
from .gamma import GammaConfig
from .padding import PaddingConfig
from .spec import ControlSpec

FORMAT = "1"
_ALWAYS_WRITTEN = {"family", "dim", "spec", "gamma", "crop"}


class ControlWarning(UserWarning):
    """A setting contradicts the checkpoint's training settings, which are used instead."""


@dataclass(frozen=True)
class ControlMetadata(Config):
    """Training settings of a control checkpoint. They take precedence over the caller's settings.

    Attributes:
        family: class name in diffusers.
        dim: D, width of the timestep embedding.
        spec, gamma: controls and gamma curve.
        base_model, base_hash: the base model, and its fingerprint.
        null: the value of a dropped control; ``zero``: c_emb = 0.
        prediction: eps, v, x0 or flow.
        schedule: kind, beta_start, beta_end, T, s_pre, s_now, mode.
        pos_embed: mode, align, base, aspect.
        crop: range of the crop's side relative to the short side.
        padding: of the text, or None.
        steps: number of updates.
        licence: of the weights.
    """

    family: str
    dim: int
    spec: ControlSpec = field(default_factory=ControlSpec)
    gamma: GammaConfig = field(default_factory=GammaConfig)
    base_model: str = ""
    base_hash: str = ""
    null: str = "zero"
    prediction: str = "eps"
    schedule: Mapping[str, Any] = field(default_factory=dict)
    pos_embed: Mapping[str, Any] = field(default_factory=dict)
    crop: tuple[float, float] = (1.0, 1.0)
    padding: PaddingConfig | None = None
    steps: int = 0
    licence: str = ""

    def __post_init__(self) -> None:
        integer(self.dim, "dim", 1, LARGEST_SIDE)
        integer(self.steps, "steps")
        if self.null != "zero":
            raise refuse("null", self.null, "'zero'", "see ControlMetadata")

    @classmethod
    def from_header(cls, text: str | None) -> ControlMetadata:
        """From the JSON of a file's header; keys of later minor versions are ignored."""
        try:
            table = parse_table(text or "")
        except ValueError as error:
            raise refuse("ccs", str(error), "the JSON of ControlMetadata", "the file is damaged") from error
        missing = sorted(_ALWAYS_WRITTEN - set(table))
        if missing:
            raise refuse("ccs", f"no {missing}", "the JSON of ControlMetadata", "the file is damaged")
        return cls.from_dict({name: value for name, value in table.items() if name in cls.__dataclass_fields__})

    def require(self, family: str, width: int) -> None:
        """Raises for a model of another family, or with another width of the timestep embedding."""
        if (family, width) != (self.family, self.dim):
            shown, accepted = (f"a {f} of width {w}" for f, w in ((family, width), (self.family, self.dim)))
            raise refuse("model", shown, accepted, f"load {self.base_model or 'the base model'}")

    def check(self, backbone: nn.Module, fingerprint: str = "") -> None:
        """Raises for a backbone that does not match; warns if its fingerprint differs."""
        self.require(time_embedding(backbone)[0], control_width(backbone))
        if fingerprint and self.base_hash and not same_weights(fingerprint, self.base_hash):
            _warn("base model", short(fingerprint), short(self.base_hash), "its weights differ from those trained on")


class ControlCheckpoint(NamedTuple):
    """A loaded file: the embedder, its training settings, and the ``base.*`` or ``lora.*`` tensors by full key."""

    embedder: ControlEmbedder
    metadata: ControlMetadata
    extra: dict[str, torch.Tensor]


def save_control(
    path: str | Path,
    weights: Mapping[str, torch.Tensor],
    metadata: ControlMetadata,
    extra: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Writes a checkpoint atomically.

    Args:
        weights: an embedder's ``state_dict()``.
        extra: tensors whose keys begin with ``base.`` or ``lora.``.
    """
    extra = extra or {}
    wrong = [key for key in extra if not key.startswith(("base.", "lora."))]
    if wrong:
        raise refuse("extra", wrong[:4], "keys with base. or lora.", "rename them")
    header = {"ccs_format": FORMAT, "ccs": json.dumps(metadata.to_dict(), sort_keys=True)}
    with named(path, "file to write", "a size checkpoint that can be read again", "change what it is made of"):
        _embedder(ControlMetadata.from_header(header["ccs"]), weights)
    return save_safetensors(path, {f"ctrl.{k}": v for k, v in weights.items()} | dict(extra), header)


def load_control(path: str | Path) -> ControlCheckpoint:
    """Reads a checkpoint; the embedder is in eval mode and in the file's own dtype."""
    refuse_pickle(path, "control checkpoint")
    with named(path, "size checkpoint", "a whole safetensors file", "copy it, or download it again"):
        tensors, header = read_safetensors(path)
        _check_format(Path(path).name, header.get("ccs_format"))
        metadata = ControlMetadata.from_header(header.get("ccs"))
        weights = {k.removeprefix("ctrl."): v for k, v in tensors.items() if k.startswith("ctrl.")}
        embedder = _embedder(metadata, weights)
    extra = {k: v for k, v in tensors.items() if not k.startswith("ctrl.")}
    return ControlCheckpoint(embedder, metadata, extra)


_COMPUTED_WITH = {torch.float32, torch.bfloat16, torch.float16, torch.float64}


def _embedder(metadata: ControlMetadata, weights: Mapping[str, torch.Tensor]) -> ControlEmbedder:
    expected = embedder_shapes(metadata.spec, metadata.dim)  # before allocating anything of the header's size
    shapes = {k: tuple(v.shape) for k, v in weights.items()}
    if shapes != expected:
        odd = sorted(k for k in expected.keys() | shapes.keys() if expected.get(k) != shapes.get(k))
        own, accepted = ({k: table.get(k) for k in odd} for table in (shapes, expected))
        raise refuse("ctrl tensors", own, accepted, "file is damaged")
    check_tensors(weights)
    kinds = {v.dtype for v in weights.values()}
    if not kinds <= _COMPUTED_WITH:
        known = sorted(map(str, _COMPUTED_WITH))
        raise refuse("ctrl tensors", sorted(map(str, kinds)), known, "save the checkpoint in float32 or bfloat16")
    embedder = ControlEmbedder(metadata.spec, metadata.dim)
    embedder.to(next(iter(weights.values())).dtype).load_state_dict(weights)
    return embedder.eval().requires_grad_(False)


def _check_format(name: str, version: str | None) -> None:
    if version is None:
        raise refuse("file", name, "a size checkpoint", "it has no ccs_format in its header")
    if version.split(".")[0] != FORMAT:
        raise refuse("ccs_format", version, f"{FORMAT} or {FORMAT}.x", "install a newer version of this pack")


def trained_settings(
    metadata: ControlMetadata, gamma: GammaConfig | None = None, padding: PaddingConfig | None = None
) -> tuple[GammaConfig, PaddingConfig | None]:
    """The curve and padding to sample with: the checkpoint's, with a ControlWarning if others were requested.

    Args:
        gamma, padding: the user's settings, or None.
    """
    for what, asked, trained in (("gamma", gamma, metadata.gamma), ("padding", padding, metadata.padding)):
        if asked is None or asked == trained:
            continue
        requested, used = asked.to_dict(), trained.to_dict() if trained is not None else {}
        names = [name for name in requested if requested[name] != used.get(name)]
        _warn(what, {n: requested[n] for n in names}, {n: used.get(n) for n in names}, "trained with it")
    return metadata.gamma, metadata.padding


def _warn(what: str, asked: object, used: object, why: str) -> None:
    warnings.warn(f"{what}: given {asked}; the checkpoint has {used}, {why}", ControlWarning, stacklevel=3)
