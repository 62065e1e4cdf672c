"""Where a prompt's first word is among the text tokens of a network: the same position in both libraries.

Core's text encoders and the pipelines' own ``encode_prompt``, of small width, with the published tokenizers of CLIP and
Qwen. These encoders read from left to right, so a changed word changes nothing before it.
"""

import pytest
import torch
from vitrine_tests.comfy import tiny_encoders
from vitrine_tests.comfy.conftest import COMFYUI

WORDS = ("red", "blue")
CLIP = "CLIP"
FIRST = {CLIP: 1, "qwen_image": 0, "z_image": 3, "klein": 3}
"""Encoder -> position of the first word."""
SAID = {
    CLIP: ("SD 1.x, SD 2.x, SDXL", "the start token"),
    "qwen_image": ("Qwen-Image", "nothing: both libraries cut the template's 34 tokens off"),
    "z_image": ("Z-Image", "the template's `<|im_start|>`, `user` and line break"),
    "klein": ("FLUX.2 Klein", "the template's `<|im_start|>`, `user` and line break"),
}
"""Encoder -> its families, and what is in front of the first word."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
"""Qwen3's, as far as a prompt needs it; the tokenizer that ComfyUI brings has that of Qwen2.5."""


def first_change(texts):
    """From two text states (N, C) and (N, C) of prompts that differ in their only word."""
    one, other = texts
    assert one.shape == other.shape
    changed = (one - other).abs().amax(1) > 1e-6
    return int(changed.nonzero()[0]), len(one)


def in_comfyui(name):
    if name != CLIP:
        clip = tiny_encoders.clip(name, 16)
    else:
        from comfy import sd
        from comfy.sd1_clip import SD1ClipModel, SD1Tokenizer
        from comfy.supported_models_base import ClipTarget

        options = {"clip_l_model_config": tiny_encoders.CLIP_L | {"hidden_size": 16}, "dtype": torch.float32}
        clip = sd.CLIP(ClipTarget(SD1Tokenizer, SD1ClipModel), model_options=options)
        g = torch.Generator().manual_seed(6)
        with torch.no_grad():
            for parameter in clip.cond_stage_model.parameters():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=g))
    with torch.inference_mode():
        return [clip.encode_from_tokens_scheduled(clip.tokenize(word))[0][0][0] for word in WORDS]


def tokenizer(name):
    from transformers import CLIPTokenizer, Qwen2Tokenizer

    if name == CLIP:
        return CLIPTokenizer.from_pretrained(COMFYUI / "comfy" / "sd1_tokenizer", model_max_length=77)
    made = Qwen2Tokenizer.from_pretrained(COMFYUI / "comfy" / "text_encoders" / "qwen25_tokenizer")
    made.chat_template = TEMPLATE
    return made


def pipeline(name):
    """A pipeline with its tokenizer and a small text encoder, as far as ``encode_prompt`` asks."""
    import diffusers
    import transformers

    torch.manual_seed(3)
    sizes = {
        "vocab_size": 152064,
        "hidden_size": 16,
        "num_hidden_layers": 28 if name == "klein" else 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 16,
    }
    words = tokenizer(name)
    if name == "qwen_image":
        text = sizes | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6}}
        vision = {"depth": 1, "hidden_size": 16, "out_hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
        encoder = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
        return diffusers.QwenImagePipeline(None, None, encoder, words, None)
    if name in ("z_image", "klein"):
        encoder = transformers.Qwen3Model(transformers.Qwen3Config(**sizes, head_dim=8)).eval()
        kind = diffusers.ZImagePipeline if name == "z_image" else diffusers.Flux2KleinPipeline
        return kind(scheduler=None, vae=None, text_encoder=encoder, tokenizer=words, transformer=None)
    config = transformers.CLIPTextConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, max_position_embeddings=77
    )
    encoder = transformers.CLIPTextModel(config).eval()
    return diffusers.StableDiffusionPipeline(None, encoder, words, None, None, None, None)


def in_diffusers(name):
    pipe = pipeline(name)
    more = {}
    if name == CLIP:
        more = {"device": "cpu", "num_images_per_prompt": 1, "do_classifier_free_guidance": False}
    if name == "z_image":
        more = {"do_classifier_free_guidance": False}
    with torch.inference_mode():
        return [pipe.encode_prompt(prompt=word, **more)[0][0] for word in WORDS]


@pytest.mark.parametrize("name", FIRST)
def test_the_first_word_has_one_position_in_both_libraries(comfy, name):
    position, length = first_change(in_comfyui(name))
    assert position == FIRST[name]
    assert first_change(in_diffusers(name)) == (position, length)
