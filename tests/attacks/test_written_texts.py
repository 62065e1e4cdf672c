"""What a reader refuses, a writer refuses too, before it touches a file: hostile texts in every artefact."""

import json
from dataclasses import replace

import pytest
import torch
from vitrine.cli.w2w_commands import Label
from vitrine.engine.activations import Activations, TapConfig, TapInfo
from vitrine.engine.activations.presets import FeaturePreset
from vitrine.engine.activations.writer import ActivationReader, ActivationWriter
from vitrine.engine.control import ControlEmbedder, ControlMetadata, ControlSpec, load_control, save_control
from vitrine.engine.errors import VitrineError
from vitrine.engine.io import files
from vitrine.engine.nemo import Calibration, FewStepConfig, NeuronSet, SampleThreshold
from vitrine.engine.nemo.neuron_statistics import NeuronStatistics
from vitrine.engine.tracing.hooks import Activation
from vitrine.engine.w2w import BuildConfig, W2WModel, build_space, load_space, with_directions, with_map, write_lora
from vitrine.engine.w2w.space.map_layout import map_of
from vitrine_tests.engine.corpus import GOOD_PRESET, PLACES, TENSOR_FILES, loras, taps

HOSTILE = {
    "turned": "beard\u202e",
    "long": "x" * 5000,
    "escape": "a\x1b[2Jb",
    "null": "a\x00b",
    "half": "a\ud800b",
    "line": "a\nb",
    "empty": "",
    "slash": "../a",
    "quote": '"}',
    "plain": "beard",
    "word": "胡须",
}


def a_space(name, folder):
    TENSOR_FILES[name][0](folder / name)
    return load_space(folder / name)


def spaces(change):
    """Saving a space of each mode, changed by a text."""

    def save_of(name):
        return lambda text, path: change(a_space(name, path.parent), text).save(path)

    return {"factors": save_of("factors.safetensors"), "delta": save_of("delta.safetensors")}


def by_label(space, label):
    return with_directions(space, {label: torch.ones(space.dimension)})


def by_name(space, name):
    return replace(space, names=(name, *"bcd"))


def by_info(space, text):
    return replace(space, info={**space.info, "note": text, "base": text})


def by_map(space, label):
    return with_map(space, map_of(space), {label: torch.arange(4.0)})


def model(text, path):
    return W2WModel(torch.ones(1, 3), text, ({"edit": {text: 1.0}},)).save(path)


def linked(text, path):
    folder = path.parent / "loras"
    for i, lora in enumerate(loras()):
        write_lora(folder / f"{text.replace('/', '_')}{i}.safetensors", lora)
    return build_space(folder, BuildConfig("delta", linked=True)).space.save(path)


def tapped(text, path):
    items = {text: replace(taps()[PLACES[0]], address=text)}
    return Activations(items, TapInfo(50.0, 1.0, (0,), (text, "b"))).save(path)


def shard(text, path):
    with ActivationWriter(path.parent, TapConfig(PLACES)) as writer:
        writer.add(text, Activations({PLACES[0]: Activation(PLACES[0], torch.ones(1, 2, 3))}, TapInfo(prompts=(text,))))
    return next(path.parent.glob("shard-*"))


def shard_of(path):
    reader = ActivationReader(path.parent)
    return {key: reader[key] for key in reader}


def statistics(text, path):
    rows = {text: torch.ones(3)}
    return Calibration(NeuronStatistics(rows, rows, 10, "model")).save(path)


def control(text, path):
    metadata = ControlMetadata("DiTTransformer2DModel", 16, base_model=text, licence=text)
    return save_control(path, ControlEmbedder(ControlSpec(), 16).state_dict(), metadata)


