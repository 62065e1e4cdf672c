"""A name in a LoRA file is read by the modules of the families' real classes, or refused."""

import itertools

import pytest
from vitrine.engine.errors import VitrineError
from vitrine.engine.families import FAMILIES
from vitrine.engine.families.module_names import ModuleNames
from vitrine.engine.w2w.loras.base_models import shaped_base
from vitrine.engine.w2w.loras.layer_names import canonical, parse
from vitrine_tests.engine.families.real_classes import diffusers_networks, templates, weighted

FAMILY = {family.name: family for family in FAMILIES}
UNDERSCORED = ("lora_unet_", "lora_transformer_", "lycoris_", "lora_unet_unet_", "lora_unet_lora_unet_")
"""kohya's and musubi's, OneTrainer's, LyCORIS's, and doubled by a converter."""
DOTTED = (
    "",
    "transformer.",
    "unet.",
    "diffusion_model.",
    "model.diffusion_model.",
    "base_model.model.",
    "base_model.model.transformer.",
)
"""diffusers', ComfyUI's and PEFT's."""
ROLES = (".lora_A.weight", ".lora_B.default.weight", ".lora_down.weight", ".alpha", ".lokr_w1", ".hada_w2_a")


@pytest.mark.parametrize("name", FAMILY)
def test_the_list_has_every_module_of_diffusers_class(name):
    real = set().union(*map(templates, diffusers_networks(name)))
    assert len(real) > 10 and real <= set(FAMILY[name].modules), sorted(real - set(FAMILY[name].modules))


@pytest.mark.parametrize("name", FAMILY)
def test_every_module_in_every_spelling(name):
    """Of both libraries' classes: a name with underscores means the module that the name with dots means.

    A role is cut from the end and a prefix from the start: each path has every prefix, the roles in turn.
    """
    roles = itertools.cycle(ROLES)
    real = {path for net in diffusers_networks(name) for path in weighted(net)}
    paths = {*real, *(module.replace("*", n) for module in FAMILY[name].modules for n in ("0", "1", "11"))}
    assert any("_" in path for path in paths)
    for path in paths:
        for prefix in UNDERSCORED:
            key = parse(f"{prefix}{path.replace('.', '_')}.lora_down.weight")
            assert (key.path, key.unet, key.dialect) == (canonical(path), True, "kohya"), prefix
        for prefix in DOTTED:
            role = next(roles)
            assert parse(f"{prefix}{path}{role}").path == canonical(path), (prefix, role)


def test_no_name_with_underscores_means_two_modules():
    every = ModuleNames(module for family in FAMILIES for module in family.modules)
    for family in FAMILIES:
        for module in family.modules:
            path = module.replace("*", "2")
            assert every.dotted(path.replace(".", "_")) == [path]


@pytest.mark.parametrize("name", [
    "blocks_3_self_attn_x", "text_model_encoder_layers_0_q", "double_blocks_0_img_attn", "down_blocks", "", "_",
    "blocks__self_attn_q", "unet_", "unet_unet_unet_", "blocks_3_self_attn_q_4", "middle_block_7_proj_in",
])  # fmt: skip
def test_a_name_of_no_module_is_refused(name):
    assert parse("lora_unet_blocks_3_self_attn_q.lora_up.weight").path == "blocks.3.self_attn.q"
    with pytest.raises(VitrineError, match=r"LoRA layer.*modules of .*Wan.*diffusers' names"):
        parse(f"lora_unet_{name}.lora_up.weight")


def blocks(count, name, *more):
    return {name.format(i): (8, 8) for i in range(count)} | dict(more)


BASES = {
    "Wan": blocks(30, "blocks.{}.attn1.to_q"),
    "HiDream": blocks(16, "double_stream_blocks.{}.block.attn1.to_q"),
    "Stable Diffusion 3 / 3.5 medium": blocks(24, "transformer_blocks.{}.attn.to_q", ("proj_out", (64, 1536))),
    "Qwen-Image": blocks(60, "transformer_blocks.{}.attn.to_q", ("proj_out", (64, 3072))),
    "Z-Image": blocks(30, "layers.{}.attention.to_q", ("layers.0.attention.to_k", (3840, 3840))),
    "Flux or Chroma": blocks(19, "double_blocks.{}.img_attn.qkv", ("double_blocks.0.img_attn.proj", (3072, 3072))),
    "": blocks(20, "double_blocks.{}.img_attn.qkv", ("double_blocks.0.img_attn.proj", (3072, 3072))),
}


@pytest.mark.parametrize("name", BASES)
def test_the_base_model_is_known_by_its_modules(name):
    """The last is HunyuanVideo, whose modules have Flux' names and width, in 20 blocks."""
    assert shaped_base(BASES[name]) == name


def test_layers_of_no_image_model_have_no_base():
    assert shaped_base(blocks(12, "model.layers.{}.self_attn.q_proj")) == ""
    assert shaped_base(blocks(6, "distilbert.transformer.layer.{}.attention.q_lin")) == ""
