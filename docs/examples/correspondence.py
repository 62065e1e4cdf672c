"""Correspondence and segmentation: points and masks carried from a few pictures to others, without training a network.

Your own checkpoint: change the one line marked below, for example to
``base = StableDiffusionPipeline.from_pretrained("path/to/model")``. For SDXL, take ``StableDiffusionXLPipeline``.

Run it cell by cell, or whole: ``python correspondence.py [folder for the pictures]``.
"""

import colorsys
import sys
import tempfile
from pathlib import Path

import torch
from diffusers.utils import make_image_grid
from PIL import Image, ImageDraw
from vitrine import CorrespondencePipeline, SegmentationPipeline, load_portraits
from vitrine.engine.activations.ranking import RankingConfig
from vitrine.engine.portraits import KEYPOINTS, PARTS, render, sample_scenes
from vitrine.evidence.portraits.page import to_pil

out = Path(sys.argv[1] if len(sys.argv) > 1 and "ipykernel" not in sys.modules else tempfile.mkdtemp())
out.mkdir(parents=True, exist_ok=True)

# %% The model: a tiny one that ships with the pack.
base = load_portraits().pipeline()  # your own checkpoint goes here
pipe = SegmentationPipeline.from_pipe(CorrespondencePipeline.from_pipe(base))  # one object that does both
pipe.set_progress_bar_config(disable=True)
size = base.unet.config.sample_size * base.vae_scale_factor

# %% Sixteen labelled portraits, eight new ones.
known = render(sample_scenes(range(300_000, 300_016)), size)
new = render(sample_scenes(range(400_000, 400_008)), size)
masks, truth = known.parts.long(), new.parts.long()

# %% Which places to tap for masks? Filter them by noise, granularity and locality, compare the rest on the masks.
config = RankingConfig("up-*-q, up-*-res-out", most=2)
ranking = pipe.rank(known.images, masks, "a face", config=config)
print(f"{len(ranking.properties)} places, {len(ranking.dropped)} dropped by the filter; chosen:", *ranking.chosen)
tap = {"addresses": list(ranking.chosen), "timestep": 50, "seeds": [0, 1, 2, 3]}

# %% Points of the first portrait, found in others that stand aside and tilted. The renderer knows where they truly are.
aside = sample_scenes(range(400_000, 400_008)).with_pose(shift_x=0.2, shift_y=0.08, scale=0.95, tilt=0.15)
others = render(aside, size)
places = ["up-level0-repeat0-res-increment", "up-level0-repeat1-res-increment"]  # or preset="Ours-v1.5" for SD 1.5
asked = known.keypoints[0, : KEYPOINTS.index("chin") + 1]
settings = {"addresses": places, "timestep": 50, "seeds": [0, 1, 2, 3]}
matches = pipe.match(known.images[:1], others.images, asked, "a face", **settings)
matched, true = torch.stack([match.points for match in matches]).cpu(), others.keypoints[:, : len(asked)]
for name, where in (("found", matched), ("left where they were", asked.expand_as(true))):
    away = (where - true).norm(dim=-1)
    print(f"{name}: {(away < 0.1).float().mean():.0%} within a tenth of the picture, {away.mean() * size:.1f} px off")


# %% Draw them: the source first, then what was found.
def dotted(picture, where, side=192):
    picture = picture.resize((side, side), Image.Resampling.NEAREST)
    for k, (x, y) in enumerate((where * side).tolist()):
        colour = tuple(round(255 * c) for c in colorsys.hsv_to_rgb(k / len(where), 0.9, 1.0))
        ImageDraw.Draw(picture).ellipse((x - 6, y - 6, x + 6, y + 6), fill=colour, outline="white")
    return picture


dots = [dotted(p, w) for p, w in zip(to_pil(others.images), matched, strict=True)]
source = dotted(to_pil(known.images[:1])[0], asked)
make_image_grid([source, *dots[:4]], 1, 5).save(out / "points.png")

# %% Every part of the face, learned from the sixteen and found in the eight.
labels = pipe.segment(known.images, masks, new.images, "a face", classes=len(PARTS), **tap).cpu()
for k, name in enumerate(PARTS):
    both, either = ((labels == k) & (truth == k)).sum(), ((labels == k) | (truth == k)).sum()
    print(f"{name:12} overlap {both / either:.0%}" if either else f"{name:12} in none of the eight")
print(f"pixels labelled right: {(labels == truth).float().mean():.0%}")

# %% Draw them: the picture, what was found, what is true.
palette = [round(255 * c) for k in range(len(PARTS)) for c in colorsys.hsv_to_rgb(k / len(PARTS), 0.5, 0.9)]


def coloured(labels):
    picture = Image.fromarray(labels.byte().numpy())
    picture.putpalette(palette)
    return picture.convert("RGB").resize((128, 128), Image.Resampling.NEAREST)


rows = [[p.resize((128, 128)) for p in to_pil(new.images)], list(map(coloured, labels)), list(map(coloured, truth))]
make_image_grid([picture for row in rows for picture in row], 3, len(labels)).save(out / "parts.png")
print("pictures in", out)
