"""weights2weights: sample a model from a space of models, edit it, find one from a single picture, export it as a LoRA.

Your own checkpoint: change the one line marked below, for example to
``base, space = StableDiffusionPipeline.from_pretrained("path/to/model"), load_space("yours.w2w.safetensors")``;
``vitrine w2w build`` makes a space from a folder of LoRAs. The cell after it names prompts, sliders and a picture.

Run it cell by cell, or whole: ``python w2w.py [folder for the pictures]``.
"""

import sys
import tempfile
from pathlib import Path

import torch
from diffusers.utils import make_image_grid
from vitrine import (
    EditConfig,
    InvertConfig,
    SampleConfig,
    W2WPipeline,
    load_portraits,
    load_space,
    materialise,
    write_lora,
)
from vitrine.engine.portraits import render
from vitrine.engine.portraits.shipped import PEOPLE_SPACE
from vitrine.evidence.portraits.identities import FIRST_IDENTITY, context_caption, portraits_of
from vitrine.evidence.portraits.page import to_pil

out = Path(sys.argv[1] if len(sys.argv) > 1 and "ipykernel" not in sys.modules else tempfile.mkdtemp())
out.mkdir(parents=True, exist_ok=True)

# %% The model, and a space in which a person is a row of numbers: 520 LoRAs of one person each went into it.
base, space = load_portraits().pipeline(), load_space(PEOPLE_SPACE)  # your own checkpoint goes here
pipe = W2WPipeline.from_pipe(base)
pipe.set_progress_bar_config(disable=True)
print(f"{space.count} models, {space.dimension} components; sliders:", *sorted(space.directions), sep=" | ")

# %% Prompts say the surroundings only. Sliders are the space's own labels. Of somebody in no space, one picture.
prompts = context_caption(portraits_of(FIRST_IDENTITY, 4, 5000))
sliders = {"glasses": 3.0, "beard": 3.0}
somebody = portraits_of(FIRST_IDENTITY + 5003, 1, 6003)
picture = render(somebody).images


def draw(model, **more):
    """One picture for each prompt, of one model; None is the base."""
    settings = {"num_inference_steps": 12, "guidance_scale": 2.0, "output_type": "pt"}
    who = {} if model is None else {"space": space, "model": model}
    return pipe(prompts, seeds=[0, 1, 2, 3], **who, **settings, **more).images.float().cpu()


def save(rows, name):
    make_image_grid([image for row in rows for image in to_pil(row)], len(rows), len(rows[0]), 128).save(out / name)


# %% Sample: three people who do not exist, each the same in every picture.
people = pipe.sample_models(space, [17, 1, 2], SampleConfig(components=space.dimension, attributes="joined"))
save([draw(people[i]) for i in range(3)], "sampled.png")

# %% Edit: the same person with each slider, and with all of them.
person = people[0]
before = draw(person)
edited = pipe.edit_model(space, person, sliders)
steps = [pipe.edit_model(space, person, {label: strength}) for label, strength in sliders.items()]
save([before, *map(draw, steps), draw(edited)], "edited.png")

# %% Delay the edit: what is drawn before timestep ``start`` stays. The later, the less changes.
rows = []
for start in (1000, 700, 400, -1):
    rows.append(draw(person, edits=sliders, edit_config=EditConfig(start_timestep=start)))
    print(f"edit from timestep {start}: pictures move by {(rows[-1] - before).abs().mean():.4f}")
save(rows, "delayed.png")

# %% Invert: the person in one picture. Only the coefficients are trained, so they move freely in new prompts.
config = InvertConfig(steps=80, lr=0.6, batch=4, schedule="cosine", antithetic=True, prior=2e-4)
inverted, inversion = pipe.invert_image(space, picture, context_caption(somebody)[0], config)
print("held-out loss by step:", *(f"{step}: {losses[0]:.4f}" for step, losses in inversion.losses))
drawn = draw(inverted)
save([torch.cat([picture, drawn])], "inverted.png")

# %% A child of both, written as a LoRA that loads in any program; here in plain diffusers.
child = pipe.blend_models(space, [person, inverted])
wanted = draw(child)
path = write_lora(out / "child.safetensors", materialise(space, child))
pipe.load_lora_weights(str(path))
loaded = draw(None)
pipe.unload_lora_weights()
save([before, wanted, drawn], "child.png")
print(f"{path.name}: {path.stat().st_size // 1024} KiB, pictures differ by {(loaded - wanted).abs().max():.1e}")
print("pictures in", out)
