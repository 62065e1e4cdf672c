"""Weights into a model built for another size or condition: by name and shape, with an account of every key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from ..errors import refuse

POSITION_KEYS = ("*pos_embed", "*pos_embed.pos_embed", "*position_embedding*")
"""Tables that are computed from the size, never copied between sizes."""


@dataclass(frozen=True)
class LoadReport:
    """What became of each key.

    Attributes:
        kept: copied from the checkpoint.
        rebuilt: positional tables the model computed for its own size; among them those no checkpoint holds.
        reinitialised: left as the new model initialised them, or zeroed.
        unused: in the checkpoint only.
    """

    kept: tuple[str, ...]
    rebuilt: tuple[str, ...]
    reinitialised: tuple[str, ...]
    unused: tuple[str, ...]

    @property
    def text(self) -> str:
        """One line a group; the kept ones only counted."""
        groups = {"rebuilt": self.rebuilt, "re-initialised": self.reinitialised, "unused": self.unused}
        lines = [f"kept: {len(self.kept)} tensors"]
        return "\n".join(lines + [f"{k}: {', '.join(v) if v else 'none'}" for k, v in groups.items()])


def load_matching(
    model: nn.Module, state: Mapping[str, torch.Tensor], fresh: Sequence[str] = (), zeroed: Sequence[str] = ()
) -> LoadReport:
    """Copy every tensor whose name and shape fit.

    A rebuilt table follows the size the model was *built* for. Sample through ``apply`` with the training size given,
    which pins it; otherwise a DiT built larger extrapolates without a word.

    Args:
        fresh: globs of keys to leave as initialised although they fit (semantic embedders of another data set).
        zeroed: globs; of these, keys without weights in ``state`` are set to zero (last layers of added embedders).

    Raises:
        VitrineError: nothing fits.
    """
    own = model.state_dict()
    groups: dict[str, list[str]] = {"kept": [], "rebuilt": [], "fresh": []}
    for key, value in own.items():
        fits = key in state and state[key].shape == value.shape and not _any(key, fresh)
        group = "kept" if fits else "rebuilt" if _any(key, POSITION_KEYS) else "fresh"
        groups[group].append(key)
    if not groups["kept"]:
        raise refuse("checkpoint", f"{len(state)} tensors, none of which fits", type(model).__name__, "check its names")
    model.load_state_dict({k: state[k] for k in groups["kept"]}, strict=False)
    with torch.no_grad():
        for key in groups["fresh"]:
            if _any(key, zeroed):
                own[key].zero_()
    buffers = [name for name, _ in model.named_buffers() if name not in own and _any(name, POSITION_KEYS)]
    rebuilt, unused = (*groups["rebuilt"], *buffers), tuple(k for k in state if k not in own)
    return LoadReport(tuple(groups["kept"]), tuple(rebuilt), tuple(groups["fresh"]), unused)


def _any(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(key, p) for p in patterns)
