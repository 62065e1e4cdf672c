"""Every file reader against broken, hostile and random files: an error that names the file, and nothing else.

The corpus is made here from good files, so it follows the formats. ``broken`` must be refused; ``bent`` may be read
where nothing that matters was hit, but must never fail in another way. Pickles make a folder when they are unpickled.
"""

import csv
import io
import json
import os
import pickle
import random
import zipfile

import pytest
import torch
from safetensors.torch import load, save, save_file
from vitrine.engine.activations import Activations, TapConfig, TapInfo
from vitrine.engine.activations import filter as qualitative
from vitrine.engine.activations import greedy_search as comparison
from vitrine.engine.activations.labelled import _read_mask
from vitrine.engine.activations.preset_files import FeaturePreset
from vitrine.engine.activations.presets import Preset
from vitrine.engine.activations.writer import ActivationReader, ActivationWriter
from vitrine.engine.cli import emd as emd_cli
from vitrine.engine.cli import nemo as nemo_cli
from vitrine.engine.emd.contract import StudentContract, read_student
from vitrine.engine.errors import VitrineError
from vitrine.engine.hooks import Activation
from vitrine.engine.nemo.neurons import NeuronSet, import_csv
from vitrine.engine.nemo.statistics import NeuronStatistics, import_official
from vitrine.engine.portraits.shipped import student_file
from vitrine.engine.w2w.build import load_space
from vitrine.engine.w2w.delta import DeltaSpace
from vitrine.engine.w2w.lora_files import read_header, read_lora, scan_folder
from vitrine.engine.w2w.manifest import LoraLayer, Manifest
from vitrine.engine.w2w.space import WeightSpace

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
        {f"block.{i}.to_q": LoraLayer(torch.randn(2, 5, generator=gen), torch.randn(7, 2, generator=gen), 2.0)
         for i in range(2)} for _ in range(count)
    ]  # fmt: skip


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
    save_file(tensors, path, StudentContract("portraits", shape=(4, 16, 16)).to_metadata())


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


def statistics(path):
    rows = {a: torch.rand(6) + 0.1 for a in PLACES}
    NeuronStatistics(rows, {a: v.clone() for a, v in rows.items()}, 10, "model").save(path)


# file name -> (make, read, whether the header must be ours)
TENSOR_FILES = {
    "taps.safetensors": (lambda p: taps().save(p), Activations.load, True),
    "shard-000000-0a0b0c0d.safetensors": (make_shard, read_shard, True),
    "statistics.safetensors": (statistics, NeuronStatistics.load, True),
    "student.safetensors": (make_student, read_student, True),
    "factors.safetensors": (make_factors, load_space, True),
    "delta.safetensors": (lambda p: DeltaSpace.of(loras(), tuple("abcd")).save(p), load_space, True),
    "lora.safetensors": (lambda p: save_file(lora_tensors(), p), read_lora, False),
}
GOOD_PRESET = Preset("mine", PLACES, 50.0, "portraits", 64, "ranked")
TEXT_FILES = {
    "preset.json": (lambda p: FeaturePreset(GOOD_PRESET, "model", {"rule": 1}).save(p), FeaturePreset.load, True),
    "neurons.json": (
        lambda p: NeuronSet({PLACES[0]: (1, 5), PLACES[1]: (3,)}, "model", {"tau": 0.4}).save(p), NeuronSet.load, True,
    ),
    "threshold.json": (
        lambda p: p.write_text(json.dumps({"tau": 0.4, "scope": "all", "probe": {"seeds": 4}})), nemo_cli._threshold,
        True,
    ),
    "train.json": (lambda p: p.write_text(json.dumps({"train": {"steps": 4}})), emd_cli._read, False),
    "adapter_config.json": (make_adapter, lambda p: read_lora(p.with_name("adapter_model.safetensors")), False),
    "filter.json": (
        lambda p: p.write_text(json.dumps({"properties": {"a": {"noise": 1, "granularity": 1, "locality": 0.1}}})),
        qualitative._load, True,
    ),
    "scores.json": (lambda p: p.write_text(json.dumps({"a b": 0.5})), comparison._Memory, False),
}  # fmt: skip


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


