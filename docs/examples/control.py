"""Control conditioning: the size a model is told should change sharpness, not what is in the picture.

Your own checkpoint: change the one line marked below, for example to
``pipe = ControlConditionedPipeline.from_pipe(StableDiffusionXLPipeline.from_pretrained("path/to/model"))``; then pass
``prompt=`` for the encoded texts, leave ``checkpoint`` out, and compare gamma "constant" (stock) with "power_cos".
SD1.x is told no size by itself: ``ControlConditionedPipeline`` takes it with a control checkpoint.

Run it cell by cell, or whole: ``python control.py [folder for the pictures]``.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from diffusers import PixArtAlphaPipeline
from diffusers.utils import make_image_grid
from vitrine import (
    ControlConditionedPipeline,
    GuidanceConfig,
    SizeCondition,
    load_portraits,
)
from vitrine.engine.portraits import caption, sample_scenes
from vitrine.engine.portraits.shipped import TRANSFORMERS, load_transformer
from vitrine.evidence.portraits.page import to_pil

out = Path(sys.argv[1] if len(sys.argv) > 1 and "ipykernel" not in sys.modules else tempfile.mkdtemp())
out.mkdir(parents=True, exist_ok=True)

# %% Two small PixArt-shaped models that were told the size of their training pictures: with the paper's curve, and with
# a constant weight as in SDXL. In their training pictures, small ones show other things than large ones.
base = load_portraits()


def opened(name):
    parts = {"transformer": load_transformer(name), "vae": base.vae, "scheduler": base.scheduler}
    stock = PixArtAlphaPipeline(tokenizer=None, text_encoder=None, **parts)  # your own checkpoint goes here
    pipe = ControlConditionedPipeline.from_pipe(stock)
    pipe.set_progress_bar_config(disable=True)
    return pipe, pipe.load_control(TRANSFORMERS / name / "control.safetensors")


# %% Prompts that leave much open, encoded by the portraits model's own text encoder.
unsaid = np.ones((4, 5), bool)  # skin, hair colour, mouth, shirt, background
prompts = caption(sample_scenes(range(7_000_000, 7_000_004)), unsaid)
with torch.no_grad():
    text, empty = base.encode(prompts), base.encode([""]).expand(len(prompts), -1, -1)
masks = {f"{n}prompt_attention_mask": torch.ones(len(prompts), text.shape[1]) for n in ("", "negative_")}
embeds = {"prompt_embeds": text, "negative_prompt_embeds": empty} | masks

# %% The same seeds told to come from pictures of 16, 64 and 256 pixels.
sizes, rows = [(16, 16), (64, 64), (256, 256)], []
for name in ("power-cosine", "constant"):
    pipe, checkpoint = opened(name)

    def draw(size, pipe=pipe, checkpoint=checkpoint):
        settings = {"num_inference_steps": 12, "output_type": "pt", "height": 64, "width": 64, "seeds": [0, 1, 2, 3]}
        control = {
            "size_condition": SizeCondition(original=size),
            "checkpoint": checkpoint,
            "guidance": GuidanceConfig(2.0),
        }
        return pipe(**control, **settings, **embeds).images.float()

    drawn = {size: draw(size) for size in sizes}
    rows += list(drawn.values())
    smallest, largest = drawn[sizes[0]], drawn[sizes[-1]]
    print(f"{name}: pictures differ by {(smallest - largest).square().mean().sqrt():.4f} RMS between sizes")

# %% Rows: power-cosine at 16, 64, 256, then constant at the same sizes.
make_image_grid([picture for row in rows for picture in to_pil(row)], 6, len(prompts), 128).save(out / "sizes.png")

# %% Guidance towards the control itself (Eq. 2): how many network calls each step took, and what it changed.
pipe, checkpoint = opened("power-cosine")
settings = {"num_inference_steps": 12, "output_type": "pt", "height": 64, "width": 64, "seeds": [0, 1, 2, 3]}
for control in (1.0, 1.375):
    guidance = GuidanceConfig(2.0, control)
    output = pipe(
        size_condition=SizeCondition(original=(16, 16)), checkpoint=checkpoint, guidance=guidance, **settings, **embeds
    )
    moved = (output.images.float() - rows[0]).square().mean().sqrt()
    print(f"control {control}: evaluations {[step.evaluations for step in output.log]}, moved by {moved:.3f}")

print("pictures in", out)
