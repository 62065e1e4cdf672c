"""Face descriptors by a network of other authors: dlib's, as the npm package ``@vladmandic/face-api`` ships it.

``npm pack @vladmandic/face-api`` fetches it (MIT); nothing of it is in this repository. A ResNet of 29 convolutions
(King 2017, "High quality face recognition with deep metric learning"): distances of its descriptors tell people apart.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ...engine.errors import refuse

MODEL = "face_recognition_model"
SIDE, MEAN = 150, (122.782, 117.001, 104.298)
BLOCKS = (
    "conv32_1", "conv32_2", "conv32_3", "conv64_down", "conv64_1", "conv64_2", "conv64_3", "conv128_down", "conv128_1",
    "conv128_2", "conv256_down", "conv256_1", "conv256_2", "conv256_down_out",
)  # fmt: skip
Weights = dict[str, torch.Tensor]


def read_weights(folder: Path) -> Weights:
    """Name -> tensor, of the package's folder ``model``; most stored as bytes with a scale and a minimum."""
    manifest, data = folder / f"{MODEL}-weights_manifest.json", folder / f"{MODEL}.bin"
    if not (manifest.is_file() and data.is_file()):
        remedy = "npm pack @vladmandic/face-api, unpack it, and give its folder model"
        raise refuse("face model", str(folder), f"a folder with {manifest.name} and {data.name}", remedy)
    entries = json.loads(manifest.read_text(encoding="utf-8"))[0]["weights"]
    content, start, weights = bytearray(data.read_bytes()), 0, {}
    sizes = [math.prod(entry["shape"]) * (1 if "quantization" in entry else 4) for entry in entries]
    if sum(sizes) != len(content):
        raise refuse("face model", f"{len(content)} bytes", f"{sum(sizes)}, by its manifest", "fetch the package again")
    for entry, size in zip(entries, sizes, strict=True):
        weights[entry["name"]] = _tensor(entry, content[start : start + size])
        start += size
    return weights


def _tensor(entry: dict[str, Any], content: bytearray) -> torch.Tensor:
    """One tensor; kernels from (height, width, in, out) to (out, in, height, width)."""
    stored = entry.get("quantization")
    if stored is None:
        tensor = torch.frombuffer(content, dtype=torch.float32).view(entry["shape"])
    else:
        numbers = torch.frombuffer(content, dtype=torch.uint8).view(entry["shape"])
        tensor = numbers.float() * stored["scale"] + stored["min"]
    return tensor.permute(3, 2, 0, 1).contiguous() if tensor.ndim == 4 else tensor


@torch.no_grad()
def describe(weights: Weights, images: torch.Tensor, batch: int = 32) -> torch.Tensor:
    """(N, 128) descriptors of (N, 3, H, W) pictures in [0, 1], each a face that fills its picture."""
    return torch.cat([_describe(weights, part) for part in images.split(batch)])


def _describe(weights: Weights, images: torch.Tensor) -> torch.Tensor:
    pixels = F.interpolate(images, (SIDE, SIDE), mode="bilinear", antialias=True) * 255
    x = (pixels - torch.tensor(MEAN)[:, None, None]) / 256
    x = F.max_pool2d(F.relu(_convolved(weights, "conv32_down", x, stride=2)), 3, 2)
    for name in BLOCKS:
        x = _block(weights, name, x)
    return x.mean((2, 3)) @ weights["fc"]


def _block(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """A residual block; ``down`` halves the sides, and adds channels and a border of zeros to what it passes on."""
    down = "down" in name
    inner = F.relu(_convolved(weights, f"{name}/conv1", x, stride=2 if down else 1))
    inner = _convolved(weights, f"{name}/conv2", inner)
    if down:
        x = F.avg_pool2d(x, 2, 2)
        border = [new - old for new, old in zip(reversed(inner.shape[1:]), reversed(x.shape[1:]), strict=True)]
        inner = F.pad(inner, [0, max(0, -border[0]), 0, max(0, -border[1])])
        x = F.pad(x, [0, max(0, border[0]), 0, max(0, border[1]), 0, max(0, border[2])])
    return F.relu(inner + x)


def _convolved(weights: Weights, name: str, x: torch.Tensor, stride: int = 1) -> torch.Tensor:
    kernel, bias = weights[f"{name}/conv/filters"], weights[f"{name}/conv/bias"]
    padding = kernel.shape[-1] // 2 if stride == 1 else 0
    out = F.conv2d(x, kernel, bias, stride, padding)
    return out * weights[f"{name}/scale/weights"][:, None, None] + weights[f"{name}/scale/biases"][:, None, None]
