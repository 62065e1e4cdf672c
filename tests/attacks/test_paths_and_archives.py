"""Files that name other files, and archives that hold more than they weigh."""

import json
import shutil
import zipfile

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from vitrine.engine.activations.ranked_pictures import read_masks
from vitrine.engine.errors import VitrineError
from vitrine.engine.io.pt_files import read_pt
from vitrine.engine.nemo.neuron_statistics import import_official as import_statistics
from vitrine.engine.w2w import BuildConfig, build_space, load_space, write_lora
from vitrine.engine.w2w.space.linked_factors import linked_file
from vitrine.engine.w2w.space.official_files import import_official
from vitrine_tests.engine.small_loras import Held, lora

OUTSIDE = (
    "/etc/passwd.safetensors", "../../other/a.safetensors", "../secret/a.safetensors", "..\\loras\\a.safetensors",
    "\\\\host\\share\\a.safetensors", "//host/share/a.safetensors", "C:/a.safetensors", "c:a.safetensors", "a.txt",
    "", ".", "..", "a\nb.safetensors", "a\0.safetensors", "../loras/../../x/a.safetensors", 7, None,
)  # fmt: skip


def test_a_linked_space_reads_nothing_outside_its_folder(tmp_path):
    home = tmp_path / "models" / "w2w"
    space = home / "a.w2w.safetensors"
    for place in OUTSIDE:
        with pytest.raises(VitrineError, match="outside its folder"):
            linked_file(space, place)
    for place in ("a.safetensors", "sub/a.SAFETENSORS", "../loras/people/a.safetensors", "../../loras/a.safetensors"):
        assert linked_file(space, place) == (home / place).resolve()
    with pytest.raises(VitrineError):
        linked_file(space, "../../disk/a.safetensors")
    assert linked_file(space, "../../disk/a.safetensors", [tmp_path / "disk"]) == tmp_path / "disk" / "a.safetensors"


def test_links_are_checked_before_anything_is_opened(tmp_path):
    for seed in range(3):
        write_lora(tmp_path / "loras" / f"m{seed}.safetensors", lora(seed, rank=seed + 1))
    path = build_space(tmp_path / "loras", BuildConfig("delta", linked=True)).space.save(tmp_path / "a.w2w.safetensors")
    with safe_open(str(path), "pt") as opened:
        header = json.loads(opened.metadata()["vitrine"])
    (tmp_path / "secret").mkdir()
    shutil.copy(tmp_path / "loras" / "m0.safetensors", tmp_path / "secret" / "m0.safetensors")
    links, bent = json.loads(header["linked"]), tmp_path / "sub" / "bent.w2w.safetensors"
    bent.parent.mkdir()
    for row in links["files"]:
        row[0] = f"../{row[0]}"

    def bend(place):
        links["files"][0][0] = place
        save_file(load_file(path), bent, {"vitrine": json.dumps(header | {"linked": json.dumps(links)})})
        return load_space(bent)

    assert bend("../loras/m0.safetensors").count == 3
    for place in ("../secret/m0.safetensors", str(tmp_path / "loras" / "m0.safetensors")):
        with pytest.raises(VitrineError, match=r"bent.*outside its folder"):
            bend(place)
    assert load_space(path).count == 3


def published(folder, **instead):
    """The published files of one small layer."""
    key = "base_model.model.mid_block.attentions.0.transformer_blocks.0.attn1.to_q.lora_{}.weight"
    shapes = {"A": (1, 4), "B": (6, 1)}
    dims = {key.format(k): [torch.Size([s[0] * s[1]]), torch.Size(s)] for k, s in shapes.items()}
    tensors = {"mean": torch.randn(10), "std": torch.rand(10) + 0.1, "V": torch.linalg.qr(torch.randn(10, 3))[0]}
    for name, value in (tensors | {"weight_dimensions": dims, "proj_1000pc": torch.randn(5, 3)} | instead).items():
        torch.save(value, folder / f"{name}.pt")
    return folder


def test_published_files_hold_what_they_weigh(tmp_path):
    assert import_official(published(tmp_path)).dimension == 3
    big = {
        "mean": torch.zeros(1).expand(1 << 34),
        "std": torch.zeros(10),
        "V": torch.ones(10),
        "proj_1000pc": torch.full((5, 3), float("nan")),
        "weight_dimensions": {"a": 1, "b": 2},
    }
    for name, value in big.items():
        published(tmp_path, **{name: value})
        with Held() as held, pytest.raises(VitrineError):
            import_official(tmp_path)
        assert held.most <= 1 << 20, name
    for name in ("mean", "V"):
        published(tmp_path, **{name: torch.full((10,) if name == "mean" else (10, 3), 3e38)})
        with pytest.raises(VitrineError, match=name):
            import_official(tmp_path)


def test_compressed_and_old_archives_are_refused(tmp_path):
    path, packed = tmp_path / "mean.pt", tmp_path / "packed.pt"
    torch.save(torch.zeros(1 << 20), path)
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    assert packed.stat().st_size < 1 << 15
    torch.save(torch.zeros(4), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save(torch.zeros(2, 2).to_sparse(), tmp_path / "sparse.pt")
    torch.save([[[[[[[[[[[[torch.zeros(1)]]]]]]]]]]]], tmp_path / "deep.pt")
    torch.save(torch.zeros(1).expand(1 << 34), tmp_path / "wide.pt")
    for name in ("packed", "old", "sparse", "deep", "wide"):
        with Held() as held, pytest.raises(Exception, match=r"."):  # noqa: PT011  the callers name the file
            read_pt(tmp_path / f"{name}.pt")
        assert held.most <= 1 << 12, name
        with pytest.raises(VitrineError, match=name):
            import_statistics(tmp_path / f"{name}.pt", ["a"])
    assert read_pt(path).shape == (1 << 20,)


def test_an_array_that_promises_more_than_there_is(tmp_path):
    from PIL import Image

    (tmp_path / "p").mkdir()
    (tmp_path / "m").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "p" / "a.png")
    np.save(tmp_path / "m" / "a.npy", np.zeros((4, 4), np.int64))
    data = (tmp_path / "m" / "a.npy").read_bytes().replace(b"(4, 4)", b"(1<20)").replace(b"(1<20)", b"(9**9,")
    (tmp_path / "m" / "a.npy").write_bytes(data)
    with pytest.raises(VitrineError, match=r"a\.npy"):
        read_masks(tmp_path / "p", tmp_path / "m", 2).mask(0)
    header = (tmp_path / "m" / "a.npy").read_bytes()[:128].replace(b"(9**9,", b"(4, 4)")
    (tmp_path / "m" / "a.npy").write_bytes(header[:60].replace(b"(4, 4), ", b"(99999, 99999), ") + b" " * 60 + b"\n")
    with pytest.raises(VitrineError, match=r"a\.npy"):
        read_masks(tmp_path / "p", tmp_path / "m", 2).mask(0)
