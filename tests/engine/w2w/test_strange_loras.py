"""Files that are not what they look like: each read, or named for what it is with a remedy; none ends the others."""

import os
import time

import pytest
import torch
from safetensors.torch import save_file
from vitrine.engine.copies.lora_contents import neighbours_in
from vitrine.engine.errors import VitrineError, refuse
from vitrine.engine.io.table_on_disk import RowFile
from vitrine.engine.io.tables import csv_text
from vitrine.engine.w2w.loras.lora_facts import facts_of
from vitrine.engine.w2w.loras.lora_files import read_header
from vitrine.engine.w2w.loras.lora_folders import scan_folder

Q = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k"


def write(path, tensors, header=None):
    save_file({key: value.contiguous() for key, value in tensors.items()}, path, header)
    return path


def plain(stem=Q, inner=768, seed=0):
    g = torch.Generator().manual_seed(seed)
    down, up = torch.randn(2, inner, generator=g), torch.randn(320, 2, generator=g)
    return {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up, f"{stem}.alpha": torch.tensor(2.0)}


NAMED = {
    "keys by number": ({"unet:0:up": torch.ones(8, 2), "unet:0:down": torch.ones(2, 8)}, "lora_diffusion"),
    "IA3": ({"base_model.model.mid_block.attentions.0.proj_in.ia3_l": torch.ones(8, 1)}, "IA3.*scales activations"),
    "textual inversion": ({"emb_params": torch.ones(2, 768)}, "textual inversion.*models/embeddings"),
    "textual inversion of SDXL": ({"clip_l": torch.ones(2, 768), "clip_g": torch.ones(2, 1280)}, "textual inversion"),
}


@pytest.mark.parametrize("name", NAMED)
def test_it_is_named_for_what_it_is(tmp_path, name):
    tensors, words = NAMED[name]
    with pytest.raises(VitrineError, match=words):
        read_header(write(tmp_path / "a.safetensors", tensors))


def test_a_git_lfs_pointer_is_named_with_its_remedy(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 100\n")
    with pytest.raises(VitrineError, match="Git LFS pointer.*git lfs pull"):
        read_header(path)
    assert "git lfs pull" in facts_of(path).problem


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "link.safetensors").symlink_to("/dev/zero")
    for name in ("pipe", "link"):
        assert "regular file" in facts_of(tmp_path / f"{name}.safetensors").problem


def test_an_alpha_that_is_not_used_may_be_any_number(tmp_path):
    """ai-toolkit's full LoKr; the same alpha that scales a LoRA's factors is refused."""
    huge = {"alpha": torch.tensor(9999999999.0)}
    kron = {"lokr_w1": torch.ones(4, 4), "lokr_w2": torch.ones(80, 192)} | huge
    entry = next(
        iter(read_header(write(tmp_path / "a.safetensors", {f"{Q}.{k}": v for k, v in kron.items()})).entries.values())
    )
    assert entry.scale == 1.0
    with pytest.raises(VitrineError, match="alpha"):
        read_header(write(tmp_path / "b.safetensors", plain() | {f"{Q}.alpha": torch.tensor(3e38)}))


def test_each_base_model_is_a_group_of_its_own(tmp_path):
    """Three LoRAs of SD 1.x, and two equal ones of SD 2.x."""
    files = [write(tmp_path / f"first{i}.safetensors", plain(seed=i)) for i in range(3)]
    files += [write(tmp_path / f"second{i}.safetensors", plain(inner=1024, seed=9)) for i in range(2)]
    near = neighbours_in(read_header(files[3]), files)
    assert (near.compared, near.left_out) == (1, 3) and len(near.copies) == 1
    assert neighbours_in(read_header(files[0]), files).compared == 2


def test_two_spellings_of_one_model_are_said(tmp_path):
    theirs, ours = "double_blocks.{}.img_attn.qkv", "transformer_blocks.{}.attn.to_q"
    for i, name in enumerate((theirs, theirs, ours)):
        stems = [name.format(n) for n in range(19)]
        write(tmp_path / f"{i}.safetensors", {k: v for stem in stems for k, v in plain(stem).items()})
    (bad,) = scan_folder(tmp_path).bad
    assert "names of the other library" in bad.problem and "one library's names" in bad.problem


@pytest.mark.parametrize("key", ["a." * 100_000 + "x", "x" * 200_000])
def test_a_long_key_takes_no_time(tmp_path, key):
    path = write(tmp_path / "a.safetensors", {key: torch.ones(1), f"{key}.lora_down.weight": torch.ones(1, 1)})
    start = time.process_time()
    with pytest.raises(VitrineError, match="letters|without UNet"):
        read_header(path)
    assert time.process_time() - start < 2


def test_a_megabyte_of_keys_takes_two_seconds(tmp_path):
    stems = ["a." * 200 + str(i) for i in range(2500)]
    path = write(tmp_path / "a.safetensors", {stem: torch.ones(1) for stem in stems} | plain())
    start = time.process_time()
    assert len(read_header(path).entries) == 1
    assert time.process_time() - start < 2


@pytest.mark.parametrize("number", ["9" * 5000, "1" + "0" * 400, "-1", "1e400"])
def test_numbers_of_a_header_are_bounded(tmp_path, number):
    header = {
        "ss_tag_frequency": f'{{"a": {{"b": {number}}}}}',
        "ss_dataset_dirs": f'{{"a": {{"n_repeats": {number}, "img_count": 3}}}}',
    }
    facts = facts_of(write(tmp_path / "a.safetensors", plain(), header))
    assert facts.file is not None and facts.tags == {} and "pictures" not in facts.training


def test_a_link_in_a_work_folder_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    folder = tmp_path / "work"
    with RowFile(folder, (4, 2), torch.float32) as rows:
        rows.write(0, torch.ones(1, 2))
    (folder / "rows.bin").unlink()
    (folder / "rows.bin").symlink_to(victim)
    with pytest.raises((VitrineError, OSError), match="link"):
        RowFile(folder, (4, 2), torch.float32)
    assert victim.read_bytes() == b"precious"


def test_tables_hold_no_formulas_and_messages_are_short():
    assert csv_text([["=1+1", "+a", "-0.5", "@x", "\x1b[2J", 3, "a cat"]]) == "'=1+1,'+a,-0.5,'@x,\\x1b[2J,3,a cat\n"
    assert len(str(refuse("neurons", list(range(200_000)), "fewer", "choose"))) < 3000
