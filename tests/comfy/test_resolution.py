"""Fit Model to Size (Resolution Transfer) in real ComfyUI: against the pipeline, and what it leaves alone."""

import json
import math

import pytest
import torch
from diffusers import EulerDiscreteScheduler
from safetensors.torch import save_file
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines import ResolutionTransferPipeline
from vitrine.engine.portraits import load_portraits
from vitrine.engine.resolution import ResolutionTransferConfig
from vitrine.engine.resolution.shift import shift_grid

PROMPT = "a smiling pale face with curly red hair glasses navy shirt on yellow"
PLAIN = {"schedule": "resample", "pos_embed": "auto", "guidance_law": False, "guidance": 3.0, "override": False}
STEPS = 5


@pytest.fixture(scope="module")
def loaded(comfy):
    return comfy.call("VitrineLoadPortraits")


@pytest.fixture(scope="module")
def pipe():
    made = load_portraits().pipeline()
    made.set_progress_bar_config(disable=True)
    made.scheduler = EulerDiscreteScheduler.from_config(made.scheduler.config, timestep_spacing="trailing")
    return made


def transfer(comfy, model, width=64, height=96, train=(0, 0), **more):
    told = PLAIN | {"train_width": train[0], "train_height": train[1]} | more
    return comfy.call("VitrineResolutionTransferLoader", model=model, target_width=width, target_height=height, **told)


def sample(model, clip, shape=(2, 4, 24, 16), cfg=3.0, scheduler="simple"):
    import comfy.sample

    latent = torch.zeros(shape)
    noise = comfy.sample.prepare_noise(latent, 3)
    with torch.inference_mode():
        conds = [clip.encode_from_tokens_scheduled(clip.tokenize(text)) for text in (PROMPT, "")]
        found = comfy.sample.sample(
            model, noise, STEPS, cfg, "euler", scheduler, *conds, latent, disable_pbar=True, seed=3
        )
    return model.model.process_latent_in(found), noise


@pytest.mark.parametrize("schedule", ["resample", "relabel", "none"])
def test_both_doors_agree(comfy, loaded, pipe, schedule):
    how = {"schedule": schedule, "override": True}
    model, guidance, report = transfer(comfy, loaded[0], **how)
    assert guidance == 3.0
    found, noise = sample(model, loaded[1])
    wide = ResolutionTransferPipeline.from_pipe(pipe, ResolutionTransferConfig((64, 96), guidance=3.0, **how))
    ours, theirs = list(wide.plan.lines), report.splitlines()
    assert ours.pop(1).startswith("size:") and theirs.pop(1).startswith("size:"), "each library has its class's name"
    assert ours == theirs, "one report, whichever door"
    first = float(model.get_model_object("model_sampling").sigma_max)
    start = noise * math.sqrt(1 + first**2) / first  # full noise: ComfyUI times sqrt(1 + sigma^2), diffusers sigma
    told = {"num_inference_steps": STEPS, "output_type": "latent", "num_images_per_prompt": 2}
    wanted = wide(PROMPT, negative_prompt="", latents=start, **told).images
    worst = float((found - wanted).abs().max() / wanted.abs().max())
    assert worst < 1e-5, worst


@pytest.mark.nightly
def test_a_wider_view_is_the_same_through_both_doors_and_only_on_its_clone(comfy, loaded, pipe):
    before, _ = sample(loaded[0], loaded[1], (1, 4, 16, 16))
    model, _, report = transfer(comfy, loaded[0], 96, 192, receptive_field="dilate")
    found, noise = sample(model, loaded[1], (2, 4, 48, 24))
    config = ResolutionTransferConfig((96, 192), guidance=3.0, receptive_field="dilate")
    wide = ResolutionTransferPipeline.from_pipe(pipe, config)
    ours, theirs = list(wide.plan.lines), report.splitlines()
    assert ours[0] == theirs[0] and ours[-1] == theirs[-1] and any("3 x 2 cells" in line for line in ours)
    first = float(model.get_model_object("model_sampling").sigma_max)
    start = noise * math.sqrt(1 + first**2) / first
    told = {"num_inference_steps": STEPS, "output_type": "latent", "num_images_per_prompt": 2}
    wanted = wide(PROMPT, negative_prompt="", latents=start, **told).images
    worst = float((found - wanted).abs().max() / wanted.abs().max())
    assert worst < 1e-5, worst
    plain, _ = sample(transfer(comfy, loaded[0], 96, 192)[0], loaded[1], (2, 4, 48, 24))
    assert not torch.allclose(plain, found)
    assert torch.equal(sample(loaded[0], loaded[1], (1, 4, 16, 16))[0], before), "a sibling"
    same, _, _ = transfer(comfy, loaded[0], 64, 64, receptive_field="dilate")
    assert torch.equal(sample(same, loaded[1], (1, 4, 16, 16))[0], before), "at the trained size, bit for bit"
    alone, _, _ = transfer(comfy, loaded[0], 96, 192, receptive_field="dilate", schedule="none")
    with pytest.raises(VitrineError, match="already"):
        transfer(comfy, alone, 96, 192)


