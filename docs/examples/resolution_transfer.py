"""Resolution transfer: pictures of another size than the model was trained on.

Your own checkpoint: change the one line marked below, for example to
``base = StableDiffusionXLPipeline.from_pretrained("path/to/model")``; PixArt, SD3 and FLUX go as well.

Run it cell by cell, or whole: ``python resolution_transfer.py [folder for the pictures]``.
"""

import sys
import tempfile
from pathlib import Path

from diffusers.utils import make_image_grid
from torch.nn.functional import interpolate
from vitrine import ResolutionTransferConfig, ResolutionTransferPipeline, load_portraits
from vitrine.engine.portraits import caption, sample_scenes
from vitrine.engine.resolution import facts_of
from vitrine.evidence.portraits.classifier import attribute_accuracy, load_classifier, read
from vitrine.evidence.portraits.page import to_pil

out = Path(sys.argv[1] if len(sys.argv) > 1 and "ipykernel" not in sys.modules else tempfile.mkdtemp())
out.mkdir(parents=True, exist_ok=True)

# %% The model: a tiny one that ships with the pack.
base = load_portraits().pipeline()  # your own checkpoint goes here
base.set_progress_bar_config(disable=True)
width, height = facts_of(base).train_size
bigger = (2 * width, 2 * height)

# %% Plan: what will be done, and why, before anything runs. A UNet repeats heads at twice its size whatever the
# schedule; spreading its inner convolutions cures them. Transformers need no receptive_field, and refuse it.
spread = "dilate" if hasattr(base, "unet") else "none"
pipe = ResolutionTransferPipeline.from_pipe(base, ResolutionTransferConfig(bigger, receptive_field=spread))
print(pipe.plan.summary)

# %% The same prompts at the training size, at the bigger size as it comes, and with the transfer.
scenes = sample_scenes(range(6_000_000, 6_000_004))
prompts, seeds = caption(scenes), list(range(len(scenes)))
settings = {"seeds": seeds, "num_inference_steps": 12, "guidance_scale": 3.0, "output_type": "pt"}
ways = {
    "training size": ResolutionTransferConfig((width, height)),
    "bigger, untouched": ResolutionTransferConfig(bigger, schedule="none", pos_embed="keep"),
    "bigger, noise resampled": ResolutionTransferConfig(bigger),
    "bigger, and convolutions spread": ResolutionTransferConfig(bigger, receptive_field=spread),
}
images = {
    name: ResolutionTransferPipeline.from_pipe(base, config)(prompts, **settings).images
    for name, config in ways.items()
}

# %% Do the pictures show what the prompts say? A network that reads portraits tells (it knows no photographs).
for name, made in images.items():
    seen = attribute_accuracy(read(load_classifier(), interpolate(made.float().cpu(), (64, 64), mode="area")), scenes)
    worst = min(seen, key=seen.__getitem__)
    print(f"{name}: {sum(seen.values()) / len(seen):.1%} of attributes shown; least {worst}, {seen[worst]:.0%}")

# %% Training size, untouched, resampled, spread.
grid = [picture for made in images.values() for picture in to_pil(made.float().cpu())]
make_image_grid([picture.resize((192, 192)) for picture in grid], 4, 4).save(out / "sizes.png")
print("pictures in", out)
