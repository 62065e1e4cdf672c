"""The portraits transformers in real ComfyUI: the network, a run with controls, positions, sizes, clones."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from diffusers import EulerDiscreteScheduler, PixArtAlphaPipeline
from vitrine.engine.control import GuidanceConfig, SizeCondition
from vitrine.engine.diffusion.schedule import NoiseSchedule
from vitrine.engine.errors import VitrineError
from vitrine.engine.families import call_of
from vitrine.engine.network.condition import Condition
from vitrine.engine.pipelines import ControlConditionedPipeline
from vitrine.engine.portraits import load_portraits
from vitrine.engine.portraits.shipped import load_transformer, shipped_transformers, transformer_folder
from vitrine.engine.resolution.shift import trained_betas
from vitrine_tests.lanes import nightly_but

NAMES = [n for n in shipped_transformers() if not n.endswith("128")]
PROMPT = "a smiling pale face with curly red hair glasses navy shirt on yellow"
CURVE = {
    "form": "power_cos",
    "alpha": 2.0,
    "clock": "native",
    "reference": "target",
    "reference_width": 48,
    "reference_height": 40,
}
RUN = {
    "seed": 3,
    "steps": 5,
    "sampler_name": "euler",
    "scheduler": "ddim_uniform",
    "denoise": 1.0,
    "flip": True,
    "nesting": "control_inner",
    "width": 24,
    "height": 32,
    "crop_left": 3,
    "crop_top": 6,
}


@pytest.fixture(scope="module", params=nightly_but(NAMES, NAMES[:1]))
def loaded(comfy, request):
    model, clip, vae = comfy.call("VitrineLoadPortraitsTransformer", weight=request.param)
    return SimpleNamespace(name=request.param, model=model, clip=clip, vae=vae)


def close(a, b):
    """1e-5 of the largest number."""
    return float((a - b).abs().max()) < 1e-5 * max(1.0, float(b.abs().max()))


def encode(comfy, clip, text):
    with torch.inference_mode():
        return comfy.nodes.NODE_CLASS_MAPPINGS["CLIPTextEncode"]().encode(clip, text)[0]


def pipeline(name):
    base = load_portraits()
    scheduler = EulerDiscreteScheduler.from_config(base.scheduler.config, timestep_spacing="leading")
    parts = {"transformer": load_transformer(name), "vae": base.vae, "scheduler": scheduler}
    pipe = ControlConditionedPipeline.from_pipe(PixArtAlphaPipeline(tokenizer=None, text_encoder=None, **parts))
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad():
        text, empty = base.encode([PROMPT]), base.encode([""])
    masks = {f"{n}prompt_attention_mask": torch.ones(1, text.shape[1]) for n in ("", "negative_")}
    return pipe, {"prompt_embeds": text, "negative_prompt_embeds": empty} | masks


@pytest.mark.parametrize("control", [1.0, 1.375])
def test_a_run_with_controls_is_the_pipelines(comfy, loaded, control):
    model, report = comfy.call("VitrineLoadControl", model=loaded.model, file=f"portraits {loaded.name}")
    assert "flip, crop_top" in report
    positive, negative = (encode(comfy, loaded.clip, t) for t in (PROMPT, ""))
    latent = {"samples": torch.zeros(1, 4, 16, 16)}
    made, _, text = comfy.call(
        "VitrineControlConditionedSampler",
        model=model,
        positive=positive,
        negative=negative,
        latent_image=latent,
        **CURVE | RUN | {"cfg": 2.0, "size_guidance": control},
    )
    pipe, embeds = pipeline(loaded.name)
    own = pipe.load_control(transformer_folder(loaded.name) / "control.safetensors")
    pipe.scheduler.set_timesteps(5)
    noise = torch.randn(1, 4, 16, 16, generator=torch.manual_seed(3)) * pipe.scheduler.sigmas[0]
    ours = pipe(
        checkpoint=own,
        size_condition=SizeCondition((32, 24), (6, 3), None, True),
        guidance=GuidanceConfig(2.0, control),
        latents=noise / pipe.scheduler.init_noise_sigma,
        num_inference_steps=5,
        output_type="latent",
        **embeds,
    )
    assert close(made["samples"] * pipe.vae.config.scaling_factor, ours.images)
    assert f"{sum(s.evaluations for s in ours.log)} evaluations" in text
    untold, _, _ = comfy.call(
        "VitrineControlConditionedSampler",
        model=model,
        positive=positive,
        negative=negative,
        latent_image=latent,
        **CURVE | RUN | {"cfg": 2.0, "size_guidance": control, "width": 64, "height": 64, "flip": False},
    )
    assert not close(untold["samples"], made["samples"]), "the controls are read"


SIDES = {"train_width": 0, "train_height": 0, "target_width": 128, "target_height": 128}
TRANSFER = {
    "schedule": "none",
    "pos_embed": "auto",
    "guidance_law": False,
    "guidance": 2.0,
    "override": False,
}


@pytest.mark.parametrize("positions", ["grid", "extrapolate"])
def test_positions_are_those_of_the_pipeline(comfy, loaded, positions):
    from vitrine.engine.resolution import ResolutionTransferConfig, apply
    from vitrine.evidence.control.controlled_transformer import ControlledTransformer
    from vitrine.nodes.comfy.model import backbone_of

    model, _, report = comfy.call(
        "VitrineResolutionTransferLoader", model=loaded.model, **SIDES, **TRANSFER | {"pos_embed": positions}
    )
    transformer = ControlledTransformer.open(loaded.name)
    x, text = torch.randn(2, 4, 32, 32, generator=torch.manual_seed(1)), torch.randn(2, 24, 64)
    t = torch.full((2,), 500.0)
    config = ResolutionTransferConfig((128, 128), (64, 64), schedule="none", pos_embed=positions)
    with apply(transformer, config), torch.no_grad():
        wanted = call_of(transformer.transformer)(x, t, Condition(text))
    model.patch_model()
    try:
        with torch.no_grad():
            found = backbone_of(model)(x, t, context=text, transformer_options={})
    finally:
        model.unpatch_model()
    assert close(found, wanted) and positions in report
    with torch.no_grad():
        assert close(backbone_of(model)(x, t, context=text, transformer_options={}), wanted) == (positions == "grid")


def test_a_transfer_made_while_another_stands_on_the_network(comfy, loaded):
    """ComfyUI leaves a clone's patches on the shared network until another clone is loaded."""
    told = SIDES | TRANSFER
    first, *_ = comfy.call("VitrineResolutionTransferLoader", model=loaded.model, **told | {"pos_embed": "extrapolate"})
    wanted, *_ = comfy.call("VitrineResolutionTransferLoader", model=loaded.model, **told)
    first.patch_model()
    try:
        found, *_ = comfy.call("VitrineResolutionTransferLoader", model=loaded.model, **told)
    finally:
        first.unpatch_model()
    assert found.object_patches == wanted.object_patches != first.object_patches