def test_transformers_need_no_wider_view(comfy):
    with pytest.raises(VitrineError, match="sees the whole picture"):
        transfer(comfy, sd3(comfy), 128, 128, train=(64, 64), receptive_field="dilate")


def test_one_is_the_untouched_model_and_siblings_stay(comfy, loaded):
    before, _ = sample(loaded[0], loaded[1], (1, 4, 16, 16))
    same, _, report = transfer(comfy, loaded[0], 64, 64)
    assert not same.object_patches and "r = 1" in report
    found, _ = sample(same, loaded[1], (1, 4, 16, 16))
    assert torch.equal(found, before)
    large, _, _ = transfer(comfy, loaded[0], 128, 128)
    moved, _ = sample(large, loaded[1], (1, 4, 32, 32))
    assert not torch.equal(moved, sample(loaded[0], loaded[1], (1, 4, 32, 32))[0])
    for model in (loaded[0], same):
        again, _ = sample(model, loaded[1], (1, 4, 16, 16))
        assert torch.equal(again, before), "a sibling"
    assert torch.equal(sample(large, loaded[1], (1, 4, 32, 32))[0], moved)


def test_what_the_network_is_told(comfy, loaded):
    own = loaded[0].get_model_object("model_sampling")
    t = torch.arange(1000)
    scaled = transfer(comfy, loaded[0], 128, 128, schedule="relabel", override=True)[0]
    scaled = scaled.get_model_object("model_sampling")
    assert torch.equal(scaled.timestep(2 * own.sigmas), t) and isinstance(scaled, type(own))
    moved = transfer(comfy, loaded[0], 128, 128)[0].get_model_object("model_sampling")
    wanted = shift_grid(own.sigmas.double(), 2.0, float(own.sigmas[-1]))
    assert isinstance(moved, type(own)) and float((wanted / own.sigmas)[:500].min()) > 1.8
    torch.testing.assert_close(moved.sigmas.double(), wanted, rtol=1e-6, atol=0)
    assert torch.equal(moved.timestep(own.sigmas), t) and float(moved.sigma_max) == float(own.sigma_max)
    assert moved.percent_to_sigma(0.5) > 1.5 * own.percent_to_sigma(0.5)


def test_flow_models_compose_with_their_own_shift(comfy, loaded):
    import comfy.model_sampling as sampling
    from vitrine.nodes.comfy.schedule import own_shift

    class Flow(sampling.ModelSamplingDiscreteFlow, sampling.CONST):
        pass

    class Flux(sampling.ModelSamplingFlux, sampling.CONST):
        pass

    flow, flux = Flow(), Flux()
    flow.set_parameters(shift=3.0)
    for own, wanted in ((flow, 4.5), (flux, 1.5 * math.exp(1.15))):
        model = loaded[0].clone()
        model.add_object_patch("model_sampling", own)
        made, _, report = transfer(comfy, model, 96, 96)
        new = made.get_model_object("model_sampling")
        assert type(new) is type(own) and own_shift(new) == pytest.approx(wanted)
        assert f"{wanted:.4g}" in report
        tau = own.sigmas.double()
        torch.testing.assert_close(new.sigmas.double(), 1.5 * tau / (1 + 0.5 * tau), rtol=1e-5, atol=1e-7)
        with pytest.raises(VitrineError, match="flow"):
            transfer(comfy, model, 96, 96, schedule="relabel", override=True)

    class Continuous(sampling.ModelSamplingContinuousEDM, sampling.EDM):
        pass

    model.add_object_patch("model_sampling", Continuous())
    with pytest.raises(VitrineError, match="without a table"):
        transfer(comfy, model, 96, 96)


def test_prediction_class_is_kept(comfy, loaded):
    import comfy.model_sampling as sampling

    class Velocity(sampling.ModelSamplingDiscrete, sampling.V_PREDICTION):
        pass

    model = loaded[0].clone()
    model.add_object_patch("model_sampling", Velocity(model.model.model_config, zsnr=True))
    new = transfer(comfy, model, 128, 128)[0].get_model_object("model_sampling")
    assert isinstance(new, sampling.V_PREDICTION) and new.zsnr


