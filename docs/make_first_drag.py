"""Draw the first drag in the panel of *Person Sliders (W2W)*: ten places of the map, while dragging and on release.

While a hand drags the one-step student draws; on release the model itself does, in six steps of DPM++ 2M with guidance.
The same person, prompt and noise in each column. Prints forwards and CPU seconds of a picture.
``python docs/make_first_drag.py``, from anywhere; half a minute.
"""

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import DPMSolverMultistepScheduler
from PIL import Image, ImageDraw, ImageFont
from vitrine.engine.pipelines import EMDOneStepPipeline, W2WPipeline
from vitrine.engine.portraits import load_portraits
from vitrine.engine.portraits.shipped import PEOPLE_SPACE, student_file
from vitrine.engine.w2w import BatchedLora, SampleConfig, W2WModel, at_place, edit, load_space, map_of
from vitrine.evidence.portraits.page import to_pil

FILE = Path(__file__).parent / "pictures" / "first_drag.jpg"
PROMPT, NOISE, PERSON = "a smiling face with navy shirt on blue", 7, 8
SLIDERS = {"glasses": 3.0}
"""As the template *Pull sliders, four nodes (demo)* opens."""
PLACES = [
    (0.7 * r * math.cos(a), 0.7 * r * math.sin(a))
    for r in (0.5, 1.0)
    for a in (0.3 + 0.4 * math.pi * k for k in range(5))
]
"""Two rings of five on the map, whose edges are at 1."""
STEPS, GUIDANCE = 6, 2.0
SIDE, LINE = 112, 26
"""Pixels of a picture on the sheet, and of the line above a row."""


def people() -> list[W2WModel]:
    """The person at each place, with the sliders."""
    space = load_space(PEOPLE_SPACE)
    config = SampleConfig(components=space.dimension, attributes="joined")
    (person,) = (W2WPipeline.from_pipe(load_portraits().pipeline()).sample_models(space, [PERSON], config),)
    chart, row = map_of(space), person.coefficients[0]
    return [person.moved_to(edit(space, at_place(space, chart, row, place)[None], SLIDERS)) for place in PLACES]


def drawn(models: list[W2WModel]) -> dict[str, list[Image.Image]]:
    """Words -> a picture of each model."""
    space, base = load_space(PEOPLE_SPACE), load_portraits().pipeline()
    student, released = EMDOneStepPipeline.from_pipe(base), W2WPipeline.from_pipe(load_portraits().pipeline())
    preset = student.load_student(student_file("student"))
    released.scheduler = DPMSolverMultistepScheduler.from_config(
        released.scheduler.config, algorithm_type="dpmsolver++", timestep_spacing="trailing"
    )
    for pipe in (student, released):
        pipe.set_progress_bar_config(disable=True)

    def one_step(model: W2WModel) -> torch.Tensor:
        with BatchedLora(student.unet, space.manifest, space.decode(model.coefficients)):
            return student(PROMPT, [NOISE], preset, output_type="pt").images

    def few_steps(model: W2WModel) -> torch.Tensor:
        settings = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "output_type": "pt", "seeds": [NOISE]}
        return released(PROMPT, space=space, model=model, **settings).images

    return {
        "while dragging: the student": _each(models, one_step, student.unet),
        "on release: six steps of the model": _each(models, few_steps, released.unet),
    }


def _each(models: list[W2WModel], draw: Callable[[W2WModel], torch.Tensor], unet: torch.nn.Module) -> list[Image.Image]:
    calls: list[int] = []
    hook = unet.register_forward_pre_hook(lambda module, args, kwargs: calls.append(1), with_kwargs=True)
    began = time.process_time()
    with torch.no_grad():
        pictures = [to_pil(draw(model).float().cpu())[0] for model in models]
    hook.remove()
    spent = (time.process_time() - began) / len(models)
    sys.stdout.write(f"{draw.__name__}: {len(calls) / len(models):g} forwards a picture, {spent:.3f} CPU s\n")
    return pictures


def main() -> None:
    """Write docs/pictures/first_drag.jpg."""
    rows = drawn(people())
    sheet = Image.new("RGB", (len(PLACES) * SIDE, len(rows) * (SIDE + LINE)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=15)
    for k, (words, pictures) in enumerate(rows.items()):
        top = k * (SIDE + LINE)
        draw.text((6, top + LINE // 2), words, fill="#333333", font=font, anchor="lm")
        for column, picture in enumerate(pictures):
            resized = picture.resize((SIDE - 2, SIDE - 2), Image.Resampling.BICUBIC)
            sheet.paste(resized, (column * SIDE, top + LINE))
    sheet.save(FILE, quality=88)


if __name__ == "__main__":
    main()
