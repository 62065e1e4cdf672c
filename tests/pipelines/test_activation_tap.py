"""ActivationTapPipeline with real tiny diffusers components."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from vitrine.engine.activations import Activations, PCABasis
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines import ActivationTapPipeline
from vitrine.engine.portraits import build_models, render, sample_scenes
from vitrine.engine.runtime.progress import Interrupted
from vitrine.engine.tracing.addresses import resolve
from vitrine_tests.machine.stock import deep_sdxl, stable_diffusion

pytestmark = pytest.mark.rounding
Q = "up-level0-repeat0-vit-block0-cross-q"


@pytest.fixture(scope="module")
def pipe() -> ActivationTapPipeline:
    torch.set_num_threads(1)
    m = build_models(seed=2)
    pipe = ActivationTapPipeline.from_pipe(stable_diffusion(m, m.scheduler))
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def pixels() -> torch.Tensor:
    """Three pictures in [0, 1]."""
    return render(sample_scenes([1, 2, 3])).images.float().clamp(0, 1)


def pil(pixels: torch.Tensor) -> list[Image.Image]:
    return [Image.fromarray((p * 255).round().byte().permute(1, 2, 0).numpy()) for p in pixels]


def close(a: Activations, b: Activations, tolerance: float = 1e-5) -> bool:
    return list(a) == list(b) and all((a[k].tensor - b[k].tensor).abs().max() <= tolerance for k in a)


def test_pictures_in_activations_out(pipe, pixels, tmp_path: Path) -> None:
    out = pipe.tap(pil(pixels), ["a man", "a woman", "a hat"], preset="portraits", seeds=[0, 1], variance=True)
    activations, pictures = out.to_tuple()
    assert activations[Q].tensor.shape == (3, pipe.unet.config.block_out_channels[1], 8, 8)
    assert activations[Q].grid == (8, 8)
    assert set(pictures) == set(activations) and pictures[Q][2].size == (64, 64)
    assert out.activations.info.prompts == ("a man", "a woman", "a hat") and out.activations.info.seeds == (0, 1)
    assert close(Activations.load(activations.save(tmp_path / "taps.safetensors")), activations, 0)
    plain = pipe.tap(pil(pixels), preset="portraits", output_type="none", return_dict=False)
    assert isinstance(plain, tuple) and plain[1] == {}


def test_without_a_layer_it_is_the_one_that_the_nodes_read(pipe, pixels) -> None:
    ours = pipe.tap(pixels).activations
    assert list(ours.keys()) == [site.address for site in resolve(pipe.unet, "auto")]
    assert close(ours, pipe.tap(pixels, addresses="auto").activations)


def test_all_usual_forms_of_a_picture_agree(pipe, pixels) -> None:
    eight = (pixels * 255).round() / 255
    forms = [
        pil(eight),
        eight,
        eight * 2 - 1,
        list(eight),
        eight.permute(0, 2, 3, 1).numpy(),
        [p.permute(1, 2, 0).numpy() for p in eight],
        (eight.permute(0, 2, 3, 1) * 255).round().byte().numpy(),
    ]
    taps = [pipe.tap(form, addresses=Q).activations for form in forms]
    assert all(close(taps[0], other) for other in taps[1:])
    assert taps[0].rows == 3 and pipe.tap(pil(eight)[0], addresses=Q).activations.rows == 1


def test_batch_does_not_matter(pipe, pixels) -> None:
    together = pipe.tap(pixels, ["a", "b", "c"], preset="portraits", seeds=[5, 6], batch=3).activations
    for i, word in enumerate("abc"):
        alone = pipe.tap(pixels[i], word, preset="portraits", seeds=[5, 6]).activations
        assert close(together.row(i), alone, 1e-4)


def test_each_picture_is_encoded_once(pipe, pixels, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, encode = [], pipe.vae.encode
    monkeypatch.setattr(pipe.vae, "encode", lambda x: (calls.append(len(x)), encode(x))[1])
    pipe.tap(pixels, addresses=Q, seeds=range(8))
    assert calls == [3]


def test_latents_skip_the_encoder(pipe, pixels) -> None:
    with torch.no_grad():
        latents = pipe.vae.encode(pixels * 2 - 1).latent_dist.mean * pipe.vae.config.scaling_factor
    assert close(pipe.tap(latents, addresses=Q).activations, pipe.tap(pixels, addresses=Q).activations)


def test_posterior_sample_is_seeded_and_as_diffusers_draws_it(pipe, pixels) -> None:
    one = pipe.tap(pixels[:1], addresses=Q, posterior="sample", seeds=9).activations
    assert close(one, pipe.tap(pixels[:1], addresses=Q, posterior="sample", seeds=9).activations, 0)
    assert not close(one, pipe.tap(pixels[:1], addresses=Q, posterior="mean", seeds=9).activations)
    generator = torch.Generator().manual_seed(9)  # GDF's order: posterior sample, then noise, from one stream
    with torch.no_grad():
        latents = pipe.vae.encode(pixels[:1] * 2 - 1).latent_dist.sample(generator) * pipe.vae.config.scaling_factor
    assert close(one, pipe.tap(latents, addresses=Q, generator=generator).activations)


def test_generators(pipe, pixels) -> None:
    def make() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(s) for s in (4, 5, 4)]

    listed = pipe.tap(pixels, addresses=Q, generator=make()).activations
    assert close(listed.row(0), pipe.tap(pixels[:1], addresses=Q, seeds=4).activations, 1e-4)
    assert close(listed.row(1), pipe.tap(pixels[1:2], addresses=Q, seeds=5).activations, 1e-4)
    assert listed.info.seeds == (4, 5, 4)
    single = pipe.tap(pixels[:1], addresses=Q, generator=torch.Generator().manual_seed(4)).activations
    assert close(single, listed.row(0), 1e-4)


def test_shared_basis(pipe, pixels) -> None:
    activations = pipe.tap(pixels, addresses=Q).activations
    basis = {Q: PCABasis.fit(activations[Q])}
    pictures = pipe.tap(pixels, addresses=Q, basis=basis).pictures[Q]
    assert pictures[0].size == (64, 64) and np.asarray(pictures[0]).shape == (64, 64, 3)


def test_save_and_load(pipe, pixels, tmp_path: Path) -> None:
    pipe.save_pretrained(tmp_path)
    again = ActivationTapPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    taps = again.tap(pixels, preset="portraits").activations
    assert close(taps, pipe.tap(pixels, preset="portraits").activations, 0)
    assert str(tmp_path) not in taps.info.model, "no machine's paths in saved taps"


def test_from_pipe_and_back(pipe, pixels) -> None:
    from diffusers import StableDiffusionPipeline

    stock = StableDiffusionPipeline(**pipe.components, requires_safety_checker=False)
    ours = ActivationTapPipeline.from_pipe(stock)
    ours.set_progress_bar_config(disable=True)
    assert ours.unet is pipe.unet
    assert close(ours.tap(pixels, addresses=Q).activations, pipe.tap(pixels, addresses=Q).activations, 0)
    back = StableDiffusionPipeline.from_pipe(ours, safety_checker=None, feature_extractor=None)
    back.set_progress_bar_config(disable=True)
    assert back("a man", num_inference_steps=1, output_type="np", height=64, width=64).images.shape == (1, 64, 64, 3)


def test_the_bar_is_diffusers_own(pipe, pixels, capsys: pytest.CaptureFixture) -> None:
    pipe.set_progress_bar_config(disable=False)
    seen = []
    pipe.tap(
        pixels,
        addresses=Q,
        seeds=[0, 1],
        batch=3,
        progress=lambda step, total, preview=None: seen.append((step, total)),
    )
    pipe.set_progress_bar_config(disable=True)
    assert seen == [(3, 6), (6, 6)] and "6/6" in capsys.readouterr().err


BAD = [
    ({"addresses": []}, "addresses"),
    ({"addresses": "up-level9-*"}, "up-level9"),
    ({"preset": "nothing-like-it", "addresses": None}, "preset"),
    ({"timestep": 1000}, "timestep"),
    ({"timestep": -1}, "timestep"),
    ({"seeds": []}, "seeds"),
    ({"seeds": [1], "generator": torch.Generator()}, "seeds and generator"),
    ({"generator": [torch.Generator()] * 2}, "generator"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"output_type": "jpeg"}, "output_type"),
    ({"image": torch.rand(1, 3, 62, 64)}, "image size"),
    ({"image": torch.rand(1, 3, 64, 64) * 255}, "image values"),
    ({"image": torch.full((1, 3, 64, 64), float("nan"))}, "image values"),
    ({"image": torch.rand(64, 64)}, "image shape"),
    ({"image": "cat.png"}, "image"),
    ({"image": []}, "image"),
    ({"image": [Image.new("RGB", (64, 64)), Image.new("RGB", (32, 64))]}, "image sizes"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_refused_before_any_forward(pipe, pixels, bad: dict, message: str) -> None:
    ran = []
    modules = (pipe.unet, pipe.text_encoder, pipe.vae.encoder)
    handles = [m.register_forward_pre_hook(lambda *_: ran.append(1)) for m in modules]
    try:
        with pytest.raises(VitrineError, match=message):
            pipe.tap(**{"image": pixels, "prompt": "", "addresses": Q, **bad})
    finally:
        for handle in handles:
            handle.remove()
    assert not ran


def test_broken_weights_are_named_before_the_forward(pipe, pixels) -> None:
    weight = pipe.unet.conv_out.weight
    old = weight.data[0, 0, 0, 0].item()
    with torch.no_grad():
        weight[0, 0, 0, 0] = float("nan")
    try:
        with pytest.raises(VitrineError, match="conv_out.weight"):
            pipe.tap(pixels, addresses=Q)
    finally:
        with torch.no_grad():
            weight[0, 0, 0, 0] = old


def test_size_resizes_to_a_square(pipe) -> None:
    tap = pipe.tap(Image.new("RGB", (50, 70), "teal"), addresses=Q, size=64).activations
    assert tap[Q].grid == (8, 8)
    wide = pipe.tap(torch.rand(1, 3, 64, 96), addresses=Q).activations
    assert wide[Q].grid == (8, 12)


def test_interrupt_leaves_nothing(pipe, pixels, tmp_path: Path, no_hooks_left) -> None:
    def stop(step: int, total: int, preview: object = None) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        pipe.tap(pixels, addresses=Q, progress=stop, batch=1).activations.save(tmp_path / "a.safetensors")
    no_hooks_left(pipe.unet)
    assert not list(tmp_path.iterdir())


def test_sdxl_kind(pixels) -> None:
    pipe = ActivationTapPipeline.from_pipe(deep_sdxl())
    out = pipe.tap(pixels, ["a", "b", "c"], addresses=["up-level0-repeat0-vit-block1-out"], seeds=[0, 1]).activations
    alone = pipe.tap(pixels[2], "c", addresses=["up-level0-repeat0-vit-block1-out"], seeds=[0, 1]).activations
    assert close(out.row(2), alone, 1e-4)
    with pytest.raises(VitrineError, match="from_pipe"):
        ActivationTapPipeline(pipe.vae, pipe.text_encoder, pipe.tokenizer, pipe.unet, pipe.scheduler)


def test_half_precision_networks(pixels) -> None:
    m = build_models(seed=2)
    full = ActivationTapPipeline.from_pipe(stable_diffusion(m, m.scheduler))
    full.set_progress_bar_config(disable=True)
    exact = full.tap(pixels, "a man", addresses=Q).activations[Q].tensor
    rough = full.to(torch.bfloat16).tap(pixels, "a man", addresses=Q).activations[Q].tensor
    assert rough.dtype == torch.float32 and (exact - rough).abs().mean() < 0.05 * exact.abs().mean()


def test_a_prompt_that_is_cut_is_announced(pipe, pixels, caplog: pytest.LogCaptureFixture) -> None:
    from diffusers.utils import logging

    logging.enable_propagation()
    pipe.tap(pixels[:1], "a man " * 40, addresses=Q)
    logging.disable_propagation()
    assert "can only handle sequences up to 24 tokens" in caplog.text