def sd3(comfy):
    """A tiny SD3 as ComfyUI builds it, with a stored table."""
    import comfy.model_patcher
    import comfy.supported_models
    from diffusers.models.embeddings import get_2d_sincos_pos_embed

    context = {"target": "torch.nn.Linear", "params": {"in_features": 16, "out_features": 64}}
    described = comfy.supported_models.SD3(
        {
            "input_size": None,
            "patch_size": 2,
            "in_channels": 4,
            "depth": 1,
            "pos_embed_max_size": 12,
            "num_patches": 144,
            "adm_in_channels": 16,
            "context_embedder_config": context,
            "qkv_bias": True,
        }
    )
    described.set_inference_dtype(torch.float32, None)
    model = described.get_model({}, "", device="cpu")
    gen = torch.Generator().manual_seed(0)
    for p in model.diffusion_model.parameters():
        p.data = torch.randn(p.shape, generator=gen) * 0.05
    model.diffusion_model.pos_embed = get_2d_sincos_pos_embed(64, 12, base_size=8).float()[None]
    return comfy.model_patcher.ModelPatcher(model, load_device=torch.device("cpu"), offload_device=torch.device("cpu"))


def test_stored_tables_are_replaced_on_the_clone_only(comfy):
    from comfy.model_management import load_models_gpu

    base = sd3(comfy)
    gen = torch.Generator().manual_seed(1)
    x, context, y = (torch.randn(s, generator=gen) for s in ((1, 4, 20, 24), (1, 5, 16), (1, 16)))

    def out(model, x=x):
        load_models_gpu([model])
        with torch.inference_mode():
            return model.model.apply_model(x, torch.tensor([0.5]), c_crossattn=context, y=y)

    size = {"width": 192, "height": 160, "train": (128, 128)}
    before, table = out(base), base.model.diffusion_model.pos_embed.clone()
    longer, _, _ = transfer(comfy, base, **size, pos_embed="extrapolate", schedule="none")
    grid, _, report = transfer(comfy, base, **size)
    assert "stored, grid" in report and "shift 3 ->" in report
    assert (out(longer) - before).abs().max() < 1e-5, "extrapolation is the model's own crop"
    assert (out(grid) - before).abs().max() > 1e-4
    assert torch.equal(out(base), before) and torch.equal(base.model.diffusion_model.pos_embed, table)
    with pytest.raises(VitrineError, match="latent size"):
        out(grid, x[..., :20])
    assert torch.equal(out(base), before)
    with pytest.raises(VitrineError, match="at most 12"):
        transfer(comfy, base, 256, 256, train=(128, 128), pos_embed="keep")
    huge, _, _ = transfer(comfy, base, 256, 256, train=(128, 128))
    assert out(huge, torch.zeros(1, 4, 32, 32)).shape == (1, 4, 32, 32)


def test_rotary_stand_in(comfy):
    from comfy.ldm.flux.layers import EmbedND
    from vitrine.engine.diffusion.schedule import NoiseSchedule
    from vitrine.engine.resolution import ModelFacts, Positions, plan_transfer
    from vitrine.nodes.comfy.resolution import _Rotary

    own, ids = EmbedND(16, 10000, [4, 6, 6]), torch.zeros(1, 24, 3)
    ids[0, :, 1], ids[0, :, 2] = torch.arange(24) // 6, torch.arange(24) % 6
    facts = ModelFacts("flux", NoiseSchedule.flow(), (96, 64), 8, 2, positions=Positions("rope"))
    made = plan_transfer(facts, ResolutionTransferConfig((192, 128), pos_embed="rope_pi"))
    found, wanted = _Rotary(own, made)(ids), own(ids / torch.tensor([1.0, 2.0, 2.0]))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    spread = plan_transfer(facts, ResolutionTransferConfig((192, 128), pos_embed="rope_ntk"))
    found = _Rotary(own, spread)(ids)
    assert found.shape == wanted.shape and (found - own(ids)).abs().max() > 1e-3


def test_refusals(comfy, loaded, tmp_path):
    import folder_paths

    for more, message in (
        ({"schedule": "relabel"}, "without it in its header"),
        ({"pos_embed": "grid"}, "auto takes"),
        ({"train": (64, 0)}, "both sides"),
        ({"width": 94}, "multiples of 4"),
    ):
        with pytest.raises(VitrineError, match=message):
            transfer(comfy, loaded[0], **more)
    before = folder_paths.folder_names_and_paths["checkpoints"]
    said = {"mode": "relabel", "s_pre": 64, "s_now": 128}
    save_file({"x": torch.zeros(1)}, tmp_path / "mine.safetensors", {"ccs_format": "1", "schedule": json.dumps(said)})
    folder_paths.folder_names_and_paths["checkpoints"] = ([str(tmp_path)], before[1])
    try:
        told = {"schedule": "relabel", "metadata_from": "mine.safetensors"}
        assert "relabel" in transfer(comfy, loaded[0], 128, 128, **told)[2]
        with pytest.raises(VitrineError, match="as trained"):
            transfer(comfy, loaded[0], 96, 96, **told)
    finally:
        folder_paths.folder_names_and_paths["checkpoints"] = before
    with pytest.raises(VitrineError, match="metadata_from"):
        transfer(comfy, loaded[0], schedule="relabel", metadata_from="gone.safetensors")
