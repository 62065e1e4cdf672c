"""Every file reader against broken, hostile and random files: an error that names the file, and nothing else.

What is broken must be refused; what is bent may be read where nothing that matters was hit, but must never fail in
another way. Pickles make a folder when they are unpickled.
"""

import csv
import io
import json
import pickle

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from vitrine.engine.activations import TapConfig
from vitrine.engine.activations.ranked_pictures import _read_mask
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo.neuron_statistics import import_official
from vitrine.engine.nemo.neurons import NeuronSet, import_csv
from vitrine.engine.portraits.shipped import student_file
from vitrine.engine.w2w.loras.lora_files import read_header
from vitrine.engine.w2w.loras.lora_folders import scan_folder
from vitrine_tests.engine.corpus import (
    EVIL_NAMES,
    PLACES,
    TENSOR_FILES,
    TEXT_FILES,
    Bomb,
    bent_headers,
    bent_metadata,
    bent_tables,
    cut,
    flipped,
    hostile,
    lora_tensors,
    make_shard,
    other_tensors,
    read_shard,
)

STATES = ("filter", "scores")
"""States of a ranking's parts, see :class:`~vitrine.engine.jobs.run.Run`."""


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
        check(read, path, label, data, must and not name.startswith(STATES))  # their facts alone are read
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
    if not name.startswith(("shard", "adapter", *STATES)):  # those are read where they exist
        with pytest.raises(VitrineError, match=name.split(".")[0]):
            read(path)
    if not name.startswith(("adapter", *STATES)):
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
    assert all(name in report.summary() for name in bad)


def test_pickled_loras_are_not_opened(place):
    for suffix in (".pt", ".bin", ".ckpt"):
        path = place / f"lora{suffix}"
        torch.save({"lora": Bomb(marker_of(place))}, path)
        with pytest.raises(VitrineError, match="pickles are not read"):
            read_header(path)


def test_masks(place):
    import numpy as np

    Image.new("L", (4, 4)).save(place / "picture.png")

    def read(file):
        return _read_mask(file, place / "picture.png")

    path = place / "mask.npy"
    np.save(path, np.zeros((4, 4), np.int64))
    good = path.read_bytes()
    np.save(path, np.array([Bomb(marker_of(place))], object), allow_pickle=True)
    for label, data in [("objects", path.read_bytes()), *hostile(marker_of(place)), *cut(good)]:
        check(read, path, label, data, True)
    for label, data in hostile(marker_of(place)):
        check(read, place / "mask.png", label, data, True)


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
