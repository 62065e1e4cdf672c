"""Good files of every format, and ways to break them: cut, bent, flipped, poisoned, or of another kind altogether.

The corpus is made here from good files, so it follows the formats.
"""

import io
import json
import os
import pickle
import random
import zipfile

import torch
from safetensors.torch import load, save, save_file
from vitrine.cli import emd_commands as emd_cli
from vitrine.engine.activations import Activations, TapConfig, TapInfo, qualitative_filter, site_search
from vitrine.engine.activations.presets import FeaturePreset, Preset
from vitrine.engine.activations.writer import ActivationReader, ActivationWriter
from vitrine.engine.emd import StudentPreset, read_student
from vitrine.engine.jobs.run import Run
from vitrine.engine.nemo import Calibration, FewStepConfig, ProbeConfig, SampleThreshold, ScoreThreshold
from vitrine.engine.nemo.neuron_statistics import NeuronStatistics
from vitrine.engine.nemo.neurons import NeuronSet
from vitrine.engine.tracing.hooks import Activation
from vitrine.engine.w2w.building.build_space import load_space
from vitrine.engine.w2w.loras.lora_files import read_lora
from vitrine.engine.w2w.space.delta_space import DeltaSpace
from vitrine.engine.w2w.space.manifest import LoraLayer, Manifest
from vitrine.engine.w2w.space.space import WeightSpace

PLACES = ("up-level0-repeat0-res-out", "up-level1-repeat0-vit-block0-cross-q")
KOHYA = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
EVIL_NAMES = ("../../evil", "/tmp/evil", "..\\evil", "a/../../evil", "evil\x00.txt", "")


# --- good files ---------------------------------------------------------------------------------------------------
def taps():
    gen = torch.Generator().manual_seed(0)
    image = Activation(PLACES[0], torch.randn(2, 3, 4, 4, generator=gen), (4, 4))
    text = Activation(PLACES[1], torch.randn(2, 5, 6, generator=gen))
    spread = {PLACES[0]: torch.rand(2, 3, 4, 4, generator=gen)}
    return Activations({a.address: a for a in (image, text)}, TapInfo(50.0, 1.0, (0, 1), ("a", "b")), spread)


def loras(count=4):
    gen = torch.Generator().manual_seed(1)
    return [
        {
            f"block.{i}.to_q": LoraLayer(torch.randn(2, 5, generator=gen), torch.randn(7, 2, generator=gen), 2.0)
            for i in range(2)
        }
        for _ in range(count)
    ]


def make_shard(path):
    with ActivationWriter(path.parent, TapConfig(PLACES)) as writer:
        writer.add("a", taps())
    next(path.parent.glob("shard-*")).rename(path)
    (path.parent / "index.json").unlink()


def make_factors(path):
    manifest, gen = Manifest.of(loras()[0]), torch.Generator().manual_seed(2)
    d = manifest.size
    parts = (torch.randn(d, generator=gen), torch.ones(d), torch.randn(2, d, generator=gen), torch.tensor([2.0, 1.0]))
    WeightSpace(manifest, *parts, torch.randn(4, 2, generator=gen), 4, tuple("abcd"), {}, 1.0, {"base": "x"}).save(path)


def make_student(path):
    tensors = {f"{KOHYA}.lora_down.weight": torch.randn(2, 8), f"{KOHYA}.lora_up.weight": torch.randn(8, 2)}
    save_file(tensors, path, StudentPreset("portraits", shape=(4, 16, 16)).to_metadata())


def lora_tensors(seed=3):
    gen = torch.Generator().manual_seed(seed)
    both = {"lora_down.weight": torch.randn(2, 8, generator=gen), "lora_up.weight": torch.randn(8, 2, generator=gen)}
    return {f"{KOHYA}.{k}": v for k, v in both.items()} | {f"{KOHYA}.alpha": torch.tensor(1.0)}


def make_adapter(path):
    peft = {f"base_model.model.block.to_q.lora_{k}.weight": torch.randn(s) for k, s in (("A", (2, 8)), ("B", (8, 2)))}
    save_file(peft, path.with_name("adapter_model.safetensors"))
    path.write_text(json.dumps({"lora_alpha": 4, "alpha_pattern": {"to_q": 8}, "use_rslora": True}))


