"""The size a model was trained at, as both doors say it, and what may stand in front of *Fit Model to Size*."""

import logging

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.families import trained_size
from vitrine.engine.portraits.flow import load_flow_portraits
from vitrine.engine.resolution import facts_of as pipeline_facts
from vitrine_tests.families.twin import NAMES, comfyui_model, comfyui_twin, network, twin
from vitrine_tests.lanes import nightly_but
from vitrine_tests.pipelines.encoded import SOURCES, source

PLAIN = {
    "train_width": 0,
    "train_height": 0,
    "target_width": 1536,
    "target_height": 2048,
    "schedule": "resample",
    "pos_embed": "auto",
    "guidance_law": False,
    "guidance": 1.0,
    "override": False,
}
SIZES = {"qwen_image": (1328, 1328), "wan": (832, 480)}


def transferred(comfy, model, **more):
    return comfy.call("VitrineResolutionTransferLoader", model=model, **PLAIN | more)


def model_of(name):
    return comfyui_model(name, comfyui_twin(name, network(name)))


def patcher(base):
    from comfy.model_patcher import ModelPatcher

    return ModelPatcher(base, torch.device("cpu"), torch.device("cpu"))


@pytest.mark.parametrize("name", nightly_but([n for n in NAMES if hasattr(twin(n), "MODEL")]))
def test_zero_takes_the_familys_size_without_a_warning(comfy, name, caplog):
    from vitrine.nodes.comfy.resolution import facts_of

    model, size = model_of(name), SIZES.get(name, (1024, 1024))
    with caplog.at_level(logging.WARNING):
        facts = facts_of(model)
        line = transferred(comfy, model)[2].splitlines()[1]
    assert "doesn't exist" not in caplog.text, "core warns of every name that its configs do not have"
    assert facts.train_size == size == trained_size(network(name))
    assert f"{size[0]} x {size[1]} -> 1536 x 2048" in line


@pytest.mark.parametrize("name", [n for n in SOURCES if n not in ("sdxl", "sd3", "pixart", "lumina2")])
def test_pipelines_take_the_same(name):
    """Those left out say in their config what they were built for, which comes first; the tiny ones say another."""
    assert pipeline_facts(source(name)[0]).train_size == SIZES.get(name, (1024, 1024))


def test_the_flow_portraits_say_their_own(comfy):
    from vitrine.nodes.comfy.resolution import facts_of

    model = comfy.call("VitrineLoadPortraits", model="flow portraits, 128 px")[0]
    assert facts_of(model).train_size == pipeline_facts(load_flow_portraits().pipeline()).train_size == (128, 128)


def test_sd2_by_what_it_predicts(comfy):
    """ComfyUI has one class for SD2-base, 512 px, which predicts noise, and SD2, 768 px, which predicts velocity."""
    from comfy.model_base import BaseModel, ModelType
    from comfy.supported_models import SD20
    from vitrine.nodes.comfy.resolution import facts_of

    for kind, side in (("EPS", 512), ("V_PREDICTION", 768)):
        unet = {"model_channels": 64, "in_channels": 4, "out_channels": 4, "num_res_blocks": [1, 1],
                "channel_mult": [1, 2], "transformer_depth": [1, 1], "transformer_depth_output": [1, 1, 1, 1],
                "transformer_depth_middle": 1, "context_dim": 16, "use_spatial_transformer": True,
                "use_linear_in_transformer": True, "image_size": 32}  # fmt: skip
        config = SD20(unet)
        config.set_inference_dtype(torch.float32, None)
        assert facts_of(patcher(BaseModel(config, ModelType[kind], device="cpu"))).train_size == (side, side)


def test_a_transformer_of_no_known_family_is_refused(comfy):
    """Its positions would stay while everything else moved; `keep` moves the noise schedule alone, and says so."""
    from comfy.ldm.aura.mmdit import MMDiT
    from comfy.ops import disable_weight_init
    from comfy.supported_models import AuraFlow

    config = AuraFlow({"disable_unet_model_creation": True})
    config.set_inference_dtype(torch.float32, None)
    base = config.get_model({}, "")
    base.diffusion_model = MMDiT(
        dim=16,
        n_heads=2,
        n_layers=1,
        n_double_layers=1,
        cond_seq_dim=8,
        max_seq=64,
        global_conddim=16,
        operations=disable_weight_init,
    )
    model = patcher(base)
    size = {"train_width": 1024, "train_height": 1024}
    with pytest.raises(VitrineError, match="which are unknown"):
        transferred(comfy, model, **size)
    report = transferred(comfy, model, pos_embed="keep", **size)[2]
    assert "positions: unknown; unchanged" in report and "shift 1.73 ->" in report


def test_hidreams_pipeline_is_refused():
    """It scales every height and width to one area before it draws."""
    from types import SimpleNamespace

    with pytest.raises(VitrineError, match="one area"):
        pipeline_facts(SimpleNamespace(transformer=network("hidream"), scheduler=None))


def test_a_shift_set_in_front_is_named(comfy):
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    model = model_of("z_image")
    own = transferred(comfy, model)[2]
    (shifted,) = ModelSamplingSD3().patch(model, 6.0)
    report = transferred(comfy, shifted)[2]
    assert "set by a node before this one" in report and "choose schedule none" in report
    assert "r x the shift set by a node before this one" in report and "shift 6 ->" in report
    assert "node before" not in own and "r x the model's own" in own
    assert "node before" not in transferred(comfy, shifted, schedule="none")[2]
