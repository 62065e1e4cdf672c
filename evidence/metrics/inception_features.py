"""Features of an Inception network of other authors: the one that the npm package ``nsfwjs`` ships.

``npm pack nsfwjs`` fetches it (MIT); nothing of it is in this repository, and none of its code is run. It is an
Inception v3 (Szegedy et al. 2016) trained to classify photographs and drawings, not the ImageNet network of published
FIDs, so these distances compare with each other alone.
"""

from __future__ import annotations

import base64
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ...engine.errors import refuse

PACKAGE = "npm pack nsfwjs, unpack it, and give its folder dist/models/inception_v3"
Layer = dict[str, Any]


@dataclass(frozen=True)
class Inception:
    """Layers in the order in which they run, up to the first dense one, and their weights by name."""

    layers: list[Layer]
    weights: dict[str, torch.Tensor]
    side: int

    @torch.no_grad()
    def features(self, images: torch.Tensor, batch: int = 16) -> torch.Tensor:
        """(N, D) outputs in front of the first dense layer, of (N, 3, H, W) pictures in [0, 1]."""
        return torch.cat([self._run(part) for part in images.split(batch)])

    def _run(self, images: torch.Tensor) -> torch.Tensor:
        size = (self.side, self.side)
        outputs = {self.layers[0]["name"]: F.interpolate(images, size, mode="bilinear", align_corners=True)}
        for layer in self.layers[1:]:
            sources = [outputs[name] for name, *_ in layer["inbound_nodes"][0]]
            outputs[layer["name"]] = self._apply(layer["class_name"], layer["config"], sources)
        return outputs[self.layers[-1]["name"]].flatten(1)

    def _apply(self, kind: str, config: Layer, sources: list[torch.Tensor]) -> torch.Tensor:
        x, name = sources[0], config["name"]
        if kind == "Conv2D":
            kernel = self.weights[f"{name}/kernel"]
            padded = _padded(x, kernel.shape[2:], config)
            return _activated(F.conv2d(padded, kernel, self.weights.get(f"{name}/bias"), config["strides"]), config)
        if kind == "BatchNormalization":
            mean, variance = self.weights[f"{name}/moving_mean"], self.weights[f"{name}/moving_variance"]
            scale, shift = self.weights.get(f"{name}/gamma"), self.weights.get(f"{name}/beta")
            return F.batch_norm(x, mean, variance, scale, shift, eps=config["epsilon"])
        if kind == "MaxPooling2D":
            return F.max_pool2d(
                _padded(x, config["pool_size"], config, -math.inf), config["pool_size"], config["strides"]
            )
        if kind == "AveragePooling2D":
            around = [size // 2 if config["padding"] == "same" else 0 for size in config["pool_size"]]
            return F.avg_pool2d(x, config["pool_size"], config["strides"], around, count_include_pad=False)
        if kind == "Concatenate":
            return torch.cat(sources, 1)
        if kind == "Activation":
            return _activated(x, config)
        if kind in ("Flatten", "Dropout"):
            return x
        raise refuse("inception model", f"a layer {kind}", "layers of an Inception v3", PACKAGE)


def _activated(x: torch.Tensor, config: Layer) -> torch.Tensor:
    known = {"linear": lambda y: y, "relu": F.relu}
    if config["activation"] not in known:
        raise refuse("inception model", f"activation {config['activation']}", list(known), PACKAGE)
    return known[config["activation"]](x)


def _padded(x: torch.Tensor, kernel: Any, config: Layer, value: float = 0.0) -> torch.Tensor:
    """As TensorFlow pads: with "same", ceil(side / stride) outputs, the odd row and column at the end."""
    if config["padding"] != "same":
        return x
    sides = zip(x.shape[2:], kernel, config["strides"], strict=True)
    missing = [max(0, (math.ceil(side / step) - 1) * step + size - side) for side, size, step in sides]
    (top, left), (tall, wide) = [m // 2 for m in missing], missing
    return F.pad(x, (left, wide - left, top, tall - top), value=value)


def read_inception(folder: Path) -> Inception:
    """The network of the package's folder ``dist/models/inception_v3``."""
    path = folder / "model.min.js"
    if not path.is_file():
        raise refuse("inception model", str(folder), f"a folder with {path.name}", PACKAGE)
    described = _literal(path)
    config = described["modelTopology"]["model_config"]["config"]
    (group,) = described["weightsManifest"]
    kinds = [layer["class_name"] for layer in config["layers"]]
    layers = config["layers"][: kinds.index("Dense") if "Dense" in kinds else None]
    content = b"".join(_shard(folder / f"{name}.min.js") for name in group["paths"])
    return Inception(layers, _weights(group["weights"], content), layers[0]["config"]["batch_input_shape"][1])


def _literal(path: Path) -> Any:
    """The object that a bundled module exports, read as JSON: keys get quotes, numbers their zeros."""
    match = re.search(
        r"exports=(\{.*\})\},\{\}\]\},\{\},\[1\]\)\(1\)\}\);?\s*$", path.read_text(encoding="utf-8"), re.S
    )
    if match is None:
        raise refuse("inception model", path.name, "a module that exports one object", PACKAGE)
    text = re.sub(r"([{,])([A-Za-z_]\w*):", r'\1"\2":', match[1])
    text = re.sub(r"!([01])\b", lambda m: "true" if m[1] == "0" else "false", text)
    text = re.sub(r"(?<=[:\[,])(-?)\.(?=\d)", r"\g<1>0.", text)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise refuse("inception model", f"{path.name}: {error}", "an object of plain values", PACKAGE) from error


def _shard(path: Path) -> bytes:
    match = re.search(r'exports="([A-Za-z0-9+/=]+)"', path.read_text(encoding="utf-8")) if path.is_file() else None
    if match is None:
        raise refuse("inception model", path.name, "a module that exports weights as base64", PACKAGE)
    return base64.b64decode(match[1])


def _weights(entries: list[dict[str, Any]], content: bytes) -> dict[str, torch.Tensor]:
    """Name -> float32 tensor of bytes with a scale and a minimum; kernels as (out, in, height, width)."""
    sizes = [math.prod(entry["shape"]) for entry in entries]
    if sum(sizes) != len(content):
        raise refuse("inception model", f"{len(content)} bytes", f"{sum(sizes)}, by its manifest", "fetch it again")
    weights, start = {}, 0
    for entry, size in zip(entries, sizes, strict=True):
        stored = entry["quantization"]
        numbers = torch.frombuffer(bytearray(content[start : start + size]), dtype=torch.uint8).float()
        tensor = (numbers * stored["scale"] + stored["min"]).view(entry["shape"])
        weights[entry["name"]] = tensor.permute(3, 2, 0, 1).contiguous() if tensor.ndim == 4 else tensor
        start += size
    return weights
