"""LoRA files of every spelling, names from real models, exports into diffusers and PEFT."""

import json

import pytest
import torch
from diffusers import StableDiffusionPipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from vitrine.engine.errors import VitrineError
from vitrine.engine.io.lora_writing import diffusers_names
from vitrine.engine.portraits.models import build_models
from vitrine.engine.w2w import (
    LoraLayer,
    Manifest,
    read_header,
    read_lora,
    scan_folder,
    write_lora,
)
from vitrine_tests import models
from vitrine_tests.engine.small_loras import deltas, lora, same

pytestmark = pytest.mark.rounding


# --- spellings ----------------------------------------------------------------------------------------------------
LDM = {"down_blocks.0.attentions.0": "input_blocks.1.1", "mid_block.attentions.0": "middle_block.1"}


def ldm(path):
    for ours, theirs in LDM.items():
        path = path.replace(ours, theirs)
    return path


def spelled(dialect, x):
    out = {}
    for path, v in x.items():
        if dialect == "kohya":
            stem, names = "lora_unet_" + path.replace(".", "_"), ("lora_down.weight", "lora_up.weight")
        elif dialect == "kohya ldm":
            stem, names = "lora_unet_" + ldm(path).replace(".", "_"), ("lora_down.weight", "lora_up.weight")
        elif dialect == "ComfyUI":
            stem, names = "diffusion_model." + ldm(path), ("lora_A.weight", "lora_B.weight")
        elif dialect == "diffusers old":
            head, tail = path.replace(".to_out.0", ".to_out").rsplit(".", 1)
            stem, names = f"unet.{head}.processor.{tail}_lora", ("down.weight", "up.weight")
        elif dialect == "w2w":
            stem, names = "base_model.model." + path, ("lora_A.identity1.weight", "lora_B.identity1.weight")
        elif dialect == "PEFT":
            stem, names = "base_model.model." + path, ("lora_A.weight", "lora_B.weight")
        elif dialect == "PEFT default":
            stem, names = "base_model.model." + path, ("lora_A.default.weight", "lora_B.default.weight")
        else:
            stem, names = "unet." + path, ("lora.down.weight", "lora.up.weight")
        out[f"{stem}.{names[0]}"], out[f"{stem}.{names[1]}"] = v.down, v.up
        if dialect in ("kohya", "kohya ldm", "ComfyUI", "diffusers", "diffusers old"):
            out[f"{stem}.alpha"] = torch.tensor(v.alpha)
    return out


DIALECTS = ["kohya", "kohya ldm", "ComfyUI", "diffusers old", "diffusers", "PEFT", "PEFT default", "w2w"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_spelling_reads_as_the_same_lora(tmp_path, dialect):
    wanted = lora(1, rank=2)
    folder = tmp_path / "someone"
    folder.mkdir()
    path = folder / ("adapter_model.safetensors" if dialect[:2] in ("PE", "w2") else "someone.safetensors")
    if path.stem == "adapter_model":
        (folder / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 27.0}))
    save_file(spelled(dialect, wanted), path)
    assert read_header(path).name == "someone" and read_header(path).dialect.split()[0] == dialect.split()[0]
    found = read_lora(path)
    assert list(found) == sorted(wanted) and same(deltas(found), deltas(wanted), 0)


def test_names_come_from_real_models():
    """Every attention projection of an SD1.5-shaped UNet, through kohya and ldm names and back."""
    from vitrine.engine.w2w.loras.layer_names import parse

    unet = models.outline(**models.SD15)
    linears = [n for n, m in unet.named_modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d))]
    for name in linears:
        assert parse(f"lora_unet_{name.replace('.', '_')}.lora_down.weight").path == name
    ldm_names = {
        "input_blocks.4.1.proj_in": "down_blocks.1.attentions.0.proj_in",
        "input_blocks.8.1.proj_out": "down_blocks.2.attentions.1.proj_out",
        "output_blocks.3.1.proj_in": "up_blocks.1.attentions.0.proj_in",
        "output_blocks.11.1.proj_in": "up_blocks.3.attentions.2.proj_in",
        "output_blocks.7.0.in_layers.2": "up_blocks.2.resnets.1.conv1",
        "input_blocks.3.0.op": "down_blocks.0.downsamplers.0.conv",
        "output_blocks.5.2.conv": "up_blocks.1.upsamplers.0.conv",
        "middle_block.2.emb_layers.1": "mid_block.resnets.1.time_emb_proj",
    }
    for theirs, ours in ldm_names.items():
        assert parse(f"diffusion_model.{theirs}.lora_up.weight").path.rstrip(".") == ours
        assert parse(f"lora_unet_{theirs.replace('.', '_')}.lora_up.weight").path.rstrip(".") == ours


