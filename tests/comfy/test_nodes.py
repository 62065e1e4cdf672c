"""Our nodes in real ComfyUI, against the pipelines: the two doors give the same numbers."""

import pytest
import torch
from vitrine.engine.activations import PRESETS, PCABasis, TapConfig, encode_pixels, pca_rgb, tap_latents
from vitrine.engine.activations.correspondence import feature_maps
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.network.condition import Condition
from vitrine.engine.portraits import caption, load_portraits, render, sample_scenes
from vitrine.engine.tracing.addresses import sites_of

ADDRESSES = "up-level0-repeat0-vit-block0-cross-q up-level1-repeat1-res-out"
PROMPT = "a smiling pale face with curly red hair glasses navy shirt on yellow"


@pytest.fixture(scope="module")
def loaded(comfy):
    return comfy.call("VitrineLoadPortraits")


@pytest.fixture(scope="module")
def portraits():
    return load_portraits()


def encode(clip, text):
    with torch.inference_mode():
        return clip.encode_from_tokens_scheduled(clip.tokenize(text))


def sample(model, positive, negative, seed=3, steps=8, cfg=3.0, sampler="euler", scheduler="normal"):
    import comfy.sample

    latent = torch.zeros(2, 4, 16, 16)
    noise = comfy.sample.prepare_noise(latent, seed)
    with torch.inference_mode():
        return comfy.sample.sample(
            model, noise, steps, cfg, sampler, scheduler, positive, negative, latent, disable_pbar=True, seed=seed
        ), noise


def hooks(module):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


def test_every_node_is_described(comfy):
    ours = {k: v for k, v in comfy.nodes.NODE_CLASS_MAPPINGS.items() if k.startswith("Vitrine")}
    assert len(ours) >= 8
    for name, node in ours.items():
        assert node.__module__.startswith("vitrine.nodes"), "one identity, whatever the folder is called"
        schema = node.define_schema()
        assert schema.description and schema.search_aliases, name
        assert all(i.tooltip for i in schema.inputs) and all(o.tooltip for o in schema.outputs), name


def test_text_and_pictures_agree(loaded, portraits):
    _, clip, vae = loaded
    pictures = render(sample_scenes([100_000, 100_001])).images
    with torch.no_grad():
        text = portraits.encode([PROMPT])
        latents = portraits.vae.encode(pictures * 2 - 1).latent_dist.mean
        decoded = (portraits.vae.decode(latents).sample / 2 + 0.5).clamp(0, 1)
    with torch.inference_mode():
        assert torch.allclose(encode(clip, PROMPT)[0][0], text, atol=1e-5)
        assert torch.allclose(vae.encode(pictures.permute(0, 2, 3, 1)), latents, atol=1e-4)
        assert torch.allclose(vae.decode(latents).permute(0, 3, 1, 2), decoded, atol=1e-4)


def test_sampling_agrees_with_diffusers(loaded, portraits):
    """comfy euler / ddim_uniform = diffusers EulerDiscrete "leading": latents within 1e-5, pictures within 1e-3."""
    from diffusers import EulerDiscreteScheduler

    model, clip, vae = loaded
    ours, noise = sample(model, encode(clip, PROMPT), encode(clip, ""), scheduler="ddim_uniform")
    scheduler = EulerDiscreteScheduler.from_config(portraits.scheduler.config, timestep_spacing="leading")
    scheduler.set_timesteps(8)
    x = noise * scheduler.sigmas[0]  # below the highest sigma ComfyUI scales by sigma alone
    with torch.no_grad():
        text = portraits.encode([""] * 2 + [PROMPT] * 2)
        for t in scheduler.timesteps:
            both = scheduler.scale_model_input(torch.cat([x, x]), t)
            uncond, cond = portraits.unet(both, t, text).sample.chunk(2)
            x = scheduler.step(uncond + 3.0 * (cond - uncond), t, x).prev_sample
        scaled = x / portraits.vae.config.scaling_factor
        pictures = (portraits.vae.decode(scaled).sample / 2 + 0.5).clamp(0, 1)
    assert (model.model.process_latent_in(ours) - x).abs().max() < 1e-5
    with torch.inference_mode():
        assert (vae.decode(ours).permute(0, 3, 1, 2) - pictures).abs().max() < 1e-3


def test_taps_agree_with_the_python_door(comfy, loaded, portraits):
    model, clip, vae = loaded
    scenes = sample_scenes([100_000, 100_001])
    pictures = render(scenes).images
    taps, drawn, report = comfy.call(
        "VitrineActivationTap",
        model=model,
        vae=vae,
        image=pictures.permute(0, 2, 3, 1),
        positive=encode(clip, PROMPT),
        selection="layers below",
        layers=ADDRESSES,
        timestep=50.0,
        seed=5,
        ensemble=2,
        dtype="float32",
    )
    with torch.no_grad():
        cond = Condition(portraits.encode([PROMPT]))
        latents = encode_pixels(portraits.vae, pictures * 2 - 1)
        config = TapConfig(tuple(ADDRESSES.split()), timestep=50, seeds=(5, 6))
        theirs = tap_latents(Denoiser.from_diffusers(portraits.pipeline()), latents, cond, config)
    for address in theirs:
        scale = theirs[address].tensor.abs().max()
        assert (taps[address].tensor - theirs[address].tensor).abs().max() <= 1e-5 * scale, address
    assert drawn.shape == (2, 256, 256, 3) and report.count("\n") == 1