def read_shard(path):
    reader = ActivationReader(path.parent)
    return [reader[key] for key in reader], reader.config


def calibration(path):
    rows = {a: torch.rand(6) + 0.1 for a in PLACES}
    statistics = NeuronStatistics(rows, {a: v.clone() for a, v in rows.items()}, 10, "model")
    samples = SampleThreshold(0.2, 0.5, torch.rand(64, 64), 10, FewStepConfig(), "model")
    Calibration(statistics, samples, ScoreThreshold.of([0.3, 0.4], ProbeConfig(), "model")).save(path)


def _state(path):
    """A job's state in one file, of no inputs."""
    return Run(path, path.name, {})


def _save_state(path, facts):
    _state(path).save({"group": {"tensor": torch.ones(2)}}, facts=facts)


# file name -> (make, read, whether the header must be ours)
TENSOR_FILES = {
    "taps.safetensors": (lambda p: taps().save(p), Activations.load, True),
    "shard-000000-0a0b0c0d.safetensors": (make_shard, read_shard, True),
    "calibration.safetensors": (calibration, Calibration.load, True),
    "student.safetensors": (make_student, read_student, True),
    "factors.safetensors": (make_factors, load_space, True),
    "delta.safetensors": (lambda p: DeltaSpace.of(loras(), tuple("abcd")).save(p), load_space, True),
    "lora.safetensors": (lambda p: save_file(lora_tensors(), p), read_lora, False),
    "filter.safetensors": (
        lambda p: _save_state(p, {"a": {"noise": 1, "granularity": 1, "locality": 0.1}}),
        lambda p: qualitative_filter._known(_state(p)),
        False,
    ),
    "scores.safetensors": (
        lambda p: _save_state(p, {"scores": {"a b": 0.5}}),
        lambda p: site_search._Scores(_state(p)),
        False,
    ),
}
GOOD_PRESET = Preset("mine", PLACES, 50.0, "portraits", 64, "ranked")


TEXT_FILES = {
    "preset.json": (lambda p: FeaturePreset(GOOD_PRESET, "model", {"rule": 1}).save(p), FeaturePreset.load, True),
    "neurons.json": (
        lambda p: NeuronSet({PLACES[0]: (1, 5), PLACES[1]: (3,)}, "model", {"tau": 0.4}).save(p),
        NeuronSet.load,
        True,
    ),
    "train.json": (lambda p: p.write_text(json.dumps({"train": {"steps": 4}})), emd_cli._read, False),
    "adapter_config.json": (make_adapter, lambda p: read_lora(p.with_name("adapter_model.safetensors")), False),
}


# --- breaking them ------------------------------------------------------------------------------------------------
class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def hostile(marker):
    """Bytes that are of another kind altogether."""
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb(marker)))
        archive.writestr("../../evil.txt", "evil")
    torched = io.BytesIO()
    torch.save({"lora": Bomb(marker)}, torched)
    yield "empty", b""
    yield "one byte", b"\x00"
    yield "zeros", bytes(64)
    yield "noise", random.Random(0).randbytes(500)
    yield "pickle", pickle.dumps(Bomb(marker))
    yield "old pickle", pickle.dumps(Bomb(marker), 0)
    yield "zip", zipped.getvalue()
    yield "torch.save", torched.getvalue()
    yield "UTF-16", '{"format": 1}'.encode("utf-16")
    yield "text", b"<html>404 not found</html>"


def split(data):
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(header, body):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + body


