"""Files of activations and presets, made by hand: a setting that a file lacks takes its default."""

import json

import pytest
import torch
from safetensors.torch import save_file
from vitrine.engine.activations import ActivationReader, Activations, ActivationWriter, TapConfig
from vitrine.engine.activations.presets import FeaturePreset
from vitrine.engine.network.attention import MapReduction

PLACE, TEXT = "up-level0-repeat0-res-out", "up-level0-repeat0-vit-block0-cross-k"
CONFIG = {
    "addresses": [PLACE, TEXT],
    "timestep": 50.0,
    "seeds": [0, 1],
    "dtype": "float16",
    "size": None,
    "early_exit": True,
    "posterior": "mean",
    "batch": 16,
    "variance": True,
    "noise": True,
    "map_heads": "each",
    "map_tokens": None,
}
INFO = {
    "timestep": 50.0,
    "sigma": 0.2256,
    "seeds": [0, 1],
    "prompts": ["a man"],
    "model": "tiny",
    "step": None,
    "vitrine": "0.1.0",
    "extra": {"config": CONFIG},
}
LACKING = {"modulate": False, "discard": []}
"""Settings that these files lack."""
HEADER = {"grids": {PLACE: [3, 4], TEXT: None}, "variance": [PLACE], "info": INFO}


def tensors(prefix=""):
    g = torch.Generator().manual_seed(0)
    return {
        f"{prefix}{PLACE}": torch.randn(1, 5, 3, 4, generator=g).half(),
        f"{prefix}{TEXT}": torch.randn(1, 7, 6, generator=g).half(),
        f"{prefix}variance/{PLACE}": torch.rand(1, 5, 3, 4, generator=g),
    }


def write(path, values, header):
    """One metadata key, no format entry next to it."""
    save_file(values, path, metadata={"vitrine": json.dumps(header)})


def check(taps):
    stored = tensors()
    assert list(taps) == [PLACE, TEXT] and taps.rows == 1
    assert torch.equal(taps[PLACE].tensor, stored[PLACE]) and taps[PLACE].grid == (3, 4)
    assert torch.equal(taps[TEXT].tensor, stored[TEXT]) and taps[TEXT].grid is None
    assert torch.equal(taps.variance[PLACE], stored[f"variance/{PLACE}"])
    assert taps.info.seeds == (0, 1) and taps.info.prompts == ("a man",) and taps.info.vitrine == "0.1.0"
    config = TapConfig.from_dict(taps.info.extra["config"])
    assert (
        config == TapConfig((PLACE, TEXT), 50, (0, 1), "float16", variance=True)
        and config.to_dict() == CONFIG | LACKING
    )


def test_activations(tmp_path):
    path = tmp_path / "taps.safetensors"
    write(path, tensors(), {"kind": "vitrine.activations", "version": 1, **HEADER})
    taps = Activations.load(path)
    check(taps)
    assert taps.header() == HEADER  # as it was written
    check(Activations.load(taps.save(tmp_path / "again.safetensors")))


@pytest.mark.parametrize("indexed", [True, False])
def test_shards(tmp_path, indexed):
    """The folder is read, and a run that writes to it resumes."""
    name = "shard-000000-0badcafe.safetensors"
    items = [{"key": "a", **HEADER}, {"key": "b", **HEADER}]
    header = {"kind": "vitrine.activations.shard", "version": 1, "config": CONFIG, "items": items}
    write(tmp_path / name, tensors("0/") | tensors("1/"), header)
    if indexed:
        index = {"kind": "vitrine.activations.index", "version": 1, "config": CONFIG, "shards": {name: ["a", "b"]}}
        (tmp_path / "index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    reader = ActivationReader(tmp_path)
    assert list(reader) == ["a", "b"] and reader.config == TapConfig.from_dict(CONFIG)
    check(reader["a"])
    check(reader["b"])
    with ActivationWriter(tmp_path, TapConfig.from_dict(CONFIG)) as writer:
        assert "a" in writer and len(writer) == 2
        writer.add("c", reader["a"])
    assert list(ActivationReader(tmp_path)) == ["a", "b", "c"]


def test_feature_presets(tmp_path):
    preset = {
        "name": "mine",
        "addresses": [PLACE],
        "timestep": 50.0,
        "model": "UNet2DConditionModel",
        "size": 0,
        "source": "ranked by Vitrine",
        "channels": 0,
        "seeds": [0],
        "noise": True,
        "note": "",
        "numbers": {
            "properties": {PLACE: {"noise": 0.01, "granularity": 2.0, "locality": 0.3}},
            "score": 0.6,
            "single": {PLACE: 0.6},
        },
    }
    table = {
        "format": "vitrine-feature-preset",
        "version": 1,
        "fingerprint": "feedfeedfeedfeed",
        "info": {"dropped": {TEXT: ["diffusion noise 0.300 > 0.100"]}},
        "preset": preset,
    }
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(table, indent=1), encoding="utf-8")
    loaded = FeaturePreset.load(path)
    assert loaded.preset.addresses == (PLACE,) and loaded.preset.config() == TapConfig((PLACE,), 50)
    assert loaded.preset.numbers == preset["numbers"] and loaded.info == table["info"]
    assert json.loads(loaded.save(tmp_path / "again.json").read_text()) == table | {"preset": preset | LACKING}


def test_map_reductions_in_a_config():
    config = TapConfig.from_dict({**CONFIG, "map_heads": "mean", "map_tokens": [3, 5]})
    assert config.maps == MapReduction("mean", (3, 5)) and TapConfig.from_dict(config.to_dict()) == config