def test_taps_leave_the_model_bit_exact(comfy, loaded):
    model, clip, vae = loaded
    positive, negative = encode(clip, PROMPT), encode(clip, "")
    before, _ = sample(model, positive, negative)
    weights = {k: v.clone() for k, v in model.model.diffusion_model.state_dict().items()}
    watched, recorder = comfy.call("VitrineTapDuringSampling", model=model, layers=ADDRESSES, record_steps="0 7")
    during, _ = sample(watched, positive, negative)
    after, _ = sample(model, positive, negative)
    assert torch.equal(before, during) and torch.equal(before, after)
    assert all(torch.equal(v, weights[k]) for k, v in model.model.diffusion_model.state_dict().items())
    assert hooks(model.model.diffusion_model) == 0
    assert list(recorder.record) == [0, 7] and set(recorder.record[0]) == {"cond", "uncond"}
    latent = {"samples": during}
    taps, drawn, passed = comfy.call("VitrineCollectTaps", recorder=recorder, latent=latent, step=-1, half="cond")
    assert taps.rows == 2 and passed["samples"] is during and drawn.shape[-1] == 3


def test_a_published_selection_while_sampling_and_as_one_picture(comfy, loaded):
    model, clip, _ = loaded
    positive, negative = encode(clip, PROMPT), encode(clip, "")
    watched, recorder = comfy.call(
        "VitrineTapDuringSampling", model=model, layers="auto", record_steps="0", selection="portraits"
    )
    latent = {"samples": sample(watched, positive, negative, steps=2)[0]}
    taps, *_ = comfy.call("VitrineCollectTaps", recorder=recorder, latent=latent, step=-1, half="cond")
    assert set(taps) == set(PRESETS["portraits"].addresses)
    told = {"activations": taps, "layer": "", "shared": True, "size": 64}
    (joined,) = comfy.call("VitrineActivationPicture", **told, selection="portraits")
    maps = feature_maps(taps)
    expected = pca_rgb(maps, PCABasis.fit(maps), (64, 64)).permute(0, 2, 3, 1)
    assert torch.equal(joined, expected)
    assert not torch.equal(joined, comfy.call("VitrineActivationPicture", **told)[0])
    with pytest.raises(VitrineError, match="Did you mean|layers of this model"):
        comfy.call("VitrineTapDuringSampling", model=model, layers="auto", record_steps="0", selection="Ours-XL")


def test_a_model_that_looks_like_one_of_ours_is_refused(comfy):
    """AuraFlow: joint attention in double and single blocks, as Flux and SD3 have, under other names."""
    vitrine = comfy  # the module takes the name
    import comfy.model_patcher
    import comfy.ops
    import comfy.supported_models
    from comfy.ldm.aura.mmdit import MMDiT

    network = MMDiT(
        dim=32,
        n_layers=2,
        n_double_layers=1,
        n_heads=2,
        global_conddim=32,
        cond_seq_dim=16,
        max_seq=64,
        device="cpu",
        dtype=torch.float32,
        operations=comfy.ops.disable_weight_init,
    )
    config = comfy.supported_models.AuraFlow({"disable_unet_model_creation": True})
    config.set_inference_dtype(torch.float32, None)
    base = config.get_model({}, "")
    base.diffusion_model = network
    model = comfy.model_patcher.ModelPatcher(base, torch.device("cpu"), torch.device("cpu"))
    for node, more in (
        ("VitrineTapDuringSampling", {"layers": "auto", "record_steps": "0"}),
        ("VitrineTapDuringSampling", {"layers": "", "record_steps": "0", "selection": "Ours-v1.5"}),
    ):
        with pytest.raises(VitrineError, match="backbone: given 'MMDiT'|backbone: given MMDiT"):
            vitrine.call(node, model=model, **more)


def test_clones_never_see_each_others_hooks(comfy, loaded):
    model, clip, _ = loaded
    positive, negative = encode(clip, PROMPT), encode(clip, "")
    a, first = comfy.call("VitrineTapDuringSampling", model=model, layers=ADDRESSES, record_steps="all")
    b, second = comfy.call("VitrineTapDuringSampling", model=model, layers="mid-vit-out", record_steps="0")
    sample(a, positive, negative, steps=3)
    assert second.record is None and len(first.record) == 3
    sample(b, positive, negative, steps=3)
    assert list(second.record) == [0] and len(first.record) == 3
    assert list(second.record[0]["cond"]) == ["mid-vit-out"]