@pytest.mark.parametrize("network", [models.flux, models.sd3, models.pixart, models.unet_xl])
def test_names_with_underscores_are_those_of_real_modules(network):
    """Of each linear layer and convolution, through the names that have underscores for dots."""
    from vitrine.engine.w2w.loras.layer_names import parse

    paths = [n for n, m in network().named_modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d))]
    for path in paths:
        for prefix in ("lora_transformer_", "lycoris_", "lora_unet_"):
            assert parse(f"{prefix}{path.replace('.', '_')}.lora_down.weight").path == path


def test_the_published_order_of_numbers():
    """w2w.md 1.2: 64 layers of SD1.5, 99,648 numbers, and where its blocks begin."""
    unet = models.outline(**models.SD15)
    found = {
        name: LoraLayer(torch.empty(1, m.in_features), torch.empty(m.out_features, 1), 27.0)
        for name, m in unet.named_modules()
        if name.endswith((".to_q", ".to_v"))
    }
    manifest = Manifest.of(found)
    assert (len(manifest), manifest.size) == (64, 99_648)
    begins = {}
    for layer in manifest:
        begins.setdefault(layer.path.split(".attentions")[0], layer.offset)
    assert begins == {
        "down_blocks.0": 0,
        "down_blocks.1": 6016,
        "down_blocks.2": 16_512,
        "mid_block": 35_968,
        "up_blocks.1": 45_696,
        "up_blocks.2": 74_880,
        "up_blocks.3": 90_624,
    }


def test_forty_peft_adapters_read_bit_for_bit(tmp_path):
    """Against PEFT's own writer: a matrix of rows in the order of names, columns in the order of sorted keys."""
    from peft.utils import set_peft_model_state_dict

    unet = models.unet(sample_size=8, block_out_channels=(32, 64), attention_head_dim=8)
    unet.add_adapter(LoraConfig(r=1, lora_alpha=27, target_modules=["to_q", "to_v"]))
    rows = []
    for i in range(4):
        state = {k: torch.randn_like(v) * 0.1 for k, v in get_peft_model_state_dict(unet).items()}
        set_peft_model_state_dict(unet, state)
        folder = tmp_path / f"id{i}"
        folder.mkdir()
        save_file({f"base_model.model.{k}": v for k, v in state.items()}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({"lora_alpha": 27}))
        rows.append(torch.cat([state[k].reshape(-1) for k in sorted(state)]))
    report = scan_folder(tmp_path)
    read = [read_lora(f) for f in report.good]
    manifest = Manifest.of(read[0])
    assert torch.equal(torch.stack([manifest.flatten(x) for x in read]), torch.stack(rows))
    assert all(layer.alpha == 27 for layer in manifest)


# --- exports ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def portraits():
    return build_models(0)


def forward(unet):
    gen = torch.Generator().manual_seed(0)
    x, text = torch.randn(2, 4, 16, 16, generator=gen), torch.randn(2, 24, 64, generator=gen)
    with torch.no_grad():
        return unet(x, 300, encoder_hidden_states=text).sample


def merged(unet, x):
    """The plain way: W + (alpha / r) B A written into a copy."""
    import copy

    other = copy.deepcopy(unet)
    with torch.no_grad():
        for path, layer in x.items():
            other.get_submodule(path).weight += layer.delta()
    return forward(other)


