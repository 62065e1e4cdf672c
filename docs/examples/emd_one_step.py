"""EM Distillation: a picture in one network call.

Your own checkpoint: change the one line marked below, for example to
``return StableDiffusionPipeline.from_pretrained("path/to/model")``, and name your student's file in the cell after it.
SDXL and transformers (Flux, SD3, Z-Image ...) are made the same way, by EMDOneStepPipeline.from_pipe(any pipeline) and
.from_pretrained(any folder); what is made is an instance of the pipeline's own class too.

Run it cell by cell, or whole: ``python emd_one_step.py [folder for the pictures]``.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch
from diffusers.utils import make_image_grid
from torch.nn.functional import interpolate
from vitrine import EMDOneStepPipeline, load_portraits
from vitrine.engine.portraits import caption, sample_scenes
from vitrine.engine.portraits.shipped import student_file
from vitrine.evidence.portraits.classifier import attribute_accuracy, load_classifier, read
from vitrine.evidence.portraits.page import to_pil

out = Path(sys.argv[1] if len(sys.argv) > 1 and "ipykernel" not in sys.modules else tempfile.mkdtemp())
out.mkdir(parents=True, exist_ok=True)


# %% The model: a tiny one that ships with the pack. Each pipeline gets its own copy, as a student changes the UNet.
def base():
    return load_portraits().pipeline()  # your own checkpoint goes here


# %% The teacher, and its student: a LoRA of 2 MB that carries its preset (timestep, kind of noise) in its header.
teacher, student = base(), EMDOneStepPipeline.from_pipe(base())
preset = student.load_student(student_file("student"))
rows = []


def counted(pipe):
    """Have the UNet say how many rows it is called with."""
    pipe.set_progress_bar_config(disable=True)
    pipe.unet.register_forward_hook(lambda net, given, made: rows.append(len(made[0])))


for pipe in (teacher, student):
    counted(pipe)
print(f"one call at timestep {preset.timestep:.0f}, noise {preset.noise}")

# %% The same eight prompts and seeds for both.
scenes = sample_scenes(range(6_000_000, 6_000_008))
prompts, seeds = caption(scenes), list(range(len(scenes)))


def shown(name, sample):
    """Draw, and print what it cost and whether the pictures show what the prompts say (a network reads portraits)."""
    rows.clear()
    began = time.perf_counter()
    images = sample().images.float().cpu()
    seconds = (time.perf_counter() - began) / len(images)
    seen = attribute_accuracy(read(load_classifier(), interpolate(images, (64, 64), mode="area")), scenes)
    print(f"{name}: {sum(rows) / len(images):.0f} network rows and {1000 * seconds:.0f} ms a picture,", end=" ")
    print(f"{sum(seen.values()) / len(seen):.0%} of the prompt's attributes shown")
    return images


# %% Thirty steps with guidance, against one call.
generators = [torch.Generator().manual_seed(seed) for seed in seeds]
settings = {"num_inference_steps": 30, "guidance_scale": 3.0, "output_type": "pt"}
many = shown("teacher, 30 steps", lambda: teacher(prompts, generator=generators, **settings))
one = shown("student, one step", lambda: student(prompts, seeds, preset, output_type="pt"))

# %% Teacher, student.
grid = [picture for images in (many, one) for picture in to_pil(images)]
make_image_grid(grid, 2, 8, 128).save(out / "one_step.png")
print("pictures in", out)
