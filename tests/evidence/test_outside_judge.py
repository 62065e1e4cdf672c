"""Face descriptors from the files of another package: their form, and what is refused."""

import json
import math

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.evidence.metrics.face_embedding import BLOCKS, MODEL, describe, read_weights
from vitrine.evidence.w2w.outside_judge import _told_apart

SIZES = {32: 8, 64: 16, 128: 24, 256: 32}
"""Channels of the published network -> of the tests'."""


@pytest.fixture
def folder(tmp_path):
    """A small network in the package's form: half of the kernels as float32, all else as bytes."""
    g, entries, content, last = torch.Generator().manual_seed(0), [], b"", SIZES[32]

    def add(name, shape, whole=False):
        nonlocal content
        entry = {"name": name, "shape": shape, "dtype": "float32"}
        if whole:
            content += (torch.randn(shape, generator=g) / 10).numpy().tobytes()
        else:
            entry["quantization"] = {"dtype": "uint8", "scale": 0.002, "min": -0.25}
            content += torch.randint(256, (math.prod(shape),), generator=g, dtype=torch.uint8).numpy().tobytes()
        entries.append(entry)

    def convolution(name, size, before, after, whole=False):
        add(f"{name}/conv/filters", [size, size, before, after], whole)
        for part in ("conv/bias", "scale/weights", "scale/biases"):
            add(f"{name}/{part}", [after])

    convolution("conv32_down", 7, 3, last)
    for name in BLOCKS:
        width = SIZES[int(name.removeprefix("conv").split("_")[0])]
        convolution(f"{name}/conv1", 3, last, width, whole="64" in name)
        convolution(f"{name}/conv2", 3, width, width)
        last = width
    add("fc", [last, 128])
    (tmp_path / f"{MODEL}-weights_manifest.json").write_text(json.dumps([{"weights": entries, "paths": []}]))
    (tmp_path / f"{MODEL}.bin").write_bytes(content)
    return tmp_path


def test_bytes_become_weights_and_pictures_become_descriptors(folder):
    weights = read_weights(folder)
    assert weights["conv64_1/conv1/conv/filters"].shape == (16, 16, 3, 3)
    assert float(weights["fc"].min()) >= -0.25 and float(weights["fc"].max()) <= 255 * 0.002 - 0.25 + 1e-6
    images = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    whole = describe(weights, images)
    assert whole.shape == (3, 128) and whole.isfinite().all() and float(whole.std()) > 0
    torch.testing.assert_close(whole, describe(weights, images, batch=1))


def test_missing_and_cut_files_are_explained(folder):
    with pytest.raises(VitrineError, match="npm pack @vladmandic/face-api"):
        read_weights(folder / "other")
    data = folder / f"{MODEL}.bin"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(VitrineError, match="by its manifest"):
        read_weights(folder)


def test_people_are_told_apart_by_distances():
    people = torch.randn(10, 1, 8, generator=torch.Generator().manual_seed(2))
    noise = torch.randn(10, 4, 8, generator=torch.Generator().manual_seed(3))
    near, who = people + 0.01 * noise, torch.arange(10)
    assert _told_apart(near, who) == 1 and abs(_told_apart(noise, who) - 0.5) < 0.1
    twice = torch.tensor([0, 0, 1, 2])
    assert _told_apart(near[twice], twice) == 1, "a person's copy is not another person"