@pytest.mark.parametrize("dialect", ["kohya", "diffusers", "peft"])
@pytest.mark.parametrize("ranks", ["one", "mixed"])
def test_exports_do_the_same_everywhere(tmp_path, portraits, dialect, ranks):
    x = lora(1, rank=2, strength=0.3)
    if ranks == "mixed":
        x[next(iter(x))] = lora(2, rank=4, strength=0.3)[next(iter(x))]
    wanted = merged(portraits.unet, x)
    assert (wanted - forward(portraits.unet)).abs().max() > 0.05
    path = write_lora(tmp_path / ("x" if dialect == "peft" else "x.safetensors"), x, dialect)
    assert same(deltas(read_lora(path)), deltas(x), 1e-6), "our own reader"
    pipe: StableDiffusionPipeline = build_models(0).pipeline()
    if dialect == "peft":
        from peft import PeftModel

        found = forward(PeftModel.from_pretrained(pipe.unet, str(tmp_path / "x")).base_model.model)
    else:
        pipe.load_lora_weights(str(path))
        found = forward(pipe.unet)
    assert (found - wanted).abs().max() < 1e-5


def of_transformer(network, targets=("to_q", "to_v")):
    """A LoRA on a transformer's attention, as a space of such LoRAs gives it."""
    layers = {n: m for n, m in network.named_modules() if n.endswith(targets) and isinstance(m, torch.nn.Linear)}
    return lora(3, rank=2, alpha=1.0, shapes={n: tuple(m.weight.shape) for n, m in layers.items()}, strength=0.3)


def test_a_flux_space_exports_what_fluxpipeline_loads(tmp_path):
    from vitrine_tests.machine import stock

    pipe = stock.flux()
    x = of_transformer(pipe.transformer)
    path = write_lora(tmp_path / "flux.safetensors", x)
    assert same(deltas(read_lora(path)), deltas(x), 1e-6)
    pipe.load_lora_weights(str(path))
    loaded = dict(pipe.transformer.named_modules())
    for name, layer in x.items():
        torch.testing.assert_close(loaded[name].get_delta_weight("default_0"), layer.delta(), atol=1e-6, rtol=0)
    with pytest.raises(VitrineError, match="auto, diffusers or peft"):
        write_lora(tmp_path / "k.safetensors", x, "kohya")
    theirs = lora(1, shapes={"double_blocks.0.img_attn.qkv": (96, 32)})
    with pytest.raises(VitrineError, match="auto or kohya"):
        write_lora(tmp_path / "d.safetensors", theirs, "diffusers")
    found = read_lora(write_lora(tmp_path / "c.safetensors", theirs))
    assert same(deltas(found), deltas(theirs), 0)


def test_a_pixart_space_exports_what_peft_loads(tmp_path):
    from peft import PeftModel

    network = models.pixart()
    x = of_transformer(network)
    write_lora(tmp_path / "p", x, "peft")
    loaded = dict(PeftModel.from_pretrained(network, str(tmp_path / "p")).base_model.model.named_modules())
    for name, layer in x.items():
        torch.testing.assert_close(loaded[name].get_delta_weight("default"), layer.delta(), atol=1e-6, rtol=0)
    assert same(deltas(read_lora(write_lora(tmp_path / "p.safetensors", x))), deltas(x), 1e-6)


def test_half_precision_keeps_alpha(tmp_path):
    x = lora(1, rank=257, alpha=257.0)
    found = read_lora(write_lora(tmp_path / "x.safetensors", x, dtype=torch.bfloat16))
    assert {v.alpha for v in found.values()} == {257.0} and same(deltas(found), deltas(x), 0.01)


def test_write_refuses(tmp_path):
    with pytest.raises(VitrineError, match="kohya"):
        write_lora(tmp_path / "x.safetensors", lora(1), "pickle")
    with pytest.raises(VitrineError, match="no layers"):
        write_lora(tmp_path / "x.safetensors", {})
    with pytest.raises(VitrineError, match=r"given str; .* materialise\(space, model\)"):
        write_lora(lora(1), "x.safetensors")
    assert not list(tmp_path.iterdir()) and diffusers_names(lora(1))