# --- reading them -------------------------------------------------------------------------------------------------
def check(read, path, label, data, must):
    """One file: read, or refused by an error that names it."""
    path.write_bytes(data)
    try:
        read(path)
    except VitrineError as error:
        assert path.name in str(error), f"{label}: {error}"
    except BaseException as error:
        raise AssertionError(f"{label}: {type(error).__name__}: {error}") from error
    else:
        assert not must, f"{label} was read"


@pytest.fixture
def place(tmp_path):
    """A folder to work in; afterwards nothing has been unpickled, and nothing was written elsewhere."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    yield inner
    assert not (tmp_path / "unpickled").exists(), "a pickle was run"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"] and list((tmp_path / "a").iterdir()) == [inner]


def marker_of(place):
    return place.parents[1] / "unpickled"


@pytest.mark.parametrize("name", TENSOR_FILES)
def test_tensor_files(name, place):
    make, read, ours = TENSOR_FILES[name]
    path = place / name
    make(path)
    good = path.read_bytes()
    read(path)
    for label, data in [*hostile(marker_of(place)), *cut(good), *bent_headers(good, name)]:
        check(read, path, label, data, True)
    for label, data, must in [*other_tensors(good, ours), *bent_metadata(good, ours)]:
        check(read, path, label, data, must)
    for label, data in flipped(good):
        check(read, path, label, data, False)
    path.write_bytes(good)
    read(path)


@pytest.mark.parametrize("name", TEXT_FILES)
def test_json_files(name, place):
    make, read, ours = TEXT_FILES[name]
    path = place / name
    make(path)
    good = path.read_bytes()
    read(path)
    shapes = (b"null", b"[]", b"7", b'"x"', b"[" * 90_000, b"{" * 300, b'{"a":' * 90_000, b"\xff\xfe{}", b"{} x")
    for label, data in [*hostile(marker_of(place)), *cut(good), *((repr(s[:9]), s) for s in shapes)]:
        check(read, path, label, data, True)
    tree = json.loads(good)
    for key in tree:
        check(read, path, f"no {key}", json.dumps({k: v for k, v in tree.items() if k != key}).encode(), ours)
    for label, bent in bent_tables(tree, 200):
        check(read, path, label, json.dumps(bent).encode(), False)
    for label, data in flipped(good):
        check(read, path, label, data, False)


@pytest.mark.parametrize("name", [*TENSOR_FILES, *TEXT_FILES])
def test_missing_files_and_folders_in_their_place(name, place):
    make, read, _ = (TENSOR_FILES | TEXT_FILES)[name]
    path = place / name
    if not name.startswith(("shard", "adapter", "filter", "scores")):  # those are read where they exist
        with pytest.raises(VitrineError, match=name.split(".")[0]):
            read(path)
    if not name.startswith(("adapter", "filter", "scores")):
        path.mkdir()
        with pytest.raises(VitrineError, match=name.split(".")[0]):
            read(path)


def test_wrong_kinds_are_refused_by_name(place):
    """Each reader on each other's good files."""
    for name, (make, _, _) in TENSOR_FILES.items():
        (place / name).parent.mkdir(exist_ok=True)
        make(place / name)
    (place / "index.json").unlink(missing_ok=True)
    for name, (_, read, ours) in TENSOR_FILES.items():
        for other in set(TENSOR_FILES) - {name}:
            same = {name, other} <= {"factors.safetensors", "delta.safetensors"}
            if ours and not same and not name.startswith("shard"):
                with pytest.raises(VitrineError, match=other.split(".")[0]):
                    read(place / other)


def test_numbers_in_neuron_lists_are_whole(place):
    path = place / "neurons.json"
    for bad in ("123", [1.5], [True], [float("nan")], [-1], ["1"], [[1]], {"1": 2}):
        NeuronSet({PLACES[0]: (1,)}, "", {}).save(path)
        tree = json.loads(path.read_text()) | {"neurons": {PLACES[0]: bad}}
        check(NeuronSet.load, path, repr(bad), json.dumps(tree).encode(), True)


