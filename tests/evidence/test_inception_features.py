"""Inception features from the files of another package: their form, what is computed, and what is refused."""

import base64
import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from vitrine.engine.errors import VitrineError
from vitrine.evidence.emd import outside_features
from vitrine.evidence.metrics.inception_features import read_inception

HEAD, TAIL = "!function(a){a}(function(){return n({1:[function(a,n,i){n.exports=", "},{}]},{},[1])(1)});"


def layer(kind, name, source, **config):
    return {
        "class_name": kind,
        "name": name,
        "config": config | {"name": name},
        "inbound_nodes": [[[source, 0, 0, {}]]],
    }


def plain(value):
    """As minifiers write an object: keys without quotes, !0 for true, .5 for 0.5."""
    text = re.sub(r'"(\w+)":', r"\1:", json.dumps(value, separators=(",", ":")))
    text = text.replace("true", "!0").replace("false", "!1")
    return re.sub(r"(?<=[:\[,])(-?)0\.(?=\d)", r"\1.", text)


def write(folder, layers, entries, content):
    manifest = [{"paths": ["group1-shard1of1"], "weights": entries}]
    topology = {"model_config": {"config": {"layers": layers}}}
    text = plain({"modelTopology": topology, "weightsManifest": manifest})
    (folder / "model.min.js").write_text(HEAD + text + TAIL)
    (folder / "group1-shard1of1.min.js").write_text(f'{HEAD}"{base64.b64encode(content).decode()}"{TAIL}')


@pytest.fixture
def folder(tmp_path):
    pool = {"pool_size": [3, 3], "strides": [1, 1], "padding": "same"}
    first = {
        "class_name": "InputLayer",
        "name": "input",
        "inbound_nodes": [],
        "config": {"batch_input_shape": [None, 9, 9, 3]},
    }
    joined = layer("Concatenate", "joined", "relu", axis=3)
    joined["inbound_nodes"][0] += [["average", 0, 0, {}], ["largest", 0, 0, {}]]
    layers = [
        first,
        layer("Conv2D", "conv", "input", strides=[2, 2], padding="same", activation="linear", trainable=False),
        layer("BatchNormalization", "norm", "conv", epsilon=0.001),
        layer("Activation", "relu", "norm", activation="relu"),
        layer("AveragePooling2D", "average", "relu", **pool),
        layer("MaxPooling2D", "largest", "relu", **pool),
        joined,
        layer("Flatten", "flat", "joined"),
        layer("Dense", "dense", "flat", activation="softmax"),
    ]
    shapes = {"conv/kernel": [3, 3, 3, 4], "norm/beta": [4], "norm/moving_mean": [4], "norm/moving_variance": [4]}
    entries = [{"name": n, "shape": s, "quantization": {"min": 0.125, "scale": 0.005}} for n, s in shapes.items()]
    count = sum(math.prod(shape) for shape in shapes.values())
    content = bytes(torch.randint(256, (count,), generator=torch.Generator().manual_seed(0)).tolist())
    write(tmp_path, layers, entries, content)
    return tmp_path


def test_layers_run_as_in_the_packages_library(folder):
    network = read_inception(folder)
    w, images = network.weights, torch.rand(3, 3, 9, 9, generator=torch.Generator().manual_seed(1))
    assert w["conv/kernel"].shape == (4, 3, 3, 3) and float(w["norm/beta"].min()) >= 0.125
    x = F.conv2d(F.pad(images, (1, 1, 1, 1)), w["conv/kernel"], stride=2)
    mean, variance = (w[f"norm/moving_{name}"][:, None, None] for name in ("mean", "variance"))
    x = F.relu((x - mean) / (variance + 0.001).sqrt() + w["norm/beta"][:, None, None])
    ones = F.avg_pool2d(torch.ones(1, 1, 5, 5), 3, 1, 1)
    wanted = torch.cat([x, F.avg_pool2d(x, 3, 1, 1) / ones, F.max_pool2d(x, 3, 1, 1)], 1).flatten(1)
    torch.testing.assert_close(network.features(images, batch=2), wanted)


def test_missing_cut_and_other_files_are_explained(folder):
    with pytest.raises(VitrineError, match="npm pack nsfwjs"):
        read_inception(folder / "other")
    shard = folder / "group1-shard1of1.min.js"
    whole = shard.read_text()
    shard.write_text(f'{HEAD}"{base64.b64encode(bytes(9)).decode()}"{TAIL}')
    with pytest.raises(VitrineError, match="9 bytes; accepted: 120, by its manifest"):
        read_inception(folder)
    shard.write_text(whole.replace("exports=", "exports=run()+"))
    with pytest.raises(VitrineError, match="weights as base64"):
        read_inception(folder)
    model = folder / "model.min.js"
    model.write_text(model.read_text().replace('"softmax"', "alert(1)"))
    with pytest.raises(VitrineError, match="an object of plain values"):
        read_inception(folder)


@pytest.mark.nightly
def test_the_claim_with_a_small_network(folder, monkeypatch):
    monkeypatch.setattr(outside_features, "QUICK_CAPTION_COUNT", 12)
    monkeypatch.setattr(outside_features, "COMPONENTS", 4)
    result = outside_features.judged(quick=True, inception=str(folder))
    assert {arm.name for arm in result.arms} == set(outside_features.ROLES) and result.n == 12
    assert all(arm.interval[0] <= arm.interval[1] and math.isfinite(arm.value) for arm in result.arms)
