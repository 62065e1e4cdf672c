"""Activations on disk: round trips, damaged files, interrupted and resumed writers."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vitrine.engine.activations import ActivationReader, Activations, ActivationWriter, TapConfig, TapInfo
from vitrine.engine.errors import VitrineError
from vitrine.engine.tracing.hooks import Activation


def make(rows: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32) -> Activations:
    g = torch.Generator().manual_seed(seed)
    res, key = "up-level0-repeat0-res-out", "up-level0-repeat0-vit-block0-cross-k"
    items = {
        res: Activation(res, torch.randn(rows, 5, 3, 4, generator=g), (3, 4)),
        key: Activation(key, torch.randn(rows, 7, 6, generator=g), None),
    }
    info = TapInfo(50.0, 0.2256, (0, 1), tuple(f"p{i}" for i in range(rows)), "tiny", extra={"note": "ü"})
    spread = {"up-level0-repeat0-res-out": torch.rand(rows, 5, 3, 4, generator=g)}
    return Activations(items, info, spread).to(dtype)


def same(a: Activations, b: Activations) -> bool:
    tensors = all(torch.equal(a[k].tensor, b[k].tensor) and a[k].grid == b[k].grid for k in a)
    spread = all(torch.equal(a.variance[k], b.variance[k]) for k in a.variance)
    return list(a) == list(b) and tensors and spread and a.info == b.info and set(a.variance) == set(b.variance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_save_load_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    before = make(dtype=dtype)
    after = Activations.load(before.save(tmp_path / "a.safetensors"))
    assert same(before, after) and after["up-level0-repeat0-res-out"].tensor.dtype == dtype
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_views_of_one_tensor_can_be_saved(tmp_path: Path) -> None:
    row = make(rows=3).row(1)
    assert same(row, Activations.load(row.save(tmp_path / "row.safetensors")))
    assert row.info.prompts == ("p1",) and row.rows == 1


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(seed=1).save(tmp_path / "a.safetensors")
    old = path.read_bytes()

    def fail(*args: object, **kwargs: object) -> None:
        Path(str(args[1])).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(KeyboardInterrupt):
        make(seed=2).save(path)
    assert path.read_bytes() == old and len(list(tmp_path.iterdir())) == 1


def test_bad_files_are_refused_with_a_reason(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    good = make().save(tmp_path / "good.safetensors").read_bytes()
    cases = {"missing": None, "empty": b"", "text": b"not a tensor file at all"}
    cases |= {"cut": good[: len(good) // 2], "cut1": good[:-1]}
    for name, data in cases.items():
        path = tmp_path / f"{name}.safetensors"
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(VitrineError, match=name):
            Activations.load(path)
    save_file({"x": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    with pytest.raises(VitrineError, match="no readable Vitrine header"):
        Activations.load(tmp_path / "foreign.safetensors")
    for change, message in (({"version": 99}, "format version"), ({"grids": {"gone": None}}, "fits its tensors")):
        header = {"kind": "vitrine.activations", "version": 1, **make().header(), **change}
        save_file(make().to("cpu").tensors(), tmp_path / "odd.safetensors", {"vitrine": json.dumps(header)})
        with pytest.raises(VitrineError, match=message):
            Activations.load(tmp_path / "odd.safetensors")


@settings(max_examples=60)
@given(st.data())
def test_any_damage_ends_in_our_error_or_a_whole_result(data: st.DataObject) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = make().save(Path(folder) / "a.safetensors")
        raw = bytearray(path.read_bytes())
        header = int.from_bytes(raw[:8], "little") + 8
        raw[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
        with contextlib.suppress(VitrineError):
            assert Activations.load(path).rows in (0, 2)


@pytest.mark.parametrize(
    "bad",
    [
        {"addresses": ()}, {"addresses": ("",)}, {"seeds": ()}, {"seeds": (1, 1)}, {"seeds": (-1,)}, {"seeds": (0.5,)},
        {"seeds": None}, {"seeds": "abc"}, {"seeds": (True,)},
        {"timestep": -1}, {"timestep": float("nan")}, {"timestep": "50"}, {"dtype": "float8"}, {"posterior": "mode"},
        {"size": 0}, {"batch": 0}, {"variance": True}, {"unknown": 1},
        {"discard": (-1,)}, {"discard": ("x",)}, {"discard": (True,)},
        {"seeds": (0, 1), "variance": True, "modulate": True},
    ],
)  # fmt: skip
def test_config_refuses(bad: dict) -> None:
    with pytest.raises(VitrineError):
        TapConfig.from_dict({"addresses": ["a"], **bad})


def test_container_is_a_mapping(tmp_path: Path) -> None:
    taps = make()
    assert list(taps.select("*-cross-k")) == ["up-level0-repeat0-vit-block0-cross-k"]
    assert taps.concat((6, 8)).shape == (2, 5, 6, 8)
    with pytest.raises(VitrineError, match="mid-out"):
        taps.select("mid-out")
    with pytest.raises(KeyError, match="up-level0-repeat0-res-out"):
        taps["up-level0-repeat0-res-in"]
    with pytest.raises(VitrineError, match="row"):
        taps.row(5)


def test_writer_streams_and_reader_reads_back(tmp_path: Path) -> None:
    config = TapConfig(("a",))
    with ActivationWriter(tmp_path, config, shard_bytes=1000) as writer:
        for i in range(7):
            writer.add(f"k{i}", make(seed=i))
        assert "k3" in writer and "k9" not in writer and len(writer) == 7
        with pytest.raises(VitrineError, match="k3"):
            writer.add("k3", make())
    reader = ActivationReader(tmp_path)
    assert list(reader) == [f"k{i}" for i in range(7)] and reader.config == config
    assert all(same(reader[f"k{i}"], make(seed=i)) for i in (6, 0, 3))
    assert len(list(tmp_path.glob("shard-*"))) > 1


def test_interrupted_writer_resumes_without_losing_or_repeating(tmp_path: Path) -> None:
    made: list[int] = []

    def run(stop_at: int) -> None:
        with ActivationWriter(tmp_path, shard_bytes=1000) as writer:
            for i in range(10):
                if f"k{i}" in writer:
                    continue
                if i == stop_at:
                    raise KeyboardInterrupt
                made.append(i)
                writer.add(f"k{i}", make(seed=i))

    with pytest.raises(KeyboardInterrupt):
        run(6)
    run(99)
    assert made == list(range(10)) and len(ActivationReader(tmp_path)) == 10


def test_killed_writer_loses_only_its_buffer(tmp_path: Path) -> None:
    writer = ActivationWriter(tmp_path, shard_bytes=10**9)  # killed: neither flush nor close nor index for the second
    writer.add("a", make(seed=0))
    writer.flush()
    (tmp_path / "index.json").write_text("{ cut", encoding="utf-8")
    writer.add("b", make(seed=1))
    again = ActivationWriter(tmp_path)
    assert "a" in again and "b" not in again
    assert list(ActivationReader(tmp_path)) == ["a"]


def test_writer_refuses_other_settings_and_foreign_folders(tmp_path: Path) -> None:
    with ActivationWriter(tmp_path / "a", TapConfig(("a",))) as writer:
        writer.add("k", make())
    with pytest.raises(VitrineError, match="timestep"):
        ActivationWriter(tmp_path / "a", TapConfig(("a",), timestep=261))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "index.json").write_text('{"kind": "web site"}', encoding="utf-8")
    with pytest.raises(VitrineError, match="written by another program"):
        ActivationWriter(tmp_path / "b")
    with pytest.raises(VitrineError, match="folder"):
        ActivationReader(tmp_path / "missing")


def test_seeds_may_be_a_range_an_array_or_a_number() -> None:
    import numpy as np

    assert TapConfig("a, b", seeds=np.arange(3)).seeds == TapConfig(("a", "b"), seeds=range(3)).seeds == (0, 1, 2)
    assert TapConfig("a", seeds=7).seeds == (7,) and TapConfig("a, b").addresses == ("a", "b")