def test_a_core_pixart_with_a_table_of_its_own_stops_extrapolating(comfy):
    """A checkpoint with a stored table gets a fixed divisor from core, and then runs on past its positions."""
    from comfy.ldm.pixart.pixartms import PixArtMS, get_2d_sincos_pos_embed_torch
    from comfy.model_patcher import ModelPatcher
    from vitrine.nodes.comfy.resolution import _base, _divisor

    told = {"patch_size": 2, "hidden_size": 32, "depth": 1, "num_heads": 2, "operations": torch.nn}
    for own in (1, None):
        net = PixArtMS(input_size=64, pe_interpolation=own, **told)
        for positions, last in (("grid", 31.5), ("extrapolate", 63.0)):
            plan = SimpleNamespace(train=(32, 32), target=(64, 64), positions=positions)
            model = torch.nn.Module()
            model.diffusion_model = net
            divisor = _divisor(ModelPatcher(model, "cpu", "cpu"), plan)
            table = get_2d_sincos_pos_embed_torch(32, 64, 64, divisor, _base(net, plan.target))
            wanted = get_2d_sincos_pos_embed_torch(32, 2, 2, 1.0, 2 * last)  # its second row is at ``last``
            assert torch.allclose(table[-1], wanted[-1], atol=1e-5)


def test_resolution_transfer_knows_it(comfy, loaded):
    told = SIDES | TRANSFER | {"guidance_law": True}
    _, guidance, report = comfy.call(
        "VitrineResolutionTransferLoader", model=loaded.model, **told | {"schedule": "resample"}
    )
    assert guidance == 3.0 and "64" in report
    with pytest.raises(VitrineError):
        comfy.call("VitrineResolutionTransferLoader", model=loaded.model, **told | {"schedule": "relabel"})
    with pytest.raises(VitrineError, match="one ratio"):
        comfy.call(
            "VitrineResolutionTransferLoader",
            model=loaded.model,
            **told | {"pos_embed": "extrapolate", "target_height": 96},
        )


def test_a_transformer_of_another_schedule_brings_it(comfy, loaded, tmp_path):
    from vitrine.nodes.comfy.transformer import load_transformer as load

    folder = tmp_path / "mine-128"
    shutil.copytree(transformer_folder(loaded.name), folder)
    schedule = NoiseSchedule.from_diffusers(load_portraits().scheduler)
    (folder / "scheduler_config.json").write_text(json.dumps({"trained_betas": trained_betas(schedule, 2.0)}))
    with torch.inference_mode():
        moved = load(str(folder))
    sampling = moved.get_model_object("model_sampling")
    own = loaded.model.get_model_object("model_sampling")
    assert torch.allclose(sampling.sigmas, 2 * own.sigmas, rtol=1e-4)
    assert torch.equal(sampling.timestep(sampling.sigmas[[3, 700]]), torch.tensor([3, 700]))
    assert moved.model.model_config.trained_side == 128


def test_broken_folders_are_refused(comfy, tmp_path):
    from vitrine.nodes.comfy.transformer import converted

    with pytest.raises(VitrineError, match="power-cosine"):
        comfy.call("VitrineLoadPortraitsTransformer", weight="nobody")
    with pytest.raises(VitrineError, match="PixArt-shaped"):
        converted({"conv_in.weight": torch.zeros(1)}, {"depth": 1, "hidden_size": 4})
