"""Headers of strangers: each of our formats, with any value anywhere, is refused when read or works in every use."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from vitrine.engine.activations import Activations
from vitrine.engine.errors import VitrineError, printable
from vitrine.engine.nemo import NeuronSet
from vitrine.engine.w2w import (
    EditConfig,
    LoraLayer,
    StrengthMap,
    W2WModel,
    at_place,
    contents,
    described,
    edit,
    encode,
    load_space,
    map_of,
    mapped,
    materialise,
    member,
    member_names,
    neighbours_of,
    sample,
    with_directions,
    with_pair_slider,
    with_sampling,
    with_strength_maps,
    write_lora,
)
from vitrine.engine.w2w.edit.coefficient_sampling import SampleConfig
from vitrine_tests.engine.corpus import TENSOR_FILES, TEXT_FILES, join, loras, split
from vitrine_tests.engine.small_loras import Held

MOST = 500 * 2**20
"""Bytes of tensors that a small file may take."""
NUMBERS = (0, -1, 1, 10**9, 2**63, 10**400, 1e308, 3e38, -0.0, float("nan"), float("inf"), 1e-320)
TEXTUAL = ("", "x", "nan", "a\x1b[2J", "\u202e", "../../x", "C:\\x", "\\\\host\\x", "9" * 5000)
OTHERS = (None, True, [], {}, [[]], [1], {"a": 1})
VALUES = st.one_of(
    st.sampled_from((*NUMBERS, *TEXTUAL, *OTHERS)), st.integers(), st.floats(), st.text(max_size=8),
    st.lists(st.floats(), max_size=4),
)  # fmt: skip


# --- good files with everything that a header can hold -----------------------------------------------
def rich(path):
    """A space with a map, sliders of every kind, its own sampling, and text beside it."""
    TENSOR_FILES[path.name][0](path)
    space = load_space(path)
    k = space.dimension
    space = with_directions(space, {"beard": torch.ones(k), "hat": -torch.ones(k)})
    space = with_pair_slider(space, "smile", torch.full((k,), 0.5))
    space = with_strength_maps(space, {"beard": StrengthMap((0.0, 1.0, 2.0), 700.0)})
    space = mapped(with_sampling(space, SampleConfig(inherit=0.4)), {"age": torch.arange(4.0)})
    info = {**space.info, "retired": ["hat"], "note": "a\nb", "centre": [0.0] * k, "gauge": {"cosine": 1.0}}
    type(space)(**{**space.__dict__, "info": info}).save(path)


def use_space(path):
    space = load_space(path)
    rows = sample(space, [0, 1])
    other = sample(space, [2], SampleConfig(components=1, attributes="gaussian"))
    texts = [contents(space), described(space, rows), *member_names(space)]
    for label in space.directions:
        rows = torch.cat([rows, edit(space, other, {label: 1.0})])
    if "beard" in space.info.get("strength_maps", {}) and "beard" in space.directions:
        rows = torch.cat([rows, edit(space, other, {"beard": 0.5}, EditConfig(calibrated=True))])
    model = W2WModel(rows, space.identity)
    for row in model.coefficients:
        lora = materialise(space, row)
        assert all(torch.isfinite(layer.delta()).all() for layer in lora.values())
    materialise(space, rows[0], 1)
    drawn = map_of(space)
    assert torch.isfinite(drawn.coordinates).all()
    at_place(space, drawn, rows[0], (0.1, 0.2))
    neighbours_of(space, 2)
    texts += [encode(space, loras(1)[0]).summary(space), member(space, member_names(space)[0]).summary(space)]
    assert all(printable(line) == line for text in texts for line in text.split("\n"))
    write_lora(path.with_name("out.safetensors"), lora)
    mapped(space).save(path.with_name("again.safetensors"))
    load_space(path.with_name("again.safetensors"))


def make_model(path):
    steps = ({"sample": {"seed": 1}}, {"edit": {"beard": 1.0}, "start": 700.0})
    W2WModel(torch.randn(2, 3), "abc", steps).save(path)


def use_model(path):
    model = W2WModel.load(path)
    assert -1 <= model.start <= 1000 and torch.isfinite(model.coefficients).all() and len(model)
    model[0].moved_to(model.coefficients[:1], edit={}).save(path.with_name("again.w2wmodel.safetensors"))


def use_taps(path):
    taps = Activations.load(path)
    repr(taps), taps.concat((4, 4)), taps.row(0), taps.select("*"), taps.save(path.with_name("again.safetensors"))


def use_student(path):
    contract, tensors = TENSOR_FILES[path.name][1](path)
    assert contract.from_metadata(contract.to_metadata()) == contract and tensors
    torch.zeros(1, *contract.shape)


def use_statistics(path):
    statistics = TENSOR_FILES[path.name][1](path)
    for address, mean in statistics.means.items():
        assert torch.isfinite(statistics.z(address, torch.zeros(1, len(mean)))).all()


def use_preset(path):
    preset = TEXT_FILES[path.name][1](path)
    assert len(preset.preset.config().seeds) <= 1000
    preset.save(path.with_name("again.json"))


def use_neurons(path):
    neurons = TEXT_FILES[path.name][1](path)
    repr(neurons.merged(NeuronSet({"a": (1,)}, neurons.fingerprint))), len(neurons)
    neurons.save(path.with_name("again.json"))


def use_lora(path):
    layers = TENSOR_FILES[path.name][1](path)
    assert all(torch.isfinite(LoraLayer(v.down, v.up, v.alpha).delta()).all() for v in layers.values())


TENSORS = {
    "factors.safetensors": (rich, use_space), "delta.safetensors": (rich, use_space),
    "model.w2wmodel.safetensors": (make_model, use_model),
    "taps.safetensors": (TENSOR_FILES["taps.safetensors"][0], use_taps),
    "student.safetensors": (TENSOR_FILES["student.safetensors"][0], use_student),
    "statistics.safetensors": (TENSOR_FILES["statistics.safetensors"][0], use_statistics),
    "lora.safetensors": (TENSOR_FILES["lora.safetensors"][0], use_lora),
}  # fmt: skip
TEXTS = {
    "preset.json": use_preset, "neurons.json": use_neurons,
    **{name: (lambda path, name=name: TEXT_FILES[name][1](path))
       for name in ("threshold.json", "filter.json", "train.json")},
}  # fmt: skip


# --- bending them -------------------------------------------------------------------------------------
def places(node, path=()):
    """Every place in a tree of JSON, also within texts that are JSON themselves."""
    yield path
    if isinstance(node, str) and node[:1] in ("{", "["):
        yield from places(json.loads(node), (*path, "json"))
    elif isinstance(node, (dict, list)):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from places(value, (*path, key))


def bent(node, path, value):
    """The tree with another value at a place."""
    if not path:
        return value
    if isinstance(node, str):
        return json.dumps(bent(json.loads(node), path[1:], value))
    copy = dict(node) if isinstance(node, dict) else list(node)
    copy[path[0]] = bent(node[path[0]], path[1:], value)
    return copy


def survives(use, path):
    """Nothing but our own errors, and little memory."""
    try:
        with Held() as held:
            use(path)
    except VitrineError as error:
        assert "\x1b" not in str(error) and "\u202e" not in str(error)
    assert held.most <= MOST


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Name -> the bytes of a good file."""
    folder = tmp_path_factory.mktemp("good")
    for name, (make, use) in TENSORS.items():
        make(folder / name)
        use(folder / name)
    for name in TEXTS:
        TEXT_FILES[name][0](folder / name)
        TEXTS[name](folder / name)
    return {name: (folder / name).read_bytes() for name in (*TENSORS, *TEXTS)}


QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("name", TENSORS)
@QUICK
@given(data=st.data())
def test_any_value_in_a_header(name, good, tmp_path, data):
    header, body = split(good[name])
    metadata = header.get("__metadata__", {})
    for _ in range(data.draw(st.integers(1, 2))):
        where = data.draw(st.sampled_from([p for p in places(metadata) if p] or [("note",)]))
        value = data.draw(VALUES)
        try:
            metadata = bent(metadata, where, value)
        except (KeyError, IndexError, TypeError, ValueError):
            break  # the first value took the place of the second
    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
    (tmp_path / name).write_bytes(join(header | {"__metadata__": metadata}, body))
    survives(TENSORS[name][1], tmp_path / name)


@pytest.mark.parametrize("name", TENSORS)
@QUICK
@given(data=st.data())
def test_any_numbers_in_the_tensors(name, good, tmp_path, data):
    tensors, metadata = load(good[name]), split(good[name])[0].get("__metadata__")
    key = data.draw(st.sampled_from(sorted(tensors)))
    kind = data.draw(st.sampled_from(("scaled", "shape", "dtype", "all")))
    tensor = tensors[key]
    if kind == "scaled":
        tensor = (tensor.double() * data.draw(st.sampled_from((0, -1, 1e9, 3e38, 1e-45)))).to(tensor.dtype)
    elif kind == "all":
        whole, broken = (0, -1, 2**30), (float("nan"), float("inf"), 1e30)
        tensor = torch.full_like(tensor, data.draw(st.sampled_from(whole + broken * tensor.is_floating_point())))
    elif kind == "dtype":
        dtypes = torch.int64, torch.bool, torch.float16, torch.float64, torch.float8_e4m3fn
        tensor = tensor.to(data.draw(st.sampled_from(dtypes)))
    else:
        tensor = torch.ones(data.draw(st.lists(st.integers(0, 5), max_size=4)), dtype=tensor.dtype)
    (tmp_path / name).write_bytes(save(tensors | {key: tensor.contiguous()}, metadata))
    survives(TENSORS[name][1], tmp_path / name)


@pytest.mark.parametrize("name", TEXTS)
@QUICK
@given(data=st.data())
def test_any_value_in_a_json_file(name, good, tmp_path, data):
    tree = json.loads(good[name])
    tree = bent(tree, data.draw(st.sampled_from(list(places(tree)))), data.draw(VALUES))
    (tmp_path / name).write_text(json.dumps(tree))
    survives(TEXTS[name], tmp_path / name)
