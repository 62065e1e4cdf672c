"""The attribute classifier: what a picture shows, read by a small convolutional net trained on renders only.

It is the measure of the portraits dataset: attribute accuracy, keypoints, and (its penultimate features) Frechet
distances, with nothing to download. Every figure it produces comes with its own held-out accuracy.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ...engine.errors import refuse
from ...engine.portraits.dataset import PORTRAITS, Dataset
from ...engine.portraits.flow import FlowPortraits
from ...engine.portraits.models import WEIGHTS, Portraits
from ...engine.portraits.scenes import Scenes

CLASSIFIER_FILE = WEIGHTS / "readout" / "readout.safetensors"
FEATURES = 128


class Reading(NamedTuple):
    """Logits per attribute {name: (B, values)}, keypoints (B, K, 2) in [0, 1], features (B, 128)."""

    logits: dict[str, torch.Tensor]
    keypoints: torch.Tensor
    features: torch.Tensor


class AttributeClassifier(nn.Module):
    """64 px pictures in, :class:`Reading` out, of a dataset's attributes. About 0.33 M parameters."""

    def __init__(self, dataset: Dataset = PORTRAITS) -> None:
        super().__init__()
        self.dataset = dataset
        layers: list[nn.Module] = []
        for channels_in, channels, stride in (
            (3, 32, 2),
            (32, 32, 1),
            (32, 64, 2),
            (64, 64, 1),
            (64, 64, 2),
            (64, 32, 1),
        ):
            layers += [nn.Conv2d(channels_in, channels, 3, stride, 1), nn.GroupNorm(8, channels), nn.SiLU()]
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 8 * 8, FEATURES), nn.SiLU())
        self.attributes = nn.Linear(FEATURES, sum(map(len, dataset.attributes.values())))
        self.points = nn.Linear(FEATURES, 2 * len(dataset.keypoints))

    def forward(self, images: torch.Tensor) -> Reading:
        """Read (B, 3, 64, 64) pictures in [0, 1]."""
        if images.shape[-3:] != (3, 64, 64):
            raise refuse(
                "attribute classifier's input", tuple(images.shape), "(B, 3, 64, 64)", "resize the pictures to 64 px"
            )
        features = self.body(images * 2 - 1)
        columns = self.attributes(features).split([len(v) for v in self.dataset.attributes.values()], dim=1)
        logits = dict(zip(self.dataset.attributes, columns, strict=True))
        return Reading(logits, self.points(features).unflatten(1, (-1, 2)), features)


def classifier_of(model: Portraits | FlowPortraits) -> AttributeClassifier:
    """The network that reads a model's dataset: the shipped one for portraits, else the one in the model's folder."""
    if model.dataset is PORTRAITS:
        return load_classifier()
    assert model.folder is not None
    return load_classifier(model.folder / "readout" / CLASSIFIER_FILE.name, model.dataset)


def load_classifier(path: str | Path | None = None, dataset: Dataset = PORTRAITS) -> AttributeClassifier:
    """The shipped network, or a file's, float32, in evaluation mode."""
    from safetensors.torch import load_file

    net = AttributeClassifier(dataset)
    net.load_state_dict({k: v.float() for k, v in load_file(path or CLASSIFIER_FILE).items()})
    return net.eval()


def classifier_loss(
    reading: Reading, attributes: torch.Tensor, keypoints: torch.Tensor, dataset: Dataset = PORTRAITS
) -> torch.Tensor:
    """Cross-entropy per attribute, where it can be seen, plus L1 on visible keypoints."""
    shown = dataset.shown(attributes)
    loss = reading.keypoints.new_zeros(())
    for k, name in enumerate(dataset.attributes):
        each = nn.functional.cross_entropy(reading.logits[name], attributes[:, k], reduction="none")
        loss = loss + (each * shown[:, k]).mean()
    seen = ~keypoints.isnan()
    return loss + 5 * (reading.keypoints - keypoints.nan_to_num())[seen].abs().mean()


@torch.no_grad()
def read(net: AttributeClassifier, images: torch.Tensor, batch: int = 256) -> Reading:
    """Run the network over any number of pictures."""
    readings = [net(chunk) for chunk in images.split(batch)]
    logits = {n: torch.cat([r.logits[n] for r in readings]) for n in net.dataset.attributes}
    return Reading(logits, torch.cat([r.keypoints for r in readings]), torch.cat([r.features for r in readings]))


def attribute_accuracy(reading: Reading, scenes: Scenes, dataset: Dataset = PORTRAITS) -> dict[str, float]:
    """Share of pictures that show each attribute as wanted, over the pictures where it can be seen."""
    wanted = torch.as_tensor(scenes.attributes, device=reading.features.device)
    shown = dataset.shown(wanted)
    hits = torch.stack([reading.logits[n].argmax(1) == wanted[:, k] for k, n in enumerate(dataset.attributes)], 1)
    return {n: float(hits[shown[:, k], k].float().mean()) for k, n in enumerate(dataset.attributes)}
