"""Look Inside (Activation Tap): what a diffusion model sees in a picture.

Your own checkpoint: change the one line marked below, for example to
``base = StableDiffusionPipeline.from_pretrained("path/to/model")``. For SDXL, take ``StableDiffusionXLPipeline``.

Run it cell by cell, or whole: ``python activation_tap.py [folder for the pictures]``.
"""

import sys
import tempfile
from pathlib import Path

from diffusers.utils import make_image_grid
from vitrine import Activations, ActivationTapPipeline, PCABasis, load_portraits, pca_rgb
from vitrine.engine.portraits import caption, render, sample_scenes
from vitrine.evidence.activations.measures import part_agreement
from vitrine.evidence.portraits.page import to_pil

out = Path(sys.argv[1] if len(sys.argv) > 1 and "ipykernel" not in sys.modules else tempfile.mkdtemp())
out.mkdir(parents=True, exist_ok=True)

# %% The model: a tiny one that ships with the pack.
base = load_portraits().pipeline()  # your own checkpoint goes here
pipe = ActivationTapPipeline.from_pipe(base)
pipe.set_progress_bar_config(disable=True)
size = base.unet.config.sample_size * base.vae_scale_factor

# %% The pictures: eight cartoon portraits, drawn at the model's size, with the part of the face each pixel belongs to.
scenes = sample_scenes(range(6_000_000, 6_000_008))
drawn, prompts = render(scenes, size), caption(scenes)

# %% Noise them to timestep 50, run the UNet once, keep what is wanted: the middle, and every cross-attention query of
# the up stage. ``vitrine addresses MODEL`` lists what a model has; a wrong name is refused with the nearest right ones.
places = ["mid-vit-out", "up-*-block0-cross-q", "up-*-upsampler-out"]
tap = pipe.tap(drawn.images, prompts, places, timestep=50, seeds=[0, 1], output_type="none")

# %% How often does the nearest feature in another picture lie in the same part of the face?
print(f"{'place':40} {'shape':20} same part")
print(f"{'(pixels)':40} {tuple(drawn.images.shape)!s:20} {part_agreement(drawn.images, drawn.parts):.0%}")
for address, activation in tap.activations.items():
    print(f"{address:40} {tuple(activation.tensor.shape)!s:20} {part_agreement(activation.tensor, drawn.parts):.0%}")


# %% Three principal components as colours, the same for all pictures: equal colours are equal features.
def coloured(activation):
    return to_pil(pca_rgb(activation, PCABasis.fit(activation), 64))


def save(rows, name):
    make_image_grid([picture for row in rows for picture in row], len(rows), len(rows[0]), 128).save(out / name)


save([to_pil(drawn.images), *map(coloured, tap.activations.values())], "places.png")

# %% One place at four levels of noise.
place, rows = "up-level1-repeat0-vit-block0-cross-q", []
for timestep in (50, 300, 600, 900):
    noisy = pipe.tap(drawn.images, prompts, place, timestep=timestep, seeds=[0, 1], output_type="none")
    rows.append(coloured(noisy.activations[place]))
    print(f"{place} at timestep {timestep}: {part_agreement(noisy.activations[place].tensor, drawn.parts):.1%}")
save(rows, "noise_levels.png")

# %% Keep them: one safetensors file with addresses, timestep, seeds and prompts in its header.
tap.activations.save(out / "faces.safetensors")
print(Activations.load(out / "faces.safetensors").info.prompts[0])
print("pictures in", out)
