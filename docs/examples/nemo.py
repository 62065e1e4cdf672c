"""NEMO: does a prompt replay a training picture, which neurons hold it, and what the prompt gives without them.

Your own checkpoint: change the one line marked below, for example to
``base = StableDiffusionPipeline.from_pretrained("path/to/model")``, and name your own suspect in the cell after it.

Run it cell by cell, or whole: ``python nemo.py [folder for the pictures]``.
"""

import sys
import tempfile
from pathlib import Path

import torch
from diffusers.utils import make_image_grid
from vitrine import CheckConfig, NEMOPipeline, ProbeConfig, copy_check, load_portraits
from vitrine.engine.pipelines.nemo_jobs import verify_blocking
from vitrine.engine.portraits import caption, plants, render, sample_scenes
from vitrine.evidence.portraits.page import to_pil

out = Path(sys.argv[1] if len(sys.argv) > 1 and "ipykernel" not in sys.modules else tempfile.mkdtemp())
out.mkdir(parents=True, exist_ok=True)

# %% The model: a tiny one that ships with the pack. Eight of its training pictures were repeated on purpose.
base = load_portraits().pipeline()  # your own checkpoint goes here
pipe = NEMOPipeline.from_pipe(base)
pipe.set_progress_bar_config(disable=True)
side = base.unet.config.sample_size

# %% A prompt to suspect, the same without its two rare words, and ordinary captions (500 or more for a real model).
plant = plants()[0]
suspect, control = plant.captions[0], plant.controls[0]
ordinary = caption(sample_scenes(range(8_100_000, 8_100_600)))
print(suspect)

# %% Once for a model: how its value neurons usually fire, how much samples of one caption usually differ, and how alike
# its one-step predictions are.
probe = ProbeConfig(timestep_index=4 if side < 32 else 1)  # small latents are decided later
calibration = pipe.calibrate(ordinary, probe=probe, scored=100)

# %% Detect: a memorized prompt gives the same picture whatever the seed.
for name, found in zip(("suspect", "control"), pipe.detect([suspect, control], calibration), strict=True):
    print(f"{name}: {found.text()}")

# %% Find the neurons that hold the picture; samples before and after judge the search.
(result,) = pipe.find([suspect], calibration)
neurons = pipe.neurons(result)
print(f"{len(neurons)} neurons in {len(neurons.neurons)} layers; verdict: {result.verdict}")
neurons.save(out / "neurons.safetensors")


# %% Four seeds each: the prompt, the prompt with those neurons blocked, the prompt without its rare words.
def draw(prompt, **more):
    seeds = [torch.Generator().manual_seed(seed) for seed in range(4)]
    settings = {"num_inference_steps": 20, "guidance_scale": 3.0, "output_type": "pt"}
    return pipe([prompt] * 4, generator=seeds, **settings, **more).images.float().cpu()


plain, blocked, other = draw(suspect), draw(suspect, neurons=neurons), draw(control)
picture = render(plant.scenes, side * pipe.vae_scale_factor).images
for name, images in (("prompt", plain), ("blocked", blocked), ("without the rare words", other)):
    apart, copy = images.std(0).mean(), (images - picture).abs().mean()
    print(f"{name}: seeds differ by {apart:.3f}, from the training picture by {copy:.3f}")

# %% First column: the training picture. What stays after blocking is what the words say.
rows = [[*to_pil(picture), *to_pil(images)] for images in (plain, blocked, other)]
make_image_grid([image for row in rows for image in row], 3, 5, 128).save(out / "blocked.png")

# %% The published detector compares predictions of one step; its threshold says when seeds agree.
tau = calibration.score.tau
scores = pipe.detect([suspect, control], calibration, "one step")
for name, score in zip(("suspect", "control"), scores, strict=True):
    print(f"{name}: {score.value:.3f} against {tau:.3f}, memorized: {score.memorized}")

# %% Which of many prompts come back as copies? A page and a table say it, from samples alone; no neurons are needed.
check = CheckConfig(seeds=2, ordinary=tuple(ordinary[:3]))
sampling = {"num_inference_steps": 20, "guidance_scale": 3.0}
print(copy_check(base, [suspect, control], out / "copies", tau=tau, probe=probe, config=check, **sampling).text())

# %% Does it hold? On other seeds, and against an embedding optimised to bring the picture back (it usually does).
print(verify_blocking(pipe, suspect, neurons, tau, picture, probe).text())
print("pictures in", out)
