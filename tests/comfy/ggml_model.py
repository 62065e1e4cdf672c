"""A stand-in for models that the pack ComfyUI-GGUF loads, in its layout: its tensor, its layer, its patcher.

As there, the bytes of a weight have another shape than ``shape`` says; ``clone`` and ``detach`` give the tensor itself;
LoRAs are kept on the tensor and added after each dequantisation, so that no backup of a weight exists.
"""

from enum import Enum

import comfy.lora
import comfy.ops
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from vitrine_tests.comfy import carried_models as tiny

BLOCK = 32


class Stored(Enum):
    """How a weight's numbers are written: names and numbers of the file format."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q8_0 = 8


PLAIN = (None, Stored.F32, Stored.F16)


class GGMLTensor(torch.Tensor):
    def __new__(cls, data, *, tensor_type, tensor_shape):
        return data.as_subclass(cls)

    def __init__(self, data, *, tensor_type, tensor_shape):
        super().__init__()
        self.tensor_type, self.tensor_shape, self.patches = tensor_type, tensor_shape, []

    def to(self, *args, **kwargs):
        moved = super().to(*args, **kwargs)
        moved.tensor_type, moved.patches = getattr(self, "tensor_type", None), list(getattr(self, "patches", []))
        moved.tensor_shape = getattr(self, "tensor_shape", moved.data.size())
        return moved

    def clone(self, *args, **kwargs):
        return self

    def detach(self, *args, **kwargs):
        return self

    @property
    def shape(self):
        return getattr(self, "tensor_shape", self.size())


def quantised(weight, kind):
    """A GGMLTensor of float32 numbers, in blocks of 32 with a scale in float16."""
    numbers = weight.detach().float().reshape(-1, BLOCK)
    if kind in PLAIN:
        return GGMLTensor(weight.to(torch.float16), tensor_type=kind, tensor_shape=weight.shape)
    most = 7 if kind is Stored.Q4_0 else 127
    scale = (numbers.abs().amax(1, keepdim=True) / most).to(torch.float16)
    whole = (numbers / scale.float().clamp(min=1e-9)).round().clamp(-most, most).to(torch.int8)
    if kind is Stored.Q4_0:
        low, high = (whole + 8).to(torch.uint8).chunk(2, 1)
        packed = low | high << 4
    else:
        packed = whole.view(torch.uint8)
    data = torch.cat([scale.view(torch.uint8), packed], 1).reshape(len(weight), -1)
    return GGMLTensor(data, tensor_type=kind, tensor_shape=weight.shape)


def dequantize_tensor(tensor, dtype=None):
    """The numbers of a tensor, without the LoRAs on it; the pack's ``ops`` has a function of this name."""
    if getattr(tensor, "tensor_type", None) in PLAIN:
        return tensor.to(dtype)
    four = tensor.tensor_type is Stored.Q4_0
    blocks = tensor.data.reshape(-1, 2 + BLOCK // (2 if four else 1)).view(torch.uint8)
    scale, packed = blocks[:, :2].view(torch.float16), blocks[:, 2:]
    whole = torch.cat([packed & 15, packed >> 4], 1).to(torch.int8) - 8 if four else packed.view(torch.int8)
    return (scale * whole).reshape(tensor.tensor_shape).to(dtype)


class Ops(comfy.ops.manual_cast):
    plain = torch.Tensor
    """As in the pack; PyTorch takes it in inference mode alone, so that no gradient passes."""

    class Linear(comfy.ops.manual_cast.Linear):
        def __init__(self, in_features, out_features, bias=True, device=None, dtype=None):
            torch.nn.Module.__init__(self)
            self.in_features, self.out_features, self.weight, self.bias = in_features, out_features, None, None

        def _load_from_state_dict(self, state, prefix, *rest):
            for name in ("weight", "bias"):
                if state.get(prefix + name) is not None:
                    setattr(self, name, torch.nn.Parameter(state[prefix + name], requires_grad=False))

        def _numbers(self, tensor, dtype):
            weight = dequantize_tensor(tensor, dtype)
            weight = Ops.plain(weight) if isinstance(weight, GGMLTensor) else weight
            for patches, key in getattr(tensor, "patches", []):
                weight = comfy.lora.calculate_weight(patches, weight, key)
            return weight

        def forward_comfy_cast_weights(self, input, *args, **kwargs):
            bias = None if self.bias is None else self._numbers(self.bias, input.dtype)
            return torch.nn.functional.linear(input, self._numbers(self.weight, input.dtype), bias)


class Patcher(ModelPatcher):
    def patch_weight_to_device(self, key, device_to=None, inplace_update=False):
        weight = comfy.utils.get_attr(self.model, key) if key in self.patches else None
        if getattr(weight, "tensor_type", None) in PLAIN:
            return super().patch_weight_to_device(key, device_to, inplace_update)
        weight = weight.to(device_to)
        weight.patches = [(self.patches[key], key)]
        comfy.utils.set_attr_param(self.model, key, weight)
        return None

    def unpatch_model(self, device_to=None, unpatch_weights=True):
        for parameter in self.model.parameters() if unpatch_weights else ():
            if getattr(parameter, "patches", None):
                parameter.patches = []
        return super().unpatch_model(device_to, unpatch_weights)

    def load(self, *args, force_patch_weights=False, **kwargs):
        super().load(*args, force_patch_weights=True, **kwargs)


def sd(kind, **more):
    """(float32 MODEL, the same as a GGUF file gives it: linear layers of the transformer in blocks, the rest F16)."""
    from comfy import supported_models

    class Tiny(supported_models.SD15):
        unet_extra_config = {"num_heads": 2, "num_head_channels": -1}

    whole, described = tiny.sd(**more), Tiny(tiny.unet_config(**more))
    described.custom_operations = Ops
    described.set_inference_dtype(torch.float32, None)
    model, weights = described.get_model({}, "", device=tiny.CPU), {}
    layers = {f"{path}.weight" for path, m in model.diffusion_model.named_modules() if isinstance(m, Ops.Linear)}
    for name, weight in whole.model.diffusion_model.state_dict().items():
        blocks = name in layers and weight.shape[1] % BLOCK == 0
        linear = name in layers or name.removesuffix("bias") + "weight" in layers
        weights[name] = quantised(weight, kind if blocks else Stored.F16) if linear else weight
    model.diffusion_model.load_state_dict(weights, strict=False)
    return whole, Patcher(model, load_device=tiny.CPU, offload_device=tiny.CPU)
