"""The files are what the models' authors publish: ComfyUI and diffusers read every tensor and miss none."""

import logging

import pytest
import torch
from vitrine.engine.pipelines.loading import LoadConfig, load_pipeline
from vitrine_tests.full_size.checkpoint import ensure, listing
from vitrine_tests.full_size.conftest import families
from vitrine_tests.full_size.material import CLASSES, configuration

COUNTS = {"sd15": (1130, 1_066_235_307), "sdxl": (2514, 3_468_837_868)}
"""Tensors and numbers; SDXL's authors give 3.5 billion."""

NO_SD_FILE_HAS = "clip missing: ['clip_l.logit_scale', 'clip_l.transformer.text_projection.weight']"
"""Neither the published files nor those that ComfyUI saves: the models do not use them."""


@pytest.mark.parametrize("family", families())
def test_names_shapes_and_scale(comfy, family):
    from safetensors import safe_open

    wanted = listing(family)
    with safe_open(ensure(family), "pt") as file:
        names = list(file.keys())  # noqa: SIM118
        assert set(names) == set(wanted)
        assert all(file.get_slice(n).get_shape() == list(wanted[n].shape) for n in names)
        for name in names[::40]:
            value = file.get_tensor(name)
            assert value.dtype == torch.float16 and bool(torch.isfinite(value).all()), name
    assert (len(names), sum(v.numel() for v in wanted.values())) == COUNTS[family]


@pytest.mark.parametrize("family", families())
def test_comfyui_misses_nothing(comfy, precision, family, caplog):
    """Its loader says only in the log what it missed or did not know."""
    node = comfy.nodes.NODE_CLASS_MAPPINGS["CheckpointLoaderSimple"]()
    import folder_paths

    folder_paths.add_model_folder_path("checkpoints", str(ensure(family).parent))
    dtype = precision(family)
    with caplog.at_level(logging.DEBUG), torch.inference_mode():
        model, clip, vae = node.load_checkpoint(ensure(family).name)
    said = [r.getMessage() for r in caplog.records]
    words = ("missing", "unexpected", "leftover", "left over keys")
    complaints = {m for m in said if any(w in m.lower() for w in words) and "dict_keys([])" not in m}
    assert complaints <= {NO_SD_FILE_HAS}
    assert model.model.diffusion_model.dtype == dtype
    assert clip is not None and vae.first_stage_model is not None


@pytest.mark.parametrize("family", families())
def test_diffusers_misses_nothing(comfy, family, caplog):
    """A tensor it missed would have no content, one it did not know would lack in the sum."""
    settings = LoadConfig(device="cpu", dtype="float16", config=str(configuration(family)))
    with caplog.at_level(logging.DEBUG, "diffusers"):
        pipe = load_pipeline(str(ensure(family)), None, settings)
    assert type(pipe).__name__ == CLASSES[family]
    assert not [r for r in caplog.records if "not used" in r.getMessage()]
    tensors = [p for part in pipe.components.values() if isinstance(part, torch.nn.Module) for p in part.parameters()]
    assert not any(p.is_meta for p in tensors)
    assert all(p.dtype == torch.float16 for p in tensors)
    scales = {"sd15": 0, "sdxl": 1}[family]  # CLIP's logit scale is part of the file, and of no text encoder
    assert sum(p.numel() for p in tensors) == COUNTS[family][1] - scales
