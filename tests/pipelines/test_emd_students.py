"""Which students a pipeline takes: its own exports in every form, others by preset, none of another model."""

import copy

import pytest
import torch
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.noise import seeded_noise
from vitrine.engine.emd import StudentPreset, check_network, one_step, read_student
from vitrine.engine.emd.export import export
from vitrine.engine.errors import VitrineError
from vitrine.engine.io.files import save_safetensors
from vitrine.engine.pipelines import EMDOneStepPipeline
from vitrine.engine.pipelines.emd import one_step_pipeline
from vitrine.engine.portraits import caption, load_portraits, sample_scenes
from vitrine.engine.portraits.shipped import STUDENTS, student_file
from vitrine.evidence.portraits.classifier import attribute_accuracy, load_classifier, read
from vitrine_tests import models
from vitrine_tests.pipelines.encoded import source

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


def test_students_of_others_load_by_preset_of_this_model(pipe, weights, tmp_path):
    from vitrine.engine.io.lora_writing import kohya, of_peft

    file = save_safetensors(tmp_path / "theirs.safetensors", kohya(of_peft(weights)), {})
    with pytest.raises(VitrineError, match="student preset: given none"):
        pipe.load_student(file)
    with pytest.raises(VitrineError, match="preset: given DMD3"):
        pipe.load_student(file, preset="DMD3")
    mine = StudentPreset(timestep=399.0)
    assert pipe.load_student(file, preset=mine) == mine
    with pytest.raises(VitrineError, match="a UNet of SD1.5"):
        pipe.load_student(file, preset="DMD2 SD1.5")
    with pytest.raises(VitrineError, match="a UNet of SDXL"):
        pipe(PROMPT, preset=StudentPreset("SDXL", 399.0))


@pytest.mark.parametrize("make", [models.flux, models.sd3, models.pixart])
def test_a_preset_of_a_unet_is_refused_on_a_transformer(make):
    with pytest.raises(VitrineError, match="Transformer2DModel; accepted: a UNet of SD1.5"):
        check_network(StudentPreset("SD1.5"), make())


def test_the_right_models_pass():
    check_network(StudentPreset("SD1.5 or SD2.1-base"), models.outline(**models.SD21))
    check_network(StudentPreset("SD1.5"), models.outline(**models.SD15))
    check_network(StudentPreset("SDXL"), models.outline(**models.SDXL))
    check_network(StudentPreset("somebody's model"), models.unet())


@pytest.mark.parametrize("part", ["unet", "transformer"])
def test_a_whole_network_loads_and_leaves_the_source_alone(part, tmp_path):
    stock, size = (
        (load_portraits().pipeline(), {}) if part == "unet" else (source("flux")[0], {"height": 64, "width": 64})
    )
    network = getattr(stock, part)
    changed, preset = copy.deepcopy(network), StudentPreset("mine", 999.0 if part == "unet" else 1000.0)
    with torch.no_grad():
        for weight in changed.parameters():
            weight.mul_(1.02)
    pipe = EMDOneStepPipeline.from_pipe(stock)
    before = drawn(pipe, preset=preset, **size)
    file = save_safetensors(tmp_path / "whole.safetensors", changed.state_dict(), preset.to_metadata())
    assert pipe.load_student(file, base="mine") == preset
    found = drawn(pipe, preset=preset, **size)
    with torch.no_grad():
        cond = pipe._adapter.condition([PROMPT], (64, 64))
        net = Denoiser.from_diffusers(changed, stock.scheduler)
        wanted = one_step(net, seeded_noise([1], tuple(before.shape[1:])), cond, preset)
    assert torch.equal(found, wanted) and not torch.allclose(found, before, atol=1e-3)
    assert getattr(stock, part) is network
    assert torch.equal(drawn(EMDOneStepPipeline.from_pipe(stock), preset=preset, **size), before)
    bad = save_safetensors(tmp_path / "bad.safetensors", {"conv_in.weight": torch.zeros(1)}, preset.to_metadata())
    with pytest.raises(VitrineError, match="tensors of bad.safetensors differ"):
        pipe.load_student(bad)


# --- shipped ------------------------------------------------------------------------------------------------------
def test_files_carry_their_preset_and_stay_small():
    for name in STUDENTS:
        preset, tensors = read_student(student_file(name))
        assert preset.timestep == 999 and preset.noise == "unit" and tuple(preset.shape) == (4, 16, 16)
        assert student_file(name).stat().st_size < 3 * 2**20 and all(
            t.dtype == torch.float16 or t.ndim == 0 for t in tensors.values()
        )
    with pytest.raises(VitrineError, match="diff-instruct"):
        student_file("other")


def test_one_step_shows_what_the_prompt_says():
    scenes = sample_scenes(range(5_600_000, 5_600_032))
    pipe, preset = one_step_pipeline()
    calls = []
    handle = pipe.unet.register_forward_hook(lambda *a: calls.append(1))
    images = pipe(caption(scenes), list(range(32)), preset, output_type="pt").images
    handle.remove()
    found = attribute_accuracy(read(load_classifier(), images.float()), scenes)
    assert len(calls) == 1 and sum(found.values()) / len(found) > 0.9
