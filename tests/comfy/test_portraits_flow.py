"""The flow portraits in ComfyUI and in a stock FluxPipeline: one seed, one picture; previews; text by attention."""

import numpy as np
import pytest
import torch
from vitrine.engine.families import call_of
from vitrine.engine.network.condition import Condition
from vitrine.engine.portraits import sample_scenes
from vitrine.engine.portraits.flow import FLOW_WEIGHTS, build_flow_models, load_either, load_flow_portraits
from vitrine.engine.portraits.models import WEIGHTS, save_portraits
from vitrine.engine.portraits.preview import read_preview, write_preview
from vitrine.engine.portraits.shipped import shipped_models
from vitrine.engine.tracing.addresses import sites_of
from vitrine_tests.lanes import nightly_but

PROMPT = "a smiling pale face with curly red hair glasses navy shirt on yellow"


@pytest.fixture(scope="module", params=["random", "shipped"])
def folder(request, tmp_path_factory):
    """The model that ships, and the architecture with weights that make every layer matter."""
    if request.param == "shipped":
        return FLOW_WEIGHTS
    model = build_flow_models()
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.transformer.parameters():
            if parameter.requires_grad:
                parameter.add_(0.04 * torch.randn(parameter.shape, generator=g))
    path = tmp_path_factory.mktemp("flow") / "model"
    save_portraits(model, path)
    write_preview(path, model)
    return path


@pytest.fixture(scope="module")
def parts(comfy, folder):
    from vitrine.nodes.comfy.flow import load_flow_model
    from vitrine.nodes.comfy.portraits import load_clip, load_vae

    return load_flow_model(str(folder)), load_clip(str(folder)), load_vae(str(folder))


@pytest.fixture(scope="module")
def ours(folder):
    return load_flow_portraits(folder)


def encode(clip, text):
    with torch.inference_mode():
        return clip.encode_from_tokens_scheduled(clip.tokenize(text))


def sampled(model, clip, prompt=PROMPT, cfg=3.0, callback=None):
    import comfy.sample

    latent = torch.zeros(1, 16, 16, 16)  # 5 steps: core rounds its 10,000 noise levels down
    noise = comfy.sample.prepare_noise(latent, 5)
    with torch.inference_mode():
        return comfy.sample.sample(
            model, noise, 5, cfg, "euler", "simple", encode(clip, prompt), encode(clip, ""), latent,
            disable_pbar=True, seed=5, callback=callback,
        )  # fmt: skip


def test_both_models_ship_in_48_mb():
    assert list(shipped_models()) == ["portraits, 64 px", "flow portraits, 128 px"]
    sizes = {
        kind: sum(p.stat().st_size for p in root.rglob("*") if p.is_file())
        for kind, root in (("flow", FLOW_WEIGHTS), ("all", WEIGHTS))
    }
    assert sizes["flow"] <= 12e6 and sizes["all"] <= 48e6


