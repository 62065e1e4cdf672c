"""Gradients through ComfyUI's casting layers: weights kept in float16, computed in float32."""

import sys

import pytest
import torch
from vitrine.engine.network.light_gradients import computed_again, copies_its_weights, parts_of


@pytest.fixture
def network(comfy):
    """The portraits UNet as ComfyUI keeps a checkpoint under ``--fp16-unet`` on a CPU."""
    kinds = [
        kind
        for name, module in list(sys.modules.items())
        for kind in vars(module).values()
        if name.endswith("nodes.comfy.portraits") and isinstance(kind, type) and "set_inference_dtype" in dir(kind)
    ]
    with pytest.MonkeyPatch.context() as patch:
        for kind in kinds:
            method = kind.set_inference_dtype
            halved = lambda self, dtype, manual, method=method: method(self, torch.float16, torch.float32)  # noqa: E731
            patch.setattr(kind, "set_inference_dtype", halved)
        model = comfy.call("VitrineLoadPortraits", model="portraits, 64 px")[0]
    return model.model.diffusion_model.requires_grad_(False)


def gradient(network, parts):
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    g = torch.Generator().manual_seed(0)
    x, t = torch.randn(1, 4, 16, 16, generator=g), torch.tensor([300.0])
    text = torch.randn(1, 24, 64, generator=g, requires_grad=True)
    options = {"which": {"nothing": 1}}
    with computed_again(parts), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = network(x, t, context=text, transformer_options=options)
        (slope,) = torch.autograd.grad(out.square().sum(), text)
    return slope, sum(kept.values())


def test_copies_of_weights_are_not_kept(network):
    weights = sum(p.numel() for p in network.parameters()) * 4
    assert copies_its_weights(network, torch.device("cpu")) and network.dtype == torch.float16
    shapes = (torch.zeros(1, 4, 16, 16), torch.zeros(1), torch.zeros(1, 24, 64))
    parts = parts_of(network, lambda: network(*shapes[:2], context=shapes[2], transformer_options={}))
    plain, much = gradient(network, [])
    light, little = gradient(network, parts)
    assert torch.equal(plain, light) and much > weights and little < much / 3, (much, little, weights)
