"""Keys by number are those of the modules that lora_diffusion numbered, in diffusers' real UNet; others are refused."""

import json

import pytest
import torch
from diffusers import UNet2DConditionModel
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel
from vitrine.engine.errors import VitrineError
from vitrine.engine.w2w.loras.lora_files import read_header, read_lora
from vitrine.engine.w2w.loras.numbered_keys import layers_in_order

CLASSES = {"CrossAttention", "Attention", "GEGLU"}
ORDERS = {"until 2023": ("attn1", "ff", "attn2"), "later": ("attn1", "attn2", "ff")}


@pytest.fixture(scope="module")
def networks():
    """Context width -> UNet of Stable Diffusion 1.5's or 2's shape, without weights."""
    with torch.device("meta"):
        return {width: UNet2DConditionModel(cross_attention_dim=width) for width in (768, 1024)}


def numbered(network, order, classes=CLASSES):
    """(module, (out, in)) by number, as lora_diffusion walks a network: linear layers below these classes."""
    names = []
    for module in network.modules():
        if type(module).__name__ == "BasicTransformerBlock":  # the order in which diffusers made its parts
            first = {name: module._modules[name] for name in order if name in module._modules}
            rest = {name: part for name, part in module._modules.items() if name not in first}
            module._modules.clear()
            module._modules.update(first | rest)
    for path, module in network.named_modules():
        if type(module).__name__ in classes:
            for name, layer in module.named_modules():
                if isinstance(layer, torch.nn.Linear):
                    names.append((f"{path}.{name}", (layer.out_features, layer.in_features)))
    return names


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("width", [768, 1024])
def test_the_numbers_are_those_of_the_real_class(networks, order, width):
    wanted = numbered(networks[width], ORDERS[order])
    assert len(wanted) == 144 and wanted == layers_in_order(ORDERS[order], width)
    assert wanted != layers_in_order(ORDERS["later" if order == "until 2023" else "until 2023"], width)


def test_without_geglu_too(networks):
    assert numbered(networks[768], ORDERS["later"], {"Attention"}) == layers_in_order(("attn1", "attn2"), 768)


def test_text_encoders_have_the_order_of_transformers():
    config = CLIPTextConfig(num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=2)
    (attention,) = [m for m in CLIPTextModel(config).modules() if "Attention" in type(m).__name__]
    names = [name for name, layer in attention.named_modules() if isinstance(layer, torch.nn.Linear)]
    assert names == ["k_proj", "v_proj", "q_proj", "out_proj"]


def tensors(order=("attn1", "ff", "attn2"), width=768, rank=2, text=4):
    """A file's tensors, each with its number in it, and module -> its two factors."""
    made, truth = {}, {}
    for number, (path, (out, inner)) in enumerate(layers_in_order(order, width)):
        up, down = torch.full((out, rank), number + 1.0), torch.full((rank, inner), 0.01)
        up[0], down[:, 0] = 3.0, 0.02
        made |= {f"unet:{number}:up": up, f"unet:{number}:down": down}
        truth[path] = up, down
    for number in range(text):
        made |= {
            f"text_encoder:{number}:up": torch.ones(width, rank),
            f"text_encoder:{number}:down": torch.ones(rank, width),
        }
    return made, truth


def header(made, classes=tuple(CLASSES)):
    said = {key.replace(":down", ":rank"): str(len(v)) for key, v in made.items() if key.endswith(":down")}
    return said | {"unet": json.dumps(classes), "text_encoder": '["CLIPAttention"]'}


def written(path, made, said=None):
    save_file(made, path, header(made) if said is None else said)
    return path


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("width", [768, 1024])
def test_each_layer_has_its_change(tmp_path, order, width):
    made, truth = tensors(ORDERS[order], width)
    made["<s1>"] = torch.ones(width)
    file = read_header(written(tmp_path / "a.safetensors", made))
    assert file.shaped_base.startswith("Stable Diffusion 1" if width == 768 else "Stable Diffusion 2")
    assert file.text_layers == 4 and file.ranks == [2] and file.dropped == ("embeddings (bundle_emb)",)
    layers = read_lora(file)
    assert layers.keys() == truth.keys()
    for path, layer in layers.items():
        up, down = truth[path]
        x = torch.randn(down.shape[1], 3, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(layer.scale * layer.up @ (layer.down @ x), up @ (down @ x))


def test_a_header_without_ranks_is_read(tmp_path):
    made, truth = tensors()
    assert read_header(written(tmp_path / "a.safetensors", made, {})).entries.keys() == truth.keys()


def swapped(made):
    """GEGLU where its neighbour is."""
    a, b = ({side: made[f"unet:{n}:{side}"] for side in ("up", "down")} for n in (4, 5))
    return made | {f"unet:4:{k}": v for k, v in b.items()} | {f"unet:5:{k}": v for k, v in a.items()}


WRONG = {
    "a layer is missing": lambda made: {k: v for k, v in made.items() if ":143:" not in k},
    "a factor is missing": lambda made: {k: v for k, v in made.items() if k != "unet:3:up"},
    "one too many": lambda made: made | {"unet:144:up": torch.ones(320, 2), "unet:144:down": torch.ones(2, 320)},
    "another order": swapped,
    "another width": lambda made: made | {"unet:0:up": torch.ones(640, 2)},
    "factors of two ranks": lambda made: made | {"unet:0:up": torch.ones(320, 3)},
    "a convolution": lambda made: made | {"unet:0:up": torch.ones(320, 2, 1, 1)},
    "a text encoder's number is missing": lambda made: {k: v for k, v in made.items() if "encoder:3" not in k},
    "an empty factor": lambda made: made | {"unet:0:up": torch.ones(320, 0), "unet:0:down": torch.ones(0, 320)},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(tmp_path, name):
    made, _ = tensors()
    with pytest.raises(VitrineError, match="LoRA file|rank of unet:0"):
        read_header(written(tmp_path / "a.safetensors", WRONG[name](made)))


@pytest.mark.parametrize("said", ["3", "0", "-2", "2.0", "9" * 400, "", "NaN"])
def test_the_header_s_rank_is_that_of_its_factors(tmp_path, said):
    made, _ = tensors()
    with pytest.raises(VitrineError, match="rank"):
        read_header(written(tmp_path / "a.safetensors", made, header(made) | {"unet:7:rank": said}))


def test_other_classes_are_named(tmp_path):
    """lora_diffusion's extended set numbers convolutions of the residual blocks too."""
    made, _ = tensors()
    made |= {"unet:144:up": torch.ones(320, 2), "unet:144:down": torch.ones(2, 1280)}
    said = header(made, ["ResnetBlock2D", *CLASSES])
    with pytest.raises(
        VitrineError, match="145 layers by number below Attention, CrossAttention, GEGLU, ResnetBlock2D"
    ):
        read_header(written(tmp_path / "a.safetensors", made, said))