@pytest.mark.nightly
def test_every_layer_is_the_same_network(parts, ours):
    theirs = parts[0].model.diffusion_model
    g = torch.Generator().manual_seed(2)
    x, text, t = torch.randn(2, 16, 16, 24, generator=g), torch.randn(2, 24, 64, generator=g), torch.tensor([0.2, 0.9])
    with torch.no_grad():
        wanted = call_of(ours.transformer)(x, 1000 * t, Condition(text, torch.zeros(2, 64)))
        found = theirs(x, t, context=text, y=torch.zeros(2, 64), guidance=None, transformer_options={})
    assert float((found - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())
    assert list(sites_of(theirs)) == list(sites_of(ours.transformer))


def test_one_seed_one_picture(parts, ours):
    """Latents of a stock FluxPipeline and of ComfyUI's KSampler, and the pictures both autoencoders make of them."""
    model, clip, vae = parts
    pipe = ours.pipeline()
    pipe.set_progress_bar_config(disable=True)
    how = {
        "height": 128,
        "width": 128,
        "max_sequence_length": 24,
        "num_inference_steps": 5,
        "true_cfg_scale": 3.0,
        "negative_prompt": "",
        "output_type": "latent",
    }
    packed = pipe(PROMPT, generator=torch.manual_seed(5), **how).images
    wanted = pipe._unpack_latents(packed, 128, 128, 8)
    found = sampled(model, clip)
    assert float((found - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())
    with torch.no_grad():
        picture = ours.vae.decode(wanted).sample / 2 + 0.5
    assert torch.allclose(vae.decode(wanted)[0].movedim(-1, 0), picture[0].clamp(0, 1), atol=1e-5)
    assert torch.allclose(
        vae.encode(picture.clamp(0, 1).movedim(1, -1)),
        ours.vae.encode(picture.clamp(0, 1) * 2 - 1).latent_dist.mean,
        atol=1e-4,
    )


def test_the_pooled_vector_carries_nothing(parts, ours):
    text, x, t = torch.randn(1, 24, 64), torch.randn(1, 16, 16, 16), torch.tensor([500.0])
    call, pooled = call_of(ours.transformer), torch.randn(1, 64)
    with torch.no_grad():
        assert torch.equal(call(x, t, Condition(text, pooled)), call(x, t, Condition(text, 0 * pooled)))
        network = parts[0].model.diffusion_model
        one, other = (network(x, t / 1000, context=text, y=y, transformer_options={}) for y in (pooled, 0 * pooled))
    assert torch.equal(one, other)


def preview(model, latents):
    """(h, w, 3) in [0, 1]: what core's sampler nodes send to the page."""
    import latent_preview
    from comfy.cli_args import args

    before, args.preview_method = args.preview_method, latent_preview.LatentPreviewMethod.Latent2RGB
    try:
        previewer = latent_preview.get_previewer(torch.device("cpu"), model.model.latent_format)
        return torch.from_numpy(np.array(previewer.decode_latent_to_preview(latents))) / 255
    finally:
        args.preview_method = before


def test_live_previews_are_the_fitted_colours(parts, folder):
    factors, bias = map(torch.tensor, read_preview(folder))
    latents = 0.3 * torch.randn(1, 16, 16, 16, generator=torch.manual_seed(3))
    wanted = (torch.einsum("chw,cr->hwr", latents[0], factors) + bias) / 2 + 0.5
    assert (preview(parts[0], latents) - wanted.clamp(0, 1)).abs().max() < 0.01


@pytest.mark.parametrize("name", shipped_models())
def test_a_live_preview_of_a_shipped_model_shows_the_picture_roughly(comfy, name):
    model, _, _ = comfy.call("VitrineLoadPortraits", model=name)
    ours = load_either(shipped_models()[name])
    pictures = ours.draw(sample_scenes(range(100_000, 100_008)))
    with torch.no_grad():
        latents = ours.vae.encode(pictures * 2 - 1).latent_dist.mean * ours.vae.config.scaling_factor
    rough = torch.nn.functional.adaptive_avg_pool2d(pictures, 16).movedim(1, -1)
    shown = torch.stack([preview(model, row[None]) for row in latents])
    off, flat = (shown - rough).square().mean(), (rough.mean((1, 2), keepdim=True) - rough).square().mean()
    assert off < 0.6 * flat, "one flat colour is no preview"


def test_the_model_says_the_size_it_was_trained_at(parts):
    from vitrine.nodes.comfy.resolution import facts_of

    assert facts_of(parts[0]).train_size == (128, 128), "not Flux's own 1024"


@pytest.mark.parametrize("mode", nightly_but(["auto", "rope_yarn", "rope_yarn_dynamic"], ["auto"]))
def test_a_whole_run_at_another_size_is_one_picture_through_both_doors(comfy, ours, folder, parts, mode):
    """Wide, over twice the area; both axes scaled by another number, the shift by the root of the area's."""
    if folder != FLOW_WEIGHTS:
        pytest.skip("random weights magnify what float32 rounds")
    import comfy.sample as core
    from vitrine.engine.pipelines import ResolutionTransferPipeline
    from vitrine.engine.resolution import ResolutionTransferConfig

    model, clip, _ = parts
    told = {
        "train_width": 0,
        "train_height": 0,
        "target_width": 320,
        "target_height": 192,
        "schedule": "resample",
        "guidance_law": False,
        "guidance": 3.0,
        "override": False,
        "pos_embed": mode,
    }
    moved, _, report = comfy.call("VitrineResolutionTransferLoader", model=model, **told)
    pipe = ours.pipeline()
    pipe.set_progress_bar_config(disable=True)
    wide = ResolutionTransferPipeline.from_pipe(pipe, ResolutionTransferConfig((320, 192), pos_embed=mode))
    assert wide.plan.lines[0] == report.splitlines()[0]
    how = {
        "max_sequence_length": 24,
        "num_inference_steps": 5,
        "true_cfg_scale": 3.0,
        "negative_prompt": "",
        "output_type": "latent",
    }
    wanted = pipe._unpack_latents(wide(PROMPT, generator=torch.manual_seed(5), **how).images, 192, 320, 8)
    latent = torch.zeros(1, 16, 24, 40)
    with torch.inference_mode():
        found = core.sample(
            moved,
            core.prepare_noise(latent, 5),
            5,
            3.0,
            "euler",
            "simple",
            encode(clip, PROMPT),
            encode(clip, ""),
            latent,
            disable_pbar=True,
            seed=5,
        )
    worst = float((found - wanted).abs().max() / wanted.abs().max())
    assert worst < 1e-4, worst  # 4e-5 for rope_yarn_dynamic: its factors of each step are rounded
