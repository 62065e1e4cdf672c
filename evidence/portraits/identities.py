"""People of the portraits world: the same face in many contexts, and how alike two pictures' faces are.

Identity features are the attribute classifier's, projected to the directions that distinguish people and not their
backgrounds (linear discriminant analysis, Fisher 1936), fitted on renders of people that no other measurement uses.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from ...engine.io.files import save_safetensors
from ...engine.portraits.captions import context_caption
from ...engine.portraits.dataset import PORTRAITS, Dataset
from ...engine.portraits.render import render
from ...engine.portraits.scenes import Scenes
from ...engine.runtime.progress import Progress, silent
from .classifier import CLASSIFIER_FILE, AttributeClassifier, Reading, read

FACE_FILE = CLASSIFIER_FILE.with_name("identity.safetensors")
FIRST_IDENTITY = 20_000_000
"""Identity seeds from here on belong to spaces of models; the portraits model never saw them."""
_FITTING, _CONTEXTS = 30_000_000, 40_000_000
"""First identity seed of the people the projection is fitted on, and first context seed."""
DIMENSIONS = 24


def portraits_of(identity: int, count: int = 16, first_context: int = 0, dataset: Dataset = PORTRAITS) -> Scenes:
    """``count`` scenes of one person in contexts ``first_context`` onwards, which are the same for everybody."""
    contexts = range(_CONTEXTS + first_context, _CONTEXTS + first_context + count)
    return dataset.sample_scenes([identity] * count, contexts)


def fit_identity(
    net: AttributeClassifier, people: int = 600, pictures: int = 10, progress: Progress = silent
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean (128,), projection (128, 24)) by Fisher's criterion; the within-person scatter becomes the identity."""
    features = []
    for i in range(people):
        scenes = portraits_of(_FITTING + i, pictures, 1000 + pictures * i, net.dataset)
        features.append(read(net, net.dataset.render(scenes).images).features)
        progress(i + 1, people, None)
    rows = torch.cat(features).double()
    grouped = rows.view(people, pictures, -1)
    centre = grouped.mean(1, keepdim=True)
    within = (grouped - centre).flatten(0, 1)
    scatter = within.T @ within / (people * (pictures - 1))
    scatter += 1e-3 * scatter.diagonal().mean() * torch.eye(len(scatter), dtype=torch.float64)
    between = (centre - rows.mean(0)).flatten(0, 1)
    root = torch.linalg.cholesky(torch.linalg.inv(scatter))
    _, axes = torch.linalg.eigh(root.T @ (between.T @ between) @ root)
    return rows.mean(0).float(), (root @ axes.flip(1)[:, :DIMENSIONS]).float()


@lru_cache(maxsize=2)
def load_identity(path: Path = FACE_FILE) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean (128,), projection (128, 24)) of a file of :func:`save_identity`; by default the shipped one."""
    from safetensors.torch import load_file

    tensors = load_file(path)
    return tensors["mean"], tensors["projection"]


def save_identity(net: AttributeClassifier, path: str | Path, progress: Progress = silent, people: int = 600) -> Path:
    """Fit and write the projection: ``python -m vitrine.evidence.recipes identity``, which made the shipped file."""
    mean, projection = fit_identity(net, people, progress=progress)
    return save_safetensors(path, {"mean": mean, "projection": projection})


def identity_features(reading: Reading, path: Path = FACE_FILE) -> torch.Tensor:
    """(B, 24): distances between rows are in units of what one person's pictures vary."""
    mean, projection = load_identity(path)
    return (reading.features - mean.to(reading.features.device)) @ projection.to(reading.features.device)


def identity_similarity(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Cosine (...,) of identity features, which are centred on the average person."""
    return torch.nn.functional.cosine_similarity(a, b, dim=-1)


def identity_attributes(reading: Reading, dataset: Dataset = PORTRAITS) -> dict[str, torch.Tensor]:
    """Permanent attribute -> (B, values) probabilities."""
    return {name: reading.logits[name].softmax(1) for name in dataset.identity}


def training_pictures(identity: int, count: int = 16) -> tuple[torch.Tensor, list[str], Scenes]:
    """(n, 3, 64, 64) in [0, 1], context captions, scenes."""
    scenes = portraits_of(identity, count)
    return render(scenes).images, context_caption(scenes), scenes


def people(count: int, first: int = FIRST_IDENTITY) -> np.ndarray:
    """(count,) identity seeds."""
    return np.arange(first, first + count)
