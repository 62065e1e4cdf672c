"""Core's own text encoders at a small width, with random weights, for families whose prompts several of them read.

Widths come from ``model_options``, as core lets a file set them; what a released encoder has more of is depth. A small
network takes narrower states than three layers or two encoders side by side give: they are cut to its width.
"""

import base64
import json
from unittest import mock

import torch

CLIP_L = {"num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
LLAMA = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16}
T5 = {"num_layers": 1, "num_heads": 2, "d_kv": 10, "d_ff": 16}
FEW_LAYERS = [0, 1, 2]
"""Which layers of a small language model stand for the three that Flux.2 takes."""


def _flux():
    from comfy.text_encoders import flux

    widths = {"clip_l_model_config": CLIP_L | {"hidden_size": 24}, "t5xxl_model_config": T5 | {"d_model": 20}}
    return flux.FluxTokenizer, flux.flux_clip(), widths, {}


def _sd35():
    """Without T5, which core sets beside the other two at its full width of 4096."""
    from comfy.text_encoders import sd3_clip

    config = CLIP_L | {"hidden_size": 12}
    widths = {"clip_l_model_config": config, "clip_g_model_config": config}
    return sd3_clip.SD3Tokenizer, sd3_clip.sd3_clip(t5=False), widths, {}


def _hidream():
    """Its Llama's vocabulary is a large file, which not every checkout has: single bytes."""
    from comfy.sd1_clip import SDTokenizer
    from comfy.sdxl_clip import SDXLClipGTokenizer
    from comfy.text_encoders import flux, hidream, sd3_clip

    class Tokenizer(hidream.HiDreamTokenizer):
        def __init__(self, embedding_directory=None, tokenizer_data=None):
            self.clip_l, self.clip_g = SDTokenizer(), SDXLClipGTokenizer()
            self.t5xxl = sd3_clip.T5XXLTokenizer(min_length=128, max_length=128)
            self.llama = SDTokenizer(
                "",
                tokenizer_class=flux.MistralTokenizerClass,
                has_end_token=False,
                start_token=1,
                pad_token=11,
                min_length=128,
                max_length=99999999,
                pad_with_end=False,
                pad_to_max_length=False,
                embedding_key="llama",
                tokenizer_args=flux.load_mistral_tokenizer(_bytes_as_tokens()),
            )

    config = CLIP_L | {"hidden_size": 14}
    widths = {
        "clip_l_model_config": config,
        "clip_g_model_config": config,
        "t5xxl_model_config": T5 | {"d_model": 20},
        "llama_model_config": LLAMA | {"hidden_size": 24},
    }
    return Tokenizer, hidream.hidream_clip(), widths, {}


def _language(model, **more):
    """A class of core's that reads three layers: small."""

    class Small(model):
        def __init__(self, device="cpu", dtype=None, model_options=None, **kwargs):
            options = (model_options or {}) | {"model_name": "small", "small_model_config": more}
            super().__init__(device=device, dtype=dtype, layer=FEW_LAYERS, model_options=options)

    return Small


def _flux2():
    from comfy.text_encoders import flux

    small = _language(flux.Mistral3_24BModel, **LLAMA | {"hidden_size": 8, "num_hidden_layers": 3})

    class Encoder(flux.Flux2TEModel):
        def __init__(self, device="cpu", dtype=None, model_options=None):
            super().__init__(device=device, dtype=dtype, model_options=model_options or {}, clip_model=small)

    return flux.Flux2Tokenizer, Encoder, {}, {"tekken_model": _bytes_as_tokens()}


def _klein():
    from comfy.text_encoders import flux

    small = _language(flux.Qwen3_4BModel, **LLAMA | {"hidden_size": 8, "num_hidden_layers": 3})

    class Encoder(flux.Flux2TEModel):
        def __init__(self, device="cpu", dtype=None, model_options=None):
            options = model_options or {}
            super().__init__(device=device, dtype=dtype, name="qwen3_4b", model_options=options, clip_model=small)

    return flux.KleinTokenizer, Encoder, {}, {}


def _qwen_image():
    """Without the tower that reads pictures."""
    from comfy.text_encoders import llama, qwen_image

    class Words(llama.Qwen25_7BVLI):
        def __init__(self, config, dtype, device, operations):
            torch.nn.Module.__init__(self)
            shape = llama.Qwen25_7BVLI_Config(**config)
            self.num_layers, self.dtype = shape.num_hidden_layers, dtype
            self.model = llama.Llama2_(shape, device=device, dtype=dtype, ops=operations)

    class Small(qwen_image.Qwen25_7BVLIModel):
        def __init__(self, **how):
            with mock.patch.object(llama, "Qwen25_7BVLI", Words):
                super().__init__(**how)

    class Encoder(qwen_image.QwenImageTEModel):
        def __init__(self, device="cpu", dtype=None, model_options=None):
            with mock.patch.object(qwen_image, "Qwen25_7BVLIModel", Small):
                super().__init__(device=device, dtype=dtype, model_options=model_options or {})

    return qwen_image.QwenImageTokenizer, Encoder, {"qwen25_7b_model_config": LLAMA | {"hidden_size": 24}}, {}


def _z_image():
    from comfy.text_encoders import z_image

    widths = {"qwen3_4b_model_config": LLAMA | {"hidden_size": 20, "num_hidden_layers": 3}}
    return z_image.ZImageTokenizer, z_image.te(), widths, {}


def _bytes_as_tokens():
    """Mistral's tokenizer comes with its file: one of single bytes."""
    special = [{"rank": i, "token_str": s} for i, s in enumerate(("<unk>", "<s>", "</s>", "[INST]", "[/INST]"))]
    special += [{"rank": i, "token_str": f"<SPECIAL_{i}>"} for i in range(5, 20)]
    words = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode()} for i in range(256)]
    config = {"default_num_special_tokens": len(special), "default_vocab_size": len(special) + len(words)}
    return json.dumps({"config": config, "vocab": words, "special_tokens": special}).encode()


KINDS = {
    "flux": _flux,
    "sd35": _sd35,
    "hidream": _hidream,
    "flux2": _flux2,
    "klein": _klein,
    "qwen_image": _qwen_image,
    "z_image": _z_image,
}
"""Family -> core's tokenizer, encoder, what sets its widths, and what its tokenizer needs of the file."""


def clip(name, width):
    """CLIP of a family, whose states are ``width`` wide."""
    import comfy.sd
    from comfy.supported_models_base import ClipTarget

    tokenizer, encoder, widths, files = KINDS[name]()

    class Cut(encoder):
        def encode_token_weights(self, token_weight_pairs):
            text, *more = super().encode_token_weights(token_weight_pairs)
            return text[..., :width], *more

    options = widths | {"dtype": torch.float32}
    clip = comfy.sd.CLIP(ClipTarget(tokenizer, Cut), tokenizer_data=files, model_options=options)
    g = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in clip.cond_stage_model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=g))
    return clip