def test_neuron_csv(place):
    path = place / "neurons.csv"

    def read(file):
        return import_csv(file, list(PLACES))

    def table(cell, head="refined neurons"):
        text = io.StringIO()
        csv.writer(text, delimiter=";").writerows([["prompt", head], ["a cat", cell]])
        return text.getvalue().encode()

    path.write_bytes(table("[[1, 2], []]"))
    assert read(path)[0][1].neurons == {PLACES[0]: (1, 2)}
    evil = f"__import__('os').mkdir({str(marker_of(place))!r})"
    cells = (evil, f"[[{evil}], []]", "[" * 5000, "[[1], [2]", "7", "None", "[1, 2]", "[['a'], []]", "[[1.5], []]",
             "[[True], []]", "[[-1], []]", "[[1]]", "", "'[[1], [2]]'", "{1: 2}", "[[1], [2]] + x",
             "(" * 300)  # fmt: skip
    broken = [*hostile(marker_of(place)), *((c[:30], table(c)) for c in cells), ("other head", table("[[1], []]", "x"))]
    broken += [("short row", b"prompt;refined neurons\na cat\n"), ("NUL", b"prompt;refined neurons\na\x00;[[1],[]]\n")]
    broken += [("huge cell", b"prompt;refined neurons\na;" + b"x" * 200_000)]
    for label, data in broken:
        check(read, path, label, data, label != "NUL")  # Python 3.11 reads NUL, 3.10 does not
    for missing in (place / "none.csv", place):
        with pytest.raises(VitrineError, match=missing.name):
            read(missing)


def test_official_statistics(place):
    path = place / "official.pt"

    def read(file):
        return import_official(file, list(PLACES))

    rows = [torch.ones(3), torch.ones(4)]
    torch.save((rows, rows), path)
    assert set(read(path).means) == set(PLACES)
    good = path.read_bytes()
    others = ((rows, rows[:1]), (rows,), rows[0], 7, None, (1, 2), ({}, {}), ("ab", "cd"), ([1, 2], [3, 4]),
              (rows, rows[::-1]), ([r[None] for r in rows], rows), (rows, [r * float("nan") for r in rows]),
              {"a": rows, "b": rows})  # fmt: skip
    for n, other in enumerate(others):
        torch.save(other, path)
        check(read, path, f"object {n}", path.read_bytes(), True)
    for label, data in [*hostile(marker_of(place)), *cut(good)]:
        check(read, path, label, data, True)
    for label, data in flipped(good, 60):
        check(read, path, label, data, False)


def test_folders_of_loras_name_the_bad_ones(place):
    for n in (1, 2):
        save_file(lora_tensors(n), place / f"good{n}.safetensors")
    bad = {f"bad{n}.safetensors": data for n, (_, data) in enumerate(hostile(marker_of(place)))}
    bad |= {"pickle.pt": pickle.dumps(Bomb(marker_of(place))), "dora.bin": b"x"}
    for name, data in bad.items():
        (place / name).write_bytes(data)
    report = scan_folder(place)
    assert [f.name for f in report.good] == ["good1", "good2"] and {b.name for b in report.bad} == set(bad)
    assert all(name in report.text() for name in bad)


def test_pickled_loras_are_not_opened(place):
    for suffix in (".pt", ".bin", ".ckpt"):
        path = place / f"lora{suffix}"
        torch.save({"lora": Bomb(marker_of(place))}, path)
        with pytest.raises(VitrineError, match="pickles are not read"):
            read_header(path)


def test_masks(place):
    import numpy as np

    path = place / "mask.npy"
    np.save(path, np.zeros((4, 4), np.int64))
    good = path.read_bytes()
    np.save(path, np.array([Bomb(marker_of(place))], object), allow_pickle=True)
    for label, data in [("objects", path.read_bytes()), *hostile(marker_of(place)), *cut(good)]:
        check(_read_mask, path, label, data, True)
    for label, data in hostile(marker_of(place)):
        check(_read_mask, place / "mask.png", label, data, True)


def test_an_index_that_lies_is_repaired_or_refused(place):
    name = "shard-000000-0a0b0c0d.safetensors"
    make_shard(place / name)
    index = {"kind": "vitrine.activations.index", "version": 1, "config": TapConfig(PLACES).to_dict()}
    index["shards"] = {name: ["a"]}
    for label, tree in [*bent_tables(index, 150), ("other key", index | {"shards": {name: ["b"]}})]:
        (place / "index.json").write_text(json.dumps(tree))
        try:
            items = read_shard(place / name)[0]
        except VitrineError as error:
            assert any(n in str(error) for n in (name, "index.json", place.name)), label
        else:
            assert len(items) in (0, 1), label


@pytest.mark.parametrize("name", EVIL_NAMES)
def test_names_are_no_paths(name):
    with pytest.raises(VitrineError, match="student"):
        student_file(name)
