"""Draw docs/overview.png from the shipped model: renders, samples of their captions, activations. Run from anywhere."""

from pathlib import Path

import torch
from PIL import Image
from vitrine.engine.activations import PCABasis, TapConfig, encode_pixels, pca_rgb, tap_latents
from vitrine.engine.condition import Condition
from vitrine.engine.denoiser import Denoiser
from vitrine.engine.portraits import caption, load_portraits, render, sample_scenes
from vitrine.evidence.portraits.sampling import sample_images

SEEDS = list(range(6_000_000, 6_000_008))
PLACES = ("up-level0-repeat0-vit-block0-cross-q", "up-level1-repeat0-vit-block0-cross-q")


def main() -> None:
    """Four rows of eight: render, sample of its caption, two taps of the render."""
    model, scenes = load_portraits(), sample_scenes(SEEDS)
    pictures, prompts = render(scenes).images, caption(scenes)
    samples = sample_images(model, prompts, list(range(8)))
    with torch.no_grad():
        cond, latents = Condition(model.encode(prompts)), encode_pixels(model.vae, pictures * 2 - 1)
    config = TapConfig(PLACES, timestep=50, seeds=tuple(range(8)))
    taps = tap_latents(Denoiser.from_diffusers(model.pipeline()), latents, cond, config)
    rows = [pictures, samples, *(pca_rgb(taps[a], PCABasis.fit(taps[a]), 64) for a in PLACES)]
    sheet = torch.cat([torch.cat(list(row), 2) for row in rows], 1)
    image = Image.fromarray((sheet.permute(1, 2, 0) * 255).round().byte().numpy())
    image = image.resize((image.width * 2, image.height * 2), Image.Resampling.NEAREST)
    image.save(Path(__file__).parent / "overview.png")


if __name__ == "__main__":
    main()
