"""Headers of strangers: each of our formats, with any value anywhere, is refused when read or works in every use."""

import json
import os
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file, save, save_file
from vitrine.engine.activations import Activations
from vitrine.engine.control import (
    ControlEmbedder,
    ControlMetadata,
    ControlSpec,
    GammaConfig,
    PaddingConfig,
    SizeCondition,
    load_control,
    save_control,
    trained_settings,
)
from vitrine.engine.copies.lora_contents import health_of
from vitrine.engine.errors import VitrineError, printable
from vitrine.engine.nemo import NeuronSet
from vitrine.engine.nemo.neuron_statistics import import_official as statistics_of
from vitrine.engine.w2w import (
    LoraLayer,
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
    write_lora,
)
from vitrine.engine.w2w.edit.coefficient_sampling import SampleConfig
from vitrine.engine.w2w.loras.lora_facts import facts_of
from vitrine.engine.w2w.space.official_files import import_official
from vitrine_tests.engine.corpus import TENSOR_FILES, TEXT_FILES, join, loras, split
from vitrine_tests.engine.official_files import official_files
from vitrine_tests.engine.small_loras import Held

MOST = 500 * 2**20
SLOWEST = 2.0
"""Bytes of tensors that a small file may take; the processor's seconds for all its uses, watched in nightly runs."""
RECORD = os.environ.get("VITRINE_HEADERS_RECORD", "")
"""A file that receives name, seconds and bytes of each example."""
NUMBERS = (0, -1, 1, 10**9, 2**63, 10**400, 1e308, 3e38, -0.0, float("nan"), float("inf"), 1e-320)
TEXTUAL = ("", "x", "nan", "a\x1b[2J", "\u202e", "../../x", "C:\\x", "\\\\host\\x", "9" * 5000)
OTHERS = (None, True, [], {}, [[]], [1], {"a": 1})
VALUES = st.one_of(
    st.sampled_from((*NUMBERS, *TEXTUAL, *OTHERS)),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.floats(), max_size=4),
)


# --- good files with everything that a header can hold -----------------------------------------------
def rich(path):
    """A space with a map, sliders of every kind, its own sampling, and text beside it."""
    TENSOR_FILES[path.name][0](path)
    space = load_space(path)
    k = space.dimension
    space = with_directions(space, {"beard": torch.ones(k), "hat": -torch.ones(k)})
    space = with_pair_slider(space, "smile", torch.full((k,), 0.5))
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
    preset, tensors = TENSOR_FILES[path.name][1](path)
    assert preset.from_metadata(preset.to_metadata()) == preset and tensors
    torch.zeros(1, *preset.shape)


def use_calibration(path):
    made = TENSOR_FILES[path.name][1](path)
    statistics = made.known("statistics")
    assert made.text()
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


def make_told(path):
    """A LoRA with what kohya's scripts say of a training."""
    folder = "10_a person"
    told = {
        "ss_network_module": "networks.lora",
        "ss_steps": "1200",
        "ss_learning_rate": "1e-4",
        "trigger_word": "None",
        "modelspec.license": "CC",
        "ss_dataset_dirs": json.dumps({folder: {"n_repeats": 10, "img_count": 5}}),
        "ss_tag_frequency": json.dumps({folder: {"a person": 5, "a hat": 2}}),
    }
    save_file(load_file(write_lora(path, loras(1)[0])), path, told)


def use_told(path):
    facts = facts_of(path)
    assert printable(text := json.dumps(facts.to_dict(), allow_nan=False)) == text
    if facts.file is not None:
        health_of(facts.file)


def make_control(path):
    torch.manual_seed(0)
    spec = ControlSpec()
    about = ControlMetadata(
        "PixArtTransformer2DModel", 16, gamma=GammaConfig(alpha=3.0), padding=PaddingConfig(), steps=5
    )
    extra = {"lora.x.lora_A.weight": torch.ones(2, 3)}
    save_control(path, ControlEmbedder(spec, 16).state_dict(), about, extra)


def use_control(path):
    embedder, metadata, extra = load_control(path)
    u = torch.tensor([0.2], dtype=torch.float64)
    rows = embedder.spec.rows(SizeCondition().controls((64, 64), embedder.spec))
    with torch.no_grad():
        assert torch.isfinite(embedder(rows, u, metadata.gamma)).all()
    trained_settings(metadata)
    save_control(path.with_name("again.safetensors"), embedder.state_dict(), metadata, extra)


