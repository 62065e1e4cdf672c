"""Which students a pipeline takes: its own exports in every form, others by preset, none of another model."""

import pytest
import torch
from vitrine.engine.emd import StudentPreset, check_network
from vitrine.engine.emd.export import export
from vitrine.engine.errors import VitrineError
from vitrine.engine.io.files import save_safetensors
from vitrine.engine.pipelines import EMDOneStepPipeline
from vitrine.engine.portraits import load_portraits
from vitrine_tests import models

PROMPT = "a smiling face"


@pytest.fixture
def pipe():
    pipe = EMDOneStepPipeline.from_pipe(load_portraits().pipeline())
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def weights(pipe):
    """A random adapter under PEFT's names."""
    g, out = torch.Generator().manual_seed(3), {}
    for path in ("down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_v", "mid_block.attentions.0.proj_in"):
        linear = pipe.unet.get_submodule(path)
        out[f"{path}.lora_A.generator.weight"] = torch.randn(2, linear.weight.shape[1], generator=g)
        out[f"{path}.lora_B.generator.weight"] = torch.randn(linear.weight.shape[0], 2, generator=g)
    return {k: v[..., None, None] if "proj_in" in k else v for k, v in out.items()}


def drawn(pipe, **more):
    return pipe(PROMPT, seeds=[1], output_type="latent", **more).images


def test_both_exports_load_and_draw_the_same(pipe, weights, tmp_path):
    preset, before = StudentPreset("portraits", 625.0), drawn(pipe)
    pictures = []
    for path in export(tmp_path, weights, "generator", preset):
        fresh = EMDOneStepPipeline.from_pipe(load_portraits().pipeline())
        assert fresh.load_student(path, base="portraits") == preset
        pictures.append(drawn(fresh, preset=preset))
    assert torch.equal(*pictures) and not torch.allclose(pictures[0], before, atol=1e-2)


def test_a_second_student_takes_the_firsts_place(pipe, weights, tmp_path):
    preset = StudentPreset("portraits", 625.0)
    first = export(tmp_path / "first", weights, "generator", preset)[0]
    second = export(tmp_path / "second", {k: -2 * v for k, v in weights.items()}, "generator", preset)[0]
    pipe.load_student(second)
    alone = drawn(pipe, preset=preset)
    pipe.load_student(first)
    assert not torch.allclose(drawn(pipe, preset=preset), alone, atol=1e-2)
    pipe.load_student(second)
    assert torch.equal(drawn(pipe, preset=preset), alone)


def test_students_of_others_load_by_preset(pipe, weights, tmp_path):
    from vitrine.engine.io.lora_writing import kohya, of_peft

    file = save_safetensors(tmp_path / "theirs.safetensors", kohya(of_peft(weights)), {})
    with pytest.raises(VitrineError, match="student preset: given none"):
        pipe.load_student(file)
    with pytest.raises(VitrineError, match="preset: given DMD3"):
        pipe.load_student(file, preset="DMD3")
    mine = StudentPreset(timestep=399.0)
    assert pipe.load_student(file, preset=mine) == mine


def test_a_preset_of_another_model_is_refused(pipe, weights, tmp_path):
    from vitrine.engine.io.lora_writing import kohya, of_peft

    file = save_safetensors(tmp_path / "theirs.safetensors", kohya(of_peft(weights)), {})
    with pytest.raises(VitrineError, match="a UNet of SD1.5"):
        pipe.load_student(file, preset="DMD2 SD1.5")
    with pytest.raises(VitrineError, match="a UNet of SDXL"):
        pipe(PROMPT, preset=StudentPreset("SDXL", 399.0))


@pytest.mark.parametrize("make", [models.flux, models.sd3, models.pixart])
def test_and_on_a_transformer(make):
    with pytest.raises(VitrineError, match="Transformer2DModel; accepted: a UNet of SD1.5"):
        check_network(StudentPreset("SD1.5"), make())


def test_the_right_models_pass():
    check_network(StudentPreset("SD1.5 or SD2.1-base"), models.outline(**models.SD21))
    check_network(StudentPreset("SD1.5"), models.outline(**models.SD15))
    check_network(StudentPreset("SDXL"), models.outline(**models.SDXL))
    check_network(StudentPreset("somebody's model"), models.unet())
