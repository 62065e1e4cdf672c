"""Control checkpoints: safetensors with ``ctrl.h.*`` and ``ctrl.l.*``, and what they were trained with as JSON.

The header has ``ccs_format`` (the format's version) and ``ccs`` (the JSON of :class:`ControlMetadata`). Beside the
embedder a file may hold ``base.*`` (weights of a fully trained model) or ``lora.*``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import refuse
from ..files import read_safetensors, save_safetensors
from .embedder import ControlEmbedder
from .gamma import GammaConfig
from .inject import control_width, family_of
from .padding import PaddingConfig
from .spec import ControlSpec

FORMAT = "1"


class ControlWarning(UserWarning):
    """A setting contradicts what a checkpoint was trained with; the checkpoint's is used."""


@dataclass(frozen=True)
class ControlMetadata:
    """What a control checkpoint was trained with. It rules; settings of a user who samples do not.

    Attributes:
        base_model, base_hash: the model trained on, and its fingerprint.
        family: diffusers class. dim: D, width of the timestep embedding.
        spec, gamma: controls and curve. null: how a dropped control is told; ``zero``: c_emb = 0.
        prediction: eps, v, x0 or flow.
        schedule: kind, beta_start, beta_end, T, s_pre, s_now, mode. pos_embed: mode, align, base, aspect.
        crop: range of the crop's side over the short side. padding: of the text, or None.
        steps: updates made. licence: of the weights.
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
        if self.dim < 1 or self.null != "zero":
            raise refuse("dim, null", (self.dim, self.null), "dim of 1 or more, null 'zero'", "see ControlMetadata")

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {
            "spec": self.spec.to_dict(), "gamma": self.gamma.to_dict(), "crop": list(self.crop),
            "padding": None if self.padding is None else self.padding.to_dict(),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ControlMetadata:
        """The inverse of :meth:`to_dict`; keys of later minor versions are left out."""
        known = {k: v for k, v in values.items() if k in cls.__dataclass_fields__}
        padding = known.get("padding")
        return cls(**known | {
            "spec": ControlSpec.from_dict(known["spec"]), "gamma": GammaConfig.from_dict(known["gamma"]),
            "crop": tuple(known["crop"]), "padding": None if padding is None else PaddingConfig.from_dict(padding),
        })  # fmt: skip

    def check(self, backbone: nn.Module, fingerprint: str = "") -> None:
        """Refuse a backbone this was not made for; warn when its fingerprint is another.

        Raises:
            VitrineError: another family or width.
        """
        found = (family_of(backbone), control_width(backbone))
        if found != (self.family, self.dim):
            raise refuse("model", found, (self.family, self.dim), f"load {self.base_model or 'the base model'}")
        if fingerprint and self.base_hash and fingerprint != self.base_hash:
            _warn("base model", fingerprint, self.base_hash, "its weights differ from those trained on")


class ControlCheckpoint(NamedTuple):
    """A loaded file: the embedder, what it was trained with, and the ``base.*`` or ``lora.*`` tensors by full key."""

    embedder: ControlEmbedder
    metadata: ControlMetadata
    extra: dict[str, torch.Tensor]


def save_control(
    path: str | Path, weights: Mapping[str, torch.Tensor], metadata: ControlMetadata,
    extra: Mapping[str, torch.Tensor] | None = None,
) -> Path:  # fmt: skip
    """Write a checkpoint.

    Args:
        weights: an embedder's ``state_dict()``.
        extra: tensors whose keys begin with ``base.`` or ``lora.``.

    Raises:
        VitrineError: an extra key that begins otherwise.
    """
    extra = extra or {}
    wrong = [k for k in extra if not k.startswith(("base.", "lora."))]
    if wrong:
        raise refuse("extra", wrong[:4], "keys with base. or lora.", "rename them")
    header = {"ccs_format": FORMAT, "ccs": json.dumps(metadata.to_dict(), sort_keys=True)}
    return save_safetensors(path, {f"ctrl.{k}": v for k, v in weights.items()} | dict(extra), header)


def load_control(path: str | Path) -> ControlCheckpoint:
    """Read a checkpoint; the embedder is in eval mode and in the file's own dtype.

    Raises:
        VitrineError: not a control checkpoint, a format this version does not know, or tensors that do not fit.
    """
    tensors, header = read_safetensors(path)
    _check_format(Path(path).name, header.get("ccs_format"))
    try:
        metadata = ControlMetadata.from_dict(json.loads(header["ccs"]))
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise refuse("ccs", repr(error), "the JSON of ControlMetadata", "the file is damaged") from error
    weights = {k[5:]: v for k, v in tensors.items() if k.startswith("ctrl.")}
    embedder = ControlEmbedder(metadata.spec, metadata.dim)
    wanted = {k: tuple(v.shape) for k, v in embedder.state_dict().items()}
    found = {k: tuple(v.shape) for k, v in weights.items()}
    if found != wanted:
        odd = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
        raise refuse("ctrl tensors", {k: found.get(k) for k in odd}, {k: wanted.get(k) for k in odd}, "file is damaged")
    embedder.to(next(iter(weights.values())).dtype).load_state_dict(weights)
    extra = {k: v for k, v in tensors.items() if not k.startswith("ctrl.")}
    return ControlCheckpoint(embedder.eval().requires_grad_(False), metadata, extra)


def _check_format(name: str, given: str | None) -> None:
    if given is None:
        raise refuse("file", name, "a control checkpoint", "it has no ccs_format in its header")
    if given.split(".")[0] != FORMAT:
        raise refuse("ccs_format", given, f"{FORMAT} or {FORMAT}.x", "install a newer version of this pack")


def settle(
    metadata: ControlMetadata, gamma: GammaConfig | None = None, padding: PaddingConfig | None = None
) -> tuple[GammaConfig, PaddingConfig | None]:
    """The curve and padding to sample with: the checkpoint's, with a ControlWarning where what was asked differs.

    Args:
        gamma, padding: what a user's widgets say; None where they say nothing.
    """
    for what, asked, trained in (("gamma", gamma, metadata.gamma), ("padding", padding, metadata.padding)):
        if asked is None or asked == trained:
            continue
        a, b = asked.to_dict(), trained.to_dict() if trained is not None else {}
        differing = {k: (v, b.get(k)) for k, v in a.items() if v != b.get(k)}
        _warn(what, {k: v[0] for k, v in differing.items()}, {k: v[1] for k, v in differing.items()}, "trained with it")
    return metadata.gamma, metadata.padding


def _warn(what: str, given: object, used: object, why: str) -> None:
    warnings.warn(f"{what}: given {given}; the checkpoint has {used}, {why}", ControlWarning, stacklevel=3)
