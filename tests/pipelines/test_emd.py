"""The one-step pipeline: against the engine, against LCMScheduler, and what it refuses."""

import pytest
import torch
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.noise import seeded_noise
from vitrine.engine.emd import StudentPreset, one_step
from vitrine.engine.errors import VitrineError
from vitrine.engine.io.files import read_safetensors
from vitrine.engine.network.condition import Condition
from vitrine.engine.pipelines.emd import EMDOneStepPipeline
from vitrine.engine.portraits import build_models

pytestmark = pytest.mark.rounding
PROMPT = "a smiling pale face with curly red hair"


@pytest.fixture(scope="module")
def pipe():
    return EMDOneStepPipeline.from_pipe(build_models(0).pipeline())


def test_is_the_engine_with_one_call(pipe):
    calls, preset = [], StudentPreset(timestep=399)
    handle = pipe.unet.register_forward_hook(lambda m, i, o: calls.append(len(i[0])))
    found = pipe(PROMPT, [3, 4], preset, output_type="latent").images
    handle.remove()
    assert calls == [2], "one UNet call, no negative rows"
    with torch.no_grad():
        text = pipe.encode_prompt([PROMPT] * 2, "cpu", 1, False)[0]
        wanted = one_step(Denoiser.from_diffusers(pipe), seeded_noise([3, 4], (4, 16, 16)), Condition(text), preset)
    assert torch.equal(found, wanted)


def test_pictures_and_refusals(pipe):
    assert pipe([PROMPT, "x"]).images[1].size == (64, 64)
    with pytest.raises(VitrineError, match="distilled"):
        pipe(PROMPT, guidance_scale=7.5)
    with pytest.raises(VitrineError, match="one for each picture"):
        pipe(["a", "b"], [1])


# --- SDXL ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def xl():
    from vitrine_tests.machine import stock

    return stock.sdxl()


def test_sdxl_is_the_engine_with_pooled_text_and_sizes(xl):
    pipe = EMDOneStepPipeline.from_pipe(xl)  # was a TypeError of diffusers' constructor
    assert isinstance(pipe, EMDOneStepPipeline) and isinstance(pipe, type(xl))
    found = pipe([PROMPT, "x"], [3, 4], output_type="latent").images
    with torch.no_grad():
        text, _, pooled, _ = xl.encode_prompt([PROMPT, "x"], device="cpu", do_classifier_free_guidance=False)
        side = 16 * pipe.vae_scale_factor
        cond = Condition(text, pooled, {"time_ids": torch.tensor([[side, side, 0, 0, side, side]] * 2).float()})
        wanted = one_step(Denoiser.from_diffusers(xl), seeded_noise([3, 4], (4, 16, 16)), cond, StudentPreset())
        assert torch.equal(found, wanted)
        given = pipe(None, [3, 4], prompt_embeds=text, pooled_prompt_embeds=pooled, output_type="latent").images
    assert torch.equal(given, wanted)
    with pytest.raises(VitrineError, match="pooled_prompt_embeds: given none"):
        pipe(None, [3, 4], prompt_embeds=text)
    assert pipe(PROMPT, [1]).images[0].size == (side, side)


@pytest.mark.nightly
def test_a_student_of_sdxl_is_trained_from_its_folder(xl, tmp_path):
    """Was a bare KeyError: 'time_ids'."""
    from vitrine.engine.emd import EStepConfig
    from vitrine.engine.emd.train_config import EMDTrainConfig
    from vitrine.engine.pipelines.emd_training import training_parts

    xl.save_pretrained(tmp_path / "xl")
    parts = training_parts(str(tmp_path / "xl"), ["a face", "a smiling face", "a hat"], "tiny XL")
    assert float(parts.null.text.abs().sum()) == 0, "SDXL's guidance starts from zeros"
    run = parts.trainer(EMDTrainConfig(1, 2, rank=2, chain=EStepConfig(1), guidance=2.0), tmp_path / "run")
    files = run.run()
    pipe = EMDOneStepPipeline.from_pipe(parts.pipeline)
    run.roles.remove()
    preset = pipe.load_student(files[0], "tiny XL")
    with torch.no_grad():
        assert pipe(PROMPT, [1], preset, output_type="latent").images.isfinite().all()
    assert preset.trained_guidance == 2.0


@pytest.mark.nightly
def test_a_student_of_the_flow_portraits_is_trained_and_drawn(tmp_path):
    """Transformers were refused; before that, what they exported nobody read, since its names began with ``unet``."""
    from vitrine.engine.emd import EStepConfig
    from vitrine.engine.emd.train_config import EMDAdvancedConfig, EMDTrainConfig
    from vitrine.engine.pipelines.emd_training import training_parts
    from vitrine.engine.portraits.flow import load_flow_portraits

    parts = training_parts("flow portraits", ["a face", PROMPT], size=(128, 128))
    settings = {"rank": 4, "chain": EStepConfig(1, gz=0.01), "guidance": 2.0, "lr_generator": 0.01}
    settings["advanced"] = EMDAdvancedConfig(auto_gz=False, ema=0.0)
    run = parts.trainer(EMDTrainConfig(2, 1, **settings), tmp_path)
    assert run.preset.timestep == 1000.0
    (file,) = run.run()
    tensors, _ = read_safetensors(file)
    assert all(name.startswith("transformer.") for name in tensors)
    halved = {name: value.half().float() for name, value in run.average.values.items()}
    z = seeded_noise([3], parts.shape)
    with torch.no_grad(), run.roles.with_weights("generator", halved):
        wanted = run.generate(z, parts.conditions.take(torch.tensor([1])))
        shown = parts.decode(wanted)
    pipe = EMDOneStepPipeline.from_pipe(load_flow_portraits().pipeline())
    plain = pipe(PROMPT, [3], output_type="latent").images
    preset = pipe.load_student(file, "flow portraits")
    torch.testing.assert_close(pipe(PROMPT, [3], preset, output_type="latent").images, wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(pipe(PROMPT, [3], preset, output_type="pt").images, shown, rtol=0, atol=1e-5)
    assert (plain - wanted).abs().max() > 1e-3
    pipe.load_student(file, "flow portraits")
    torch.testing.assert_close(pipe(PROMPT, [3], preset, output_type="latent").images, wanted, rtol=0, atol=1e-5)
    run.roles.remove()
    second = parts.trainer(EMDTrainConfig(2, 1, **settings), tmp_path / "second")
    second.start_from(file, tmp_path / "score_diffusers.safetensors")
    for name, value in second.roles.parameters("generator").items():
        assert torch.equal(value, halved[name]), name


def test_pixart_is_refused_before_it_trains():
    from diffusers import DDIMScheduler
    from vitrine.engine.emd.networks import Roles
    from vitrine_tests import models

    with pytest.raises(VitrineError, match="PixArtTransformer2DModel, which diffusers has no adapters for"):
        Roles(Denoiser.from_diffusers(models.pixart(), DDIMScheduler()), 2)
