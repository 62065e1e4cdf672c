"""Integers of strangers' files, at both ends of 64 bits: refused each by itself, before a sum or product wraps around.

An index beyond a tensor's memory ends the process, so the files are read in a fork of this one.
"""

import ast
import json
import multiprocessing
import traceback

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from vitrine.engine.errors import VitrineError
from vitrine.engine.io.number_checks import LARGEST_INTEGER, integer, integers
from vitrine.engine.io.table_on_disk import RowFile
from vitrine.engine.w2w import BuildConfig, build_space, load_space, write_lora
from vitrine_tests import sources
from vitrine_tests.attacks.test_headers import TENSORS, TEXTS, bent, places
from vitrine_tests.engine.corpus import TENSOR_FILES, TEXT_FILES, join, loras, make_shard, read_shard, split
from vitrine_tests.hangs import HANGS

ENDS = (-(2**63), -1, 2**31, 2**62, 2**63 - 1, 2**64 - 1, 2**64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
ANY_64 = st.one_of(st.sampled_from((0, 1, 2, *ENDS[:-2])), st.integers(-(2**63), 2**63 - 1))


def survives(job, *arguments):
    """Whether a fork of this process comes to the end of a job; a crash is told by its exit code."""

    def run():
        try:
            job(*arguments)
        except BaseException:
            traceback.print_exc()
            raise SystemExit(1) from None

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(HANGS)
    if process.is_alive():
        process.kill()
    return process.exitcode == 0


def attempt(use, path, data):
    """Uses a file that has these bytes; our own errors are what is wanted."""
    path.write_bytes(data)
    try:
        use(path)
    except VitrineError:
        return False
    return True


def make_linked(path):
    folder = path.parent / "loras"
    for i, lora in enumerate(loras()):
        write_lora(folder / f"{i}.safetensors", lora)
    build_space(folder, BuildConfig("delta", linked=True)).space.save(path)


def use_linked(path):
    space = load_space(path)
    space.stacked(torch.ones(space.dimension))


FILES = TENSORS | {
    "shard-000000-0a0b0c0d.safetensors": (make_shard, read_shard),
    "linked.safetensors": (make_linked, use_linked),
}


def leaves(tree):
    """Every place in a header that has an integer."""
    for place in places(tree):
        node = tree
        for step in place:
            node = json.loads(node) if step == "json" else node[step]
        if type(node) is int:
            yield place


def each_end_in_a_header(name, folder):
    make, use = FILES[name]
    make(folder / name)
    header, body = split((folder / name).read_bytes())
    metadata = header["__metadata__"]
    assert attempt(use, folder / name, join(header, body))
    changed = 0
    for place in leaves(metadata):
        for value in ENDS:
            other = bent(metadata, place, value)
            other = {key: text if isinstance(text, str) else json.dumps(text) for key, text in other.items()}
            attempt(use, folder / name, join(header | {"__metadata__": other}, body))
            changed += 1
    assert changed


HAVE_INTEGERS = [name for name in FILES if name != "lora.safetensors"]


@pytest.mark.parametrize("name", HAVE_INTEGERS)
def test_each_end_in_a_header(name, tmp_path):
    assert survives(each_end_in_a_header, name, tmp_path)


def each_end_in_a_json_file(name, folder):
    TEXT_FILES[name][0](folder / name)
    tree = json.loads((folder / name).read_bytes())
    for place in leaves(tree):
        for value in ENDS:
            attempt(USES[name], folder / name, json.dumps(bent(tree, place, value)).encode())


USES = TEXTS | {"adapter_config.json": TEXT_FILES["adapter_config.json"][1]}


@pytest.mark.parametrize("name", USES)
def test_each_end_in_a_json_file(name, tmp_path):
    assert survives(each_end_in_a_json_file, name, tmp_path)


# --- integers in tensors ---------------------------------------------------------------------------------------------
def wrapped(value):
    """As a sum of 64-bit integers comes out."""
    return (value + 2**63) % 2**64 - 2**63


@st.composite
def ranks_with_sum(draw, count, total):
    """Integers of 64 bits whose sum, wrapped around, is ``total``; the first ones are any."""
    first = [draw(ANY_64) for _ in range(count - 1)]
    return [*first, wrapped(total - sum(first))]


def ranks_of_strangers(folder):
    name = "delta.safetensors"
    TENSOR_FILES[name][0](folder / name)
    good = (folder / name).read_bytes()
    tensors, metadata = load(good), split(good)[0]["__metadata__"]
    keys = [key for key in tensors if key.startswith("ranks/")]
    count, total = len(tensors[keys[0]]), int(tensors[keys[0]].sum())

    def use(path):
        space = load_space(path)
        space.stacked(torch.ones(space.dimension)), space.encode_lora(loras(1)[0])

    assert attempt(use, folder / name, good)
    fork = settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))

    @fork
    @given(ranks_with_sum(count, total), st.sampled_from(INTEGERS))
    def any_ranks(values, dtype):
        ranks = torch.tensor(values).to(dtype)
        kept = attempt(use, folder / name, save(tensors | {key: ranks.clone() for key in keys}, metadata))
        assert kept <= (dtype == torch.int32 and min(ranks) >= 0 and int(ranks.sum()) == total)

    for values in ([2**62] * 3 + [2**62 + total], [2**63 - 1, 2**63 - 1, 2, total], [total, 0, -1, 1]):
        any_ranks.hypothesis.inner_test(values, torch.int64)
    any_ranks()