def bent_headers(data, word):
    """Safetensors headers that do not fit their bytes; ``word`` is what the error would be blamed on."""
    header, body = split(data)
    for length in (2**63 - 1, 2**64 - 1, 2**40, 100_000_001, len(data), len(data) - 7, 0, 1):
        yield f"header of {length} bytes", length.to_bytes(8, "little") + data[8:]
    for raw in (b"", b"null", b"[]", b"7", b'"x"', b"{" * 90, b"[" * 90_000, b"\xff\xfe\x80", b'{"a":1}', b'{"a":{}}'):
        yield f"header {raw[:12]!r}", join(raw, body)
    name = next(k for k in header if k != "__metadata__")
    start, stop = header[name]["data_offsets"]
    twists = {
        "data_offsets": ([start, stop + 10**9], [stop, start], [start, stop - 1], [-1, stop], [0], "x", None),
        "dtype": ("F33", "", None, 7, "I8"),
        "shape": ([10**18, 10**18], [-1], [1.5], "x", None),
    }
    for key, values in twists.items():
        for value in values:
            yield f"{key} {value}", join(header | {name: header[name] | {key: value}}, body)
        yield f"no {key}", join(header | {name: {k: v for k, v in header[name].items() if k != key}}, body)
    yield "metadata of numbers", join(header | {"__metadata__": {"vitrine": 7}}, body)


def cut(data):
    for end in {1, 7, 8, 9, len(data) // 3, len(data) // 2, len(data) - 1}:
        yield f"cut at {end}", data[:end]


def other_tensors(data, ours):
    """Whole files whose tensors are not what the reader expects: (label, bytes, must be refused)."""
    tensors, told = load(data), split(data)[0].get("__metadata__")
    floats = [k for k, v in tensors.items() if v.is_floating_point()]
    student = "vitrine.student" in (told or {})
    needed = ours and not student
    for key, value in tensors.items():
        yield f"no {key}", save({k: v for k, v in tensors.items() if k != key}, told), needed
        for label, other in (("axis", value[None]), ("none", value.reshape(-1)[:0]), ("flat", value.reshape(-1, 1, 1))):
            yield f"{label} {key}", save(tensors | {key: other.contiguous()}, told), needed and value.ndim > 0
        yield f"as int64 {key}", save(tensors | {key: value.long()}, told), key in floats and not key.endswith("alpha")
    for key in floats:
        for bad in (float("nan"), float("inf"), -float("inf")):
            poisoned = tensors[key].clone()
            poisoned.view(-1)[-1] = bad
            yield f"{bad} in {key}", save(tensors | {key: poisoned}, told), True
    for name in EVIL_NAMES:
        yield f"named {name!r}", save({name or "x": torch.ones(2)}, told), not student
        yield f"also {name!r}", save(tensors | {name or "x": torch.ones(2)}, told), False


VALUES = (None, True, -1, 1e308, 10**400, "x", "../../evil", [], [[]], {}, {"a": {}}, [None], ["x", 1], float("nan"))


def bent_tables(tree, limit=50):
    """A JSON tree with one value replaced or one key gone, everywhere."""
    places = []

    def walk(node, path):
        places.append(path)
        pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in pairs:
            walk(value, (*path, key))

    walk(tree, ())
    made = [(path, value) for path in places[:60] for value in (*VALUES, ...)]
    for path, value in random.Random(0).sample(made, min(limit, len(made))):
        if path:
            copy = json.loads(json.dumps(tree))
            node = copy
            for key in path[:-1]:
                node = node[key]
            if value is ...:
                del node[path[-1]]
            else:
                node[path[-1]] = value
            yield f"{path}: {value!r}"[:80], copy


def bent_metadata(data, must):
    """Headers' own texts bent: (label, bytes, must be refused)."""
    header, body = split(data)
    told = header.pop("__metadata__", {})
    yield "no metadata", join(header, body), must
    for key, text in told.items():
        for other in ("", "x", "null", "7", "[]", '"x"', "{", "[" * 90_000, "nan", "1e999", "-1"):
            yield f"{key} {other[:9]!r}", join(header | {"__metadata__": told | {key: other}}, body), False
        yield f"no {key}", join(header | {"__metadata__": {k: v for k, v in told.items() if k != key}}, body), False
        if text[:1] in "{[":
            for label, tree in bent_tables(json.loads(text)):
                yield label, join(header | {"__metadata__": told | {key: json.dumps(tree)}}, body), False


def flipped(data, count=60):
    chance = random.Random(0)
    for n in range(count):
        changed = bytearray(data)
        for _ in range(chance.choice((1, 1, 4, 16))):
            changed[chance.randrange(min(len(changed), chance.choice((64, 10**6))))] = chance.randrange(256)
        yield f"flip {n}", bytes(changed)
