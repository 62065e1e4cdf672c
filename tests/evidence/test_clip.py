"""CLIP features of pictures and prompts."""

import pytest
import torch
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits import load_portraits
from vitrine.evidence.metrics.clip import Clip

SIDE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_cosines_are_clips_own(tmp_path):
    tokenizer = load_portraits().tokenizer
    text = SIDE | {"vocab_size": len(tokenizer), "max_position_embeddings": 16, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    config = CLIPConfig(text_config=text, vision_config=SIDE | {"image_size": 28, "patch_size": 14}, projection_dim=8)
    CLIPModel(config).save_pretrained(tmp_path)
    CLIPProcessor(CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=28), tokenizer).save_pretrained(tmp_path)
    clip, pictures = Clip.load(str(tmp_path)), torch.rand(3, 3, 64, 64)
    prompts = ["a face", "glasses", "long " * 40]
    inputs = clip.processor(
        text=prompts,
        images=list(pictures),
        do_rescale=False,
        return_tensors="pt",
        padding="max_length",
        truncation=True,
        max_length=16,
    )
    with torch.no_grad():
        wanted = clip.model(**inputs).logits_per_image.diagonal() / clip.model.logit_scale.exp()
    cosines = (clip.pictures(pictures) * clip.texts(prompts)).sum(1)
    torch.testing.assert_close(cosines, wanted.double(), rtol=1e-4, atol=1e-4)


def test_what_is_no_clip_is_refused(tmp_path):
    config = CLIPVisionConfig(**SIDE)
    CLIPVisionModelWithProjection(config).save_pretrained(tmp_path / "half")
    CLIPImageProcessor().save_pretrained(tmp_path / "half")
    for name in ("nowhere", "half"):
        with pytest.raises(VitrineError, match="clip-vit-base-patch16"):
            Clip.load(str(tmp_path / name))