def test_ranks_whose_sum_wraps_around_are_refused(tmp_path):
    """Indices by such ranks are written past their memory."""
    assert survives(ranks_of_strangers, tmp_path)


def rows_of_strangers(folder):
    with RowFile(folder, (4, 3)) as table:
        table.write(0, torch.ones(2, 3))
    note = json.loads((folder / "rows.json").read_text())
    for value in (*ENDS, 1.5, "3", True, None):
        (folder / "rows.json").write_text(json.dumps(note | {"width": value}))
        with pytest.raises(VitrineError, match="columns per block"):
            RowFile(folder, (4, 3))
    (folder / "rows.json").write_text(json.dumps(note))
    (folder / "done.bin").write_bytes(bytes([1, 255, 7, 0]))
    with RowFile(folder, (4, 3)) as table:
        assert table.done.tolist() == [True, False, False, False]


def test_tables_on_disk(tmp_path):
    assert survives(rows_of_strangers, tmp_path)


# --- the one function -------------------------------------------------------------------------------------------------
@settings(deadline=None)
@given(st.one_of(st.integers(), ANY_64, st.booleans(), st.floats(), st.text(max_size=30), st.none()))
def test_an_integer_is_in_its_range_or_refused(value):
    fits = type(value) is int and 2 <= value <= 9
    if fits:
        assert integer(value, "ranks", 2, 9) == value
    else:
        with pytest.raises(VitrineError, match="ranks"):
            integer(value, "ranks", 2, 9)


@settings(deadline=None)
@given(st.lists(ANY_64, max_size=5))
def test_integers_of_a_tensor(values):
    ranks = torch.tensor(values, dtype=torch.int64)
    if all(0 <= value <= LARGEST_INTEGER for value in values):
        assert integers(ranks, "ranks", torch.int64).tolist() == values
    else:
        with pytest.raises(VitrineError, match="ranks"):
            integers(ranks, "ranks", torch.int64)
    for dtype in (torch.int32, torch.float32, torch.bool):
        with pytest.raises(VitrineError, match="int64"):
            integers(ranks, "ranks", dtype)


OF_FILES = {"header", "facts", "table", "metadata", "known", "note", "row"}
NOT_OF_FILES = {("engine/emd/logs.py", "row")}
"""A row of our own log, whose numbers are floats."""


def _root(node):
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        if isinstance(node, ast.Attribute) and node.attr in OF_FILES:
            return node.attr
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_no_reader_converts_integers_itself():
    """``int(header["count"])`` has no bound."""
    unbounded = []
    for path in (path for path in sources.paths("engine") if "int(" in sources.text(path)):
        file = path.relative_to(sources.ROOT).as_posix()
        for node in sources.nodes(path):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "int"):
                continue
            root = _root(node.args[0]) if node.args and isinstance(node.args[0], ast.Subscript) else ""
            if root in OF_FILES and (file, root) not in NOT_OF_FILES:
                unbounded.append(f"{file}:{node.lineno}")
    assert not unbounded