TENSORS = {
    "control.safetensors": (make_control, use_control),
    "factors.safetensors": (rich, use_space),
    "delta.safetensors": (rich, use_space),
    "model.w2wmodel.safetensors": (make_model, use_model),
    "taps.safetensors": (TENSOR_FILES["taps.safetensors"][0], use_taps),
    "student.safetensors": (TENSOR_FILES["student.safetensors"][0], use_student),
    "calibration.safetensors": (TENSOR_FILES["calibration.safetensors"][0], use_calibration),
    "lora.safetensors": (TENSOR_FILES["lora.safetensors"][0], use_lora),
    "told.safetensors": (make_told, use_told),
    "filter.safetensors": TENSOR_FILES["filter.safetensors"][:2],
}
TEXTS = {
    "preset.json": use_preset,
    "neurons.json": use_neurons,
    "train.json": TEXT_FILES["train.json"][1],
}


# --- bending them -------------------------------------------------------------------------------------
def places(node, path=()):
    """Every place in a tree of JSON, also within texts that are JSON themselves."""
    yield path
    if isinstance(node, str) and node[:1] in ("{", "["):
        try:
            inner = json.loads(node)
        except ValueError:
            return  # an odd text that was put there
        yield from places(inner, (*path, "json"))
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
    began = time.process_time()
    try:
        with Held() as held:
            use(path)
    except VitrineError as error:
        assert "\x1b" not in str(error) and "\u202e" not in str(error)
    seconds = time.process_time() - began
    assert held.most <= MOST
    assert seconds <= SLOWEST or EXAMPLES <= 25, f"{path.name} took {seconds:.1f} s"
    if RECORD:
        with open(RECORD, "a") as record:
            record.write(f"{path.name}\t{seconds:.4f}\t{held.most}\n")


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


EXAMPLES = int(os.environ.get("VITRINE_HEADERS", 15))
"""Of each test; the nightly piece "hostile headers" has more."""
QUICK = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


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


# --- published files, which are archives of torch.save ---------------------------------------------------------------
OFFICIAL = ("mean.pt", "std.pt", "V.pt", "weight_dimensions.pt", "proj_1000pc.pt")


@pytest.fixture(scope="module")
def official(good, tmp_path_factory):
    folder = tmp_path_factory.mktemp("official")
    (folder / "factors.safetensors").write_bytes(good["factors.safetensors"])
    official_files(load_space(folder / "factors.safetensors"), folder, 0)
    import_official(folder)
    torch.save([[torch.rand(6) for _ in range(3)] for _ in range(2)], folder / "statistics.pt")
    statistics_of(folder / "statistics.pt", list("abc"))
    return {name: torch.load(folder / name, weights_only=True) for name in (*OFFICIAL, "statistics.pt")}


def grown(data, content):
    """The content of a file with one value in another's place, or a tensor of other numbers."""
    if isinstance(content, torch.Tensor):
        kind = data.draw(st.sampled_from(("fill", "shape", "dtype", "value")))
        if kind == "fill":
            return torch.full_like(content, data.draw(st.sampled_from((0.0, -1.0, 3e38, float("nan"), float("inf")))))
        if kind == "shape":
            return torch.ones(data.draw(st.lists(st.integers(0, 5), max_size=3)))
        if kind == "dtype":
            return content.to(data.draw(st.sampled_from((torch.int64, torch.bool, torch.float16, torch.complex64))))
    if isinstance(content, (list, dict)) and content and data.draw(st.integers(0, 9)):
        copy = type(content)(content)
        key = data.draw(st.sampled_from(list(content) if isinstance(content, dict) else range(len(content))))
        copy[key] = grown(data, content[key])
        return copy
    return data.draw(VALUES)


def use_official(path):
    if path.name == "statistics.pt":
        found = statistics_of(path, list("abc"))
        assert all(torch.isfinite(found.z(a, torch.zeros(1, len(m)))).all() for a, m in found.means.items())
        return
    space = import_official(path.parent)
    rows = sample(space, [0])
    contents(space), described(space, rows)
    assert all(torch.isfinite(layer.delta()).all() for layer in materialise(space, rows[0]).values())
    space.save(path.with_name("space.safetensors"))


@pytest.mark.parametrize("name", [*OFFICIAL, "statistics.pt"])
@QUICK
@given(data=st.data())
def test_any_value_in_a_published_file(name, official, tmp_path, data):
    for each, content in official.items():
        torch.save(grown(data, content) if each == name else content, tmp_path / each)
    survives(use_official, tmp_path / name)
