"""Oddities of published LoRA files, each on a small file of our own: read, or named in a sentence."""

import json

import pytest
import torch
from safetensors.torch import save_file
from vitrine.engine.copies.lora_contents import readable_health
from vitrine.engine.copies.lora_findings import Findings, what_it_is
from vitrine.engine.errors import VitrineError
from vitrine.engine.w2w.loras.lora_facts import facts_of
from vitrine.engine.w2w.loras.lora_files import read_header, read_lora

LAYER = "mid_block.attentions.0.transformer_blocks.0.attn2.to_k"
TEXT = "text_model.encoder.layers.{}.self_attn.q_proj"


def factors(stem, down=".lora_down.weight", up=".lora_up.weight", zero=False):
    g = torch.Generator().manual_seed(len(stem))
    second = torch.zeros(320, 2) if zero else torch.randn(320, 2, generator=g)
    return {stem + down: torch.randn(2, 768, generator=g), stem + up: second}


def written(path, tensors, header=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, header)
    return path


@pytest.mark.parametrize(
    "stem, down, up",
    [
        (f"lora_unet_unet_{LAYER.replace('.', '_')}", "_lora_down.weight", "_lora_up.weight"),
        (f"lora_unet_lora_unet_{LAYER.replace('.', '_')}", ".lora_down.weight", ".lora_up.weight"),
        (f"unet.unet.{LAYER}", ".lora_A.weight", ".lora_B.weight"),
        (f"base_model.model.base_model.model.{LAYER}", ".lora_A.weight", ".lora_B.weight"),
        (f"unet.base_model.model.unet.{LAYER}", ".lora.down.weight", ".lora.up.weight"),
    ],
)
def test_doubled_prefixes_are_read(tmp_path, stem, down, up):
    tensors = factors(stem, down, up)
    (layer,) = read_lora(written(tmp_path / "a.safetensors", tensors)).items()
    assert layer[0] == LAYER and torch.equal(layer[1].delta(), tensors[stem + up] @ tensors[stem + down])


@pytest.mark.parametrize(
    "prefix",
    [
        "base_model.model.",
        "base_model.model.base_model.model.",
        "text_encoder.",
        "text_encoder.base_model.model.",
        "base_model.model.text_encoder.",
        "module.",
    ],
)
def test_a_text_encoder_alone_is_named_with_its_zero_layers(tmp_path, prefix):
    tensors = {}
    for number in range(3):
        tensors |= factors(prefix + TEXT.format(number), ".lora_A.weight", ".lora_B.weight", zero=number > 0)
    path = written(tmp_path / "adapter_model.safetensors", tensors)
    with pytest.raises(VitrineError, match="without UNet layers: it has 3 text encoder layers, 2 of them zero"):
        read_header(path)
    whole = {key: torch.ones_like(value) for key, value in tensors.items()}
    with pytest.raises(VitrineError, match="it has 3 text encoder layers; accepted"):
        read_header(written(tmp_path / "b.safetensors", whole))


@pytest.mark.parametrize("name", ["adapter_model", "anna"])
def test_alpha_is_read_from_the_settings_next_to_the_file(tmp_path, name):
    tensors = factors(f"base_model.model.{LAYER}", ".lora_A.weight", ".lora_B.weight")
    path = written(tmp_path / f"{name}.safetensors", tensors)
    down, up = tensors.values()
    assert "is missing" in facts_of(path).not_known[0][0] and torch.equal(read_lora(path)[LAYER].delta(), up @ down)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 8}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    torch.testing.assert_close(read_lora(path)[LAYER].delta(), 4 * up @ down)
    assert not facts_of(path).not_known


def test_settings_next_to_several_files_are_those_of_none(tmp_path):
    tensors = factors(f"base_model.model.{LAYER}", ".lora_A.weight", ".lora_B.weight")
    paths = [written(tmp_path / f"{name}.safetensors", tensors) for name in ("anna", "bob")]
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 8}))
    for path in paths:
        down, up = tensors.values()
        assert torch.equal(read_lora(path)[LAYER].delta(), up @ down)
        assert "next to several files: alpha is not known" in facts_of(path).not_known[0][0]


def test_zero_layers_are_counted_in_the_report(tmp_path):
    stems = [f"lora_unet_{LAYER.replace('.', '_')}", f"lora_unet_{LAYER.replace('.', '_').replace('_k', '_v')}"]
    tensors = factors(stems[0]) | factors(stems[1], zero=True)
    facts = facts_of(written(tmp_path / "a.safetensors", tensors))
    health, problem = readable_health(facts.file)
    sentence = what_it_is(Findings("a", facts, health, problem))
    assert sentence.verdict == "look" and "1 of 2 layers are zero." in sentence.text


def test_a_header_of_another_rank_is_named(tmp_path):
    tensors, header = factors(f"lora_unet_{LAYER.replace('.', '_')}"), {"ss_network_module": "networks.lora"}
    for rank, known in (("2", True), ("32", False), ("Dynamic", True)):
        facts = facts_of(written(tmp_path / f"{rank}.safetensors", tensors, header | {"ss_network_dim": rank}))
        sentences = [sentence for sentence, _ in facts.not_known]
        assert ("Its header names rank 32, its layers have 2." in sentences) != known


@pytest.mark.parametrize("base, width", [("Flux.2 Klein 4B", 3072), ("Flux.2 Klein 9B", 4096), ("Flux.2", 6144)])
@pytest.mark.parametrize(
    "layer, out, inner",
    [
        ("single_blocks.3.linear2", 1, 4),
        ("double_blocks.1.img_attn.qkv", 3, 1),
        ("final_layer.adaLN_modulation.1", 2, 1),
    ],
)
def test_flux2_models_are_told_apart_by_their_width(tmp_path, base, width, layer, out, inner):
    stem = f"diffusion_model.{layer}"
    blocks = f"diffusion_model.double_blocks.{7 if width > 3072 else 4}.img_mlp.2"
    tensors = {}
    for name, rows, columns in ((stem, out * width, inner * width), (blocks, width, 3 * width)):
        tensors |= {f"{name}.lora_A.weight": torch.ones(1, columns), f"{name}.lora_B.weight": torch.ones(rows, 1)}
    facts = facts_of(written(tmp_path / "a.safetensors", tensors, {"modelspec.architecture": "flux-2-klein/lora"}))
    assert facts.file.shaped_base == base
    assert bool(facts.not_known) == (base == "Flux.2"), facts.not_known
