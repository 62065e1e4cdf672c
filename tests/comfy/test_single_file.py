"""A single file in the layout of Stable Diffusion's authors: every pipeline of ours reads it, as stock ones do.

ComfyUI's networks have the authors' names, so the portraits model in ComfyUI is what the file is written from; whole
files of full-size models are read in tests/full_size.
"""

import pytest
import torch
from safetensors.torch import save_file
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines import ActivationTapPipeline, NEMOPipeline
from vitrine.engine.pipelines.loading import LoadConfig, load_pipeline
from vitrine.engine.portraits import load_portraits
from vitrine_tests.machine.stock import modules


@pytest.fixture(scope="module")
def single(comfy, tmp_path_factory):
    """The file, and a folder with the configuration that goes with it."""
    folder = tmp_path_factory.mktemp("single")
    stock = load_portraits().pipeline()
    stock.save_pretrained(folder / "config")
    model, clip, vae = comfy.call("VitrineLoadPortraits")
    text = clip.cond_stage_model.clip_l.transformer.state_dict()
    tokens = "text_model.embeddings.token_embedding.weight"
    text[tokens] = text[tokens][: stock.text_encoder.config.vocab_size]
    parts = {
        "model.diffusion_model.": model.model.diffusion_model.state_dict(),
        "first_stage_model.": vae.first_stage_model.state_dict(),
        "cond_stage_model.transformer.": {k: v for k, v in text.items() if k.startswith("text_model.")},
    }
    tensors = {prefix + k: v.clone() for prefix, part in parts.items() for k, v in part.items()}
    save_file(tensors, folder / "portraits.safetensors")
    return folder / "portraits.safetensors", str(folder / "config")


def weights(pipe):
    return {f"{name}.{k}": v for name, part in modules(pipe).items() for k, v in part.state_dict().items()}


@pytest.mark.parametrize("kind", [ActivationTapPipeline, NEMOPipeline])
def test_ours_from_single_file(single, kind):
    """Taps had no such method, and others read whatever diffusers reads, pickles too."""
    path, config = single
    found, wanted = weights(kind.from_single_file(path, config=config)), weights(load_portraits().pipeline())
    assert found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)


def test_as_commands_load_it(single):
    path, config = single
    pipe = load_pipeline(str(path), NEMOPipeline, LoadConfig(device="cpu", dtype="float16", config=config))
    assert isinstance(pipe, NEMOPipeline)
    assert {part.dtype for part in modules(pipe).values()} == {torch.float16}


def test_what_it_is_not_is_refused(single, tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "old.ckpt")
    for kind in (NEMOPipeline, ActivationTapPipeline):
        with pytest.raises(VitrineError, match=r"old\.ckpt"):
            kind.from_single_file(tmp_path / "old.ckpt")