def test_an_error_or_interrupt_while_sampling_leaves_no_hook(comfy, loaded):
    import comfy.model_management as management

    model, clip, _ = loaded
    watched, _ = comfy.call("VitrineTapDuringSampling", model=model, layers=ADDRESSES, record_steps="all")
    broken = [[torch.zeros(1, 24, 63), {}]]
    with pytest.raises(RuntimeError):
        sample(watched, broken, broken)
    assert hooks(model.model.diffusion_model) == 0
    management.interrupt_current_processing(True)
    with pytest.raises(management.InterruptProcessingException):
        sample(watched, encode(clip, PROMPT), encode(clip, ""))
    management.interrupt_current_processing(False)
    assert hooks(model.model.diffusion_model) == 0


def test_bad_input_is_refused_before_any_forward(comfy, loaded):
    model, clip, vae = loaded
    good = {
        "model": model,
        "vae": vae,
        "image": torch.rand(1, 64, 64, 3),
        "positive": encode(clip, PROMPT),
        "selection": "layers below",
        "layers": ADDRESSES,
        "timestep": 50.0,
        "seed": 0,
        "ensemble": 1,
        "dtype": "float32",
    }
    bad = [
        ({"layers": "up-level0-repeat0-vit-block0-cros-q"}, "Did you mean"),
        ({"image": torch.rand(1, 62, 64, 3)}, "multiples of 4"),
        ({"timestep": 1000.0}, "999"),
        ({"positive": []}, "CLIP Text Encode"),
        ({"selection": "Ours-XL"}, "Did you mean"),
    ]
    for change, words in bad:
        with pytest.raises(VitrineError, match=words):
            comfy.call("VitrineActivationTap", **good | change)
    with pytest.raises(VitrineError, match="0 5 10"):
        comfy.call("VitrineTapDuringSampling", model=model, layers=ADDRESSES, record_steps="first")
    assert hooks(model.model.diffusion_model) == 0


def test_saving_and_loading_refuse_paths(comfy, loaded):
    model, clip, vae = loaded
    inputs = {"selection": "layers below", "layers": ADDRESSES, "timestep": 50.0, "seed": 0, "ensemble": 1}
    inputs |= {"model": model, "vae": vae, "positive": encode(clip, PROMPT), "dtype": "float16"}
    image = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(0))
    taps, *_ = comfy.call("VitrineActivationTap", image=image, **inputs)
    comfy.call("VitrineSaveActivations", activations=taps, name="a tap")
    (again,) = comfy.call("VitrineLoadActivations", file="a tap.safetensors")
    assert all(torch.equal(again[a].tensor, taps[a].tensor) for a in taps)
    for name in ("../escape", "/tmp/escape", "", ".hidden", "a\\b"):
        with pytest.raises(VitrineError):
            comfy.call("VitrineSaveActivations", activations=taps, name=name)


def test_both_layouts_have_the_same_addresses(loaded, portraits):
    assert list(sites_of(loaded[0].model.diffusion_model)) == list(sites_of(portraits.unet))


def test_a_deep_clone_samples_the_same(loaded):
    model, clip, _ = loaded
    positive, negative = encode(clip, PROMPT), encode(clip, "")
    deep = model.clone(force_deepcopy=True)
    assert torch.equal(sample(model, positive, negative)[0], sample(deep, positive, negative)[0])


def test_rendered_portraits_come_with_captions(comfy):
    images, text, mask = comfy.call("VitrineRenderPortrait", seed=100_000, count=3, size=64, part="shirt")
    assert images.shape == (3, 64, 64, 3) and text == caption(sample_scenes([100_000]))[0]
    person = comfy.call("VitrineRenderPortrait", seed=100_000, count=3, size=64)[2]
    assert mask.shape == (3, 64, 64) and bool((mask <= person).all()) and 0 < float(mask.mean()) < float(person.mean())


def test_colours_have_a_legend_on_the_node_and_not_in_the_image(comfy, loaded):
    """Red, green and blue stand below the picture that the page shows; the IMAGE output is the picture alone."""
    from vitrine.nodes.activations import with_legend

    pictures = torch.rand(2, 64, 256, 3)
    shown = with_legend(pictures)
    assert torch.equal(shown[:, :64], pictures) and shown.shape == (2, 82, 256, 3) and torch.equal(*shown[:, 64:])
    for place, colour in enumerate(torch.eye(3)):
        assert torch.equal(shown[0, 64 + 8, 7 + 36 * place], colour)
    assert torch.equal(with_legend(pictures[:, :, :100]), pictures[:, :, :100]), "too small for words"
    model, clip, vae = loaded
    tap = comfy.nodes.NODE_CLASS_MAPPINGS["VitrineActivationTap"]
    with torch.inference_mode():
        told = {"image": torch.rand(1, 64, 64, 3), "layers": ADDRESSES, "selection": "layers below"}
        settings = {"timestep": 50.0, "seed": 0, "ensemble": 1, "dtype": "float32"}
        made = tap.execute(model=model, vae=vae, positive=encode(clip, PROMPT), **told, **settings)
    assert made.result[1].shape == (1, 256, 256, 3)
