"""Copy figures with real TorchScript and CLIP files at tiny size."""

import pytest
import torch
from torch import nn
from vitrine.engine.errors import VitrineError
from vitrine.evidence.metrics import copy_figures, load_clip, load_sscd


def test_figures_of_copies_and_of_others():
    g = torch.Generator().manual_seed(0)
    original = torch.rand(1, 3, 8, 8, generator=g) - 0.5
    copies = original.repeat(4, 1, 1, 1)
    others = torch.rand(4, 3, 8, 8, generator=g) - 0.5

    def flat(images):
        return images.flatten(1)

    same = copy_figures(copies, "p", flat, untouched=copies, original=original)
    assert all(abs(v - 1) < 1e-5 for v in same.values()) and set(same) == {
        "diversity", "similarity_orig", "similarity_gen",
    }  # fmt: skip
    away = copy_figures(others, "p", flat, untouched=copies, original=original)
    assert max(away.values()) < 0.4
    cosines = [float(torch.cosine_similarity(a.flatten(), original.flatten(), 0)) for a in others]
    assert abs(away["similarity_orig"] - sorted(cosines)[1]) < 1e-6
    with pytest.raises(VitrineError, match="two or more"):
        copy_figures(others[:1], "p", flat)


def test_sscd_file(tmp_path):
    net = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten())
    torch.jit.trace(net, torch.rand(2, 3, 320, 320)).save(str(tmp_path / "sscd.torchscript.pt"))
    describe = load_sscd(tmp_path / "sscd.torchscript.pt")
    images = torch.rand(3, 3, 64, 96)
    found = describe(images)
    assert found.shape == (3, 48) and torch.allclose(found.norm(dim=1), torch.ones(3), atol=1e-5)
    assert copy_figures(images, "p", describe, original=images[:1])["similarity_orig"] <= 1.00001
    (tmp_path / "no.pt").write_bytes(b"nothing")
    with pytest.raises(VitrineError, match="TorchScript"):
        load_sscd(tmp_path / "no.pt")
    with pytest.raises(VitrineError, match="local"):
        load_sscd(tmp_path / "absent.pt")


def test_clip_folder(tmp_path):
    from transformers import CLIPConfig, CLIPModel
    from vitrine.engine.portraits import load_portraits

    both = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = both | {"vocab_size": 512, "max_position_embeddings": 77, "bos_token_id": 456, "eos_token_id": 457}
    vision = both | {"image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(tmp_path)
    load_portraits().tokenizer.save_pretrained(tmp_path)
    agree = load_clip(tmp_path)
    images = torch.rand(3, 3, 64, 64)
    one = agree(images, ["a smiling dark face"] * 3)
    two = agree(images, ["a neutral pale face"] * 3)
    assert one.shape == (3,) and float(one.abs().max()) <= 1 and not torch.equal(one, two)
    assert "agreement" in copy_figures(images, "a face", lambda x: x.flatten(1), agree=agree)
    with pytest.raises(VitrineError, match=r"config\.json"):
        load_clip(tmp_path / "none")