WRITERS = {
    **{
        f"{mode} {kind}": (save, load_space)
        for kind, change in (("label", by_label), ("name", by_name), ("info", by_info), ("map", by_map))
        for mode, save in spaces(change).items()
    },
    "linked": (linked, load_space),
    "model": (model, W2WModel.load),
    "taps": (tapped, Activations.load),
    "shard": (shard, shard_of),
    "statistics": (statistics, Calibration.load),
    "neurons": (lambda text, path: NeuronSet({text: (1,)}, "model", {text: text}).save(path), NeuronSet.load),
    "preset": (
        lambda text, path: FeaturePreset(replace(GOOD_PRESET, name=text, note=text), "m", {text: 1}).save(path),
        FeaturePreset.load,
    ),
    "control": (control, load_control),
}


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("name", WRITERS)
def test_a_text_is_refused_before_the_file_is_touched_or_comes_back(name, text, tmp_path):
    save, load = WRITERS[name]
    path = tmp_path / ("a.json" if name in ("neurons", "preset") else "a.w2w.safetensors")
    path.write_bytes(b"before")
    try:
        written = save(HOSTILE[text], path)
    except (VitrineError, ValueError, OSError):  # no file can have the name of some LoRAs
        assert path.read_bytes() == b"before" and text not in ("plain", "word")
        return
    again = load(written)
    fresh = tmp_path / "again"
    if hasattr(again, "save"):
        fresh = again.save(fresh.with_suffix("".join(path.suffixes)))
        if name != "linked":
            assert fresh.read_bytes() == written.read_bytes()
    else:
        assert again


NAN = float("nan")
NUMBERS = {
    "factors": lambda path: replace(a_space("factors.safetensors", path.parent), total_variance=NAN).save(path),
    "delta": lambda path: replace(a_space("delta.safetensors", path.parent), total_variance=NAN).save(path),
    "half precision": lambda path: replace(
        space := a_space("factors.safetensors", path.parent), components=space.components * 1e6
    ).save(path, "float16"),
    "model": lambda path: W2WModel(torch.full((1, 3), 1e12), "abc").save(path),
    "taps": lambda path: Activations({"a": Activation("a", torch.full((1, 2, 3), NAN))}).save(path),
    "statistics": lambda path: Calibration(NeuronStatistics({"a": torch.ones(3)}, {"a": -torch.ones(3)}, 10)).save(
        path
    ),
    "count": lambda path: Calibration(NeuronStatistics({"a": torch.ones(3)}, {"a": torch.ones(3)}, 1)).save(path),
    "threshold": lambda path: Calibration(
        samples=SampleThreshold(0.5, 0.6, -torch.ones(64, 64), 9, FewStepConfig())
    ).save(path),
    "neurons": lambda path: NeuronSet({"a": (1 << 30,)}).save(path),
    "preset": lambda path: FeaturePreset(replace(GOOD_PRESET, seeds=(-1,))).save(path),
    "control": lambda path: save_control(
        path, ControlEmbedder(ControlSpec(), 16).state_dict(), ControlMetadata("DiTTransformer2DModel", 32)
    ),
}
"""Each with a number that its reader refuses."""


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_refused_before_the_file_is_touched(name, tmp_path):
    path = tmp_path / "a.w2w.safetensors"
    path.write_bytes(b"before")
    with pytest.raises(VitrineError, match="a.w2w.safetensors"):
        NUMBERS[name](path)
    assert path.read_bytes() == b"before"


@pytest.mark.parametrize("text", ["turned", "long", "escape"])
@pytest.mark.parametrize("name", ["factors.safetensors", "delta.safetensors"])
def test_a_table_of_labels_leaves_the_space_as_it_was(name, text, tmp_path, capsys):
    a_space(name, tmp_path)
    before = (tmp_path / name).read_bytes()
    for label, refused in ((HOSTILE[text], True), ("beard", False)):
        (tmp_path / "table.csv").write_text(f"name,{label}\na,1\nb,0\nc,1\nd,0\n")
        if refused:
            with pytest.raises(VitrineError, match=r"table\.csv.*plain text"):
                Label(tmp_path / name, tmp_path / "table.csv").run()
            assert (tmp_path / name).read_bytes() == before
            assert "\x1b" not in capsys.readouterr().out
        else:
            Label(tmp_path / name, tmp_path / "table.csv").run()
            assert list(load_space(tmp_path / name).directions) == ["beard"]


def test_a_header_larger_than_the_library_reads_is_not_written(tmp_path, monkeypatch):
    save = TENSOR_FILES["taps.safetensors"][0]
    save(path := tmp_path / "taps.safetensors")
    before, longest = path.read_bytes(), len(json.dumps(taps().header()))
    monkeypatch.setattr(files, "LARGEST_HEADER", longest // 2)
    with pytest.raises(VitrineError, match="header of 0 MB"):
        save(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["taps.safetensors"]
