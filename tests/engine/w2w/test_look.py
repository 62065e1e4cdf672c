"""The page about a folder of LoRAs before anything is built of it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from vitrine.cli.main import main
from vitrine.engine.errors import VitrineError
from vitrine.engine.w2w import DeltaSpace, LoraLayer, build_space, look_at_folder, near_copies, read_lora, write_lora
from vitrine.engine.w2w.loras.near_copies import sketch, variance_fractions
from vitrine_tests.engine.small_loras import SHAPES, deltas, lora

KEYS = "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k"


@pytest.fixture
def folder(tmp_path):
    """Five people, one of them twice under another spelling, one nearly a copy, and two files that do not belong."""
    place = tmp_path / "loras"
    for seed in range(5):
        write_lora(place / f"p{seed}.safetensors", lora(seed, start=7, strength=0.3), "kohya")
    write_lora(place / "again.safetensors", lora(3, start=7, strength=0.3), "diffusers")
    near = {p: LoraLayer(v.down, v.up * 1.02, v.alpha) for p, v in lora(1, start=7, strength=0.3).items()}
    said = {"ss_base_model_version": "sd_v1", "ss_sd_model_hash": "ab12"}
    write_lora(place / "epoch2.safetensors", near, "kohya", said, torch.float16)
    (place / "cut.safetensors").write_bytes(b"cut")
    save_file({"lora_unet_mid_block_attentions_0_proj_in.hada_w1_a": torch.ones(2, 2)}, place / "loha.safetensors")
    return place


def test_the_page_says_what_is_there_and_the_build_agrees(folder):
    look = look_at_folder(folder)
    assert {(c.first, c.second) for c in look.copies} == {("again", "p3"), ("epoch2", "p1")}
    by_pair = {c.first: c for c in look.copies}
    assert by_pair["again"].to_dict()["same"] and 0.018 < by_pair["epoch2"].distance < 0.022
    text = look.text()
    for words in (
        "7 LoRAs: 6 kohya, 1 diffusers",
        "F16",
        "left out cut.safetensors",
        "LoHa",
        "sd_v1, checkpoint ab12",
        "again and p3: the same weights",
        "epoch2 and p1: nearly the same",
        f"mode {look.mode}",
    ):
        assert words in text
    built = build_space(folder)
    assert built.space.mode == look.mode and built.reason == look.reason
    assert "again and p3: the same weights" in built.summary() and "base model: 7 sd_v1" not in built.summary()


def test_variance_is_that_of_the_products():
    """Layers as small as the sketch are compared exactly; larger ones nearly."""
    small = {path: (8, 12) for path in SHAPES}
    for shapes, bound in ((small, 1e-4), (SHAPES, 0.1)):
        loras = [lora(seed, shapes=shapes) for seed in range(6)]
        rows = torch.stack([sketch(x, shapes, 48) for x in loras])
        exact = DeltaSpace.of(loras).explained
        assert (variance_fractions(rows) - exact).abs().max() < bound
        products = torch.stack([torch.cat([d.flatten() for d in deltas(x).values()]) for x in loras])
        torch.testing.assert_close(rows.norm(dim=1), products.norm(dim=1), rtol=max(bound, 1e-5) * 2, atol=0)


def test_copies_of_many_are_found_in_blocks_and_nothing_else():
    rows = torch.randn(600, 40, generator=torch.Generator().manual_seed(0))
    rows[577], rows[3] = rows[100], 0
    pairs = near_copies(rows, [str(i) for i in range(600)])
    assert [(p.first, p.second, p.distance) for p in pairs] == [("100", "577", 0.0)]


@pytest.mark.parametrize(
    ("path", "sizes", "base"),
    [
        (KEYS, (320, 768), "Stable Diffusion 1.x"),
        (KEYS, (320, 1024), "Stable Diffusion 2.x"),
        (KEYS, (640, 2048), "SDXL"),
        ("single_transformer_blocks.0.attn.to_q", (3072, 3072), "Flux or Chroma"),
        ("double_blocks.0.img_attn.qkv", (9216, 3072), "Flux or Chroma or Flux.2 Klein 4B"),
        ("joint_blocks.0.x_block.attn.qkv", (4608, 1536), "Stable Diffusion 3 / 3.5 medium"),
        ("transformer_blocks.0.attn2.to_q", (1152, 1152), "PixArt"),
        (KEYS, (32, 33), ""),
        ("double_blocks.0.img_attn.proj", (64, 64), ""),  # Chroma's names, and no width of theirs
    ],
)
def test_the_base_model_by_layers(tmp_path, path, sizes, base):
    layer = LoraLayer(torch.ones(1, sizes[1]), torch.ones(sizes[0], 1), 1.0)
    write_lora(tmp_path / "a.safetensors", {path: layer})
    (file,) = look_at_folder(tmp_path).scan.good
    assert file.shaped_base == base and file.ranks == [1] and file.dtypes == ("F32",)


def test_a_file_of_another_base_is_left_out_and_said(tmp_path):
    for i, width in enumerate((768, 768, 2048)):
        write_lora(tmp_path / f"{i}.safetensors", {KEYS: LoraLayer(torch.randn(1, width), torch.randn(320, 1), 1.0)})
    look = look_at_folder(tmp_path)
    assert [b.name for b in look.scan.bad] == ["2.safetensors"] and "base model: 2 Stable Diffusion 1.x" in look.text()


def test_what_a_delta_space_would_cost(tmp_path):
    """Two layers of (4, 6) and (8, 2); ranks 1 and 3, one LoRA without the second layer."""

    def layer(rank, height, width):
        return LoraLayer(torch.randn(rank, width), torch.randn(height, rank), 1.0)

    write_lora(tmp_path / "a.safetensors", {KEYS: layer(1, 4, 6), f"{KEYS}2": layer(1, 8, 2)}, "diffusers")
    write_lora(tmp_path / "b.safetensors", {KEYS: layer(3, 4, 6)}, "diffusers")
    look = look_at_folder(tmp_path)
    assert look.delta_cost() == (4 * (4 * 10 + 1 * 10), (4**2 * 10 + 1**2 * 10) / 2)
    assert look.mode == "delta" and "8.5e+01 multiplications" in look.text()
    built = build_space(tmp_path).space
    assert look.delta_cost()[0] == 4 * sum(s.down.numel() + s.up.numel() for s in built.stacks.values())


def test_few_files_and_headers_alone(tmp_path, folder):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no usable LoRA" in look_at_folder(empty).text()
    with pytest.raises(VitrineError, match="folder"):
        look_at_folder(tmp_path / "none")
    poisoned = load_file(folder / "p0.safetensors")
    save_file(
        {k: v * float("nan") if k.endswith("up.weight") else v for k, v in poisoned.items()}, folder / "p0.safetensors"
    )
    assert "p0.safetensors" in [b.name for b in look_at_folder(folder).scan.bad]
    quick = look_at_folder(folder, headers_only=True)
    assert len(quick.scan.good) == 7 and not quick.mode and not quick.copies


def test_the_command_writes_the_same_as_json(folder, tmp_path, capsys):
    assert main(["w2w", "look", str(folder), "--json", str(tmp_path / "look.json")]) == 0
    page = json.loads((tmp_path / "look.json").read_text())
    assert len(page["files"]) == 7 and {b["name"] for b in page["left_out"]} == {"cut.safetensors", "loha.safetensors"}
    assert page["copies"][0]["same"] and sum(page["variance"]) == pytest.approx(1, abs=1e-3)
    assert "a space would be built in mode" in capsys.readouterr().out
    assert main(["w2w", "look", str(tmp_path / "none")]) == 2
    assert set(read_lora(folder / "p2.safetensors")) == set(SHAPES)
