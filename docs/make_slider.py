"""Draw docs/slider.webp from the shipped model: one person while sliders of the space of people are pulled.

The edits begin at timestep 700, so that the layout of each picture stays (weights2weights, appendix I). The person is
seed 17 of New Person (W2W), as in the workflow "Change a person halfway through (demo)". Run from anywhere.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from vitrine.engine.pipelines import W2WPipeline
from vitrine.engine.portraits import load_portraits
from vitrine.engine.portraits.shipped import PEOPLE_SPACE
from vitrine.engine.w2w import EditConfig, SampleConfig, load_space
from vitrine.evidence.portraits.identities import FIRST_IDENTITY, context_caption, portraits_of
from vitrine.evidence.portraits.page import to_pil

FILE = Path(__file__).parent / "slider.webp"
PROMPTS = context_caption(portraits_of(FIRST_IDENTITY, 4, 5000))
"""Surroundings only, the first four of docs/examples/w2w.py; who it is stands in the weights."""
SLIDERS = {"glasses": 2.5, "beard": 2.5, "long hair": 2.5}
"""Label -> strength at the right end, in standard deviations of the training models, which reach about 3."""
STEPS, SIDE, ROW = 8, 216, 30
"""Frames of one pull; pixels of a picture; height of a slider's line."""


def positions() -> list[dict[str, float]]:
    """Where each slider stands in each frame, 0 to 1: each pulled and let back, one after the other."""
    ease = [(1 - math.cos(math.pi * k / STEPS)) / 2 for k in range(STEPS)]
    pull = [*ease, 1.0, *ease[:0:-1]]
    return [dict.fromkeys(SLIDERS, 0.0) | {label: at} for label in SLIDERS for at in pull]


def pictures(frames: list[dict[str, float]]) -> Iterator[list[Image.Image]]:
    """One person in four settings, for each frame."""
    space, pipe = load_space(PEOPLE_SPACE), W2WPipeline.from_pipe(load_portraits().pipeline())
    pipe.set_progress_bar_config(disable=True)
    person = pipe.sample_models(space, [17], SampleConfig(components=space.dimension, attributes="joined"))
    settings = {"num_inference_steps": 16, "guidance_scale": 2.0, "output_type": "pt", "seeds": [0, 1, 2, 3]}
    for frame in frames:
        edits = {label: SLIDERS[label] * at for label, at in frame.items() if at}
        late = {"edits": edits, "edit_config": EditConfig(start_timestep=700)} if edits else {}
        yield to_pil(pipe(PROMPTS, space=space, model=person, **settings, **late).images.float().cpu())


def sheet(row: list[Image.Image], frame: Mapping[str, float]) -> Image.Image:
    """The pictures side by side, the sliders below."""
    image = Image.new("RGB", (SIDE * len(row), SIDE + ROW * len(frame) + 12), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size=17)
    for k, picture in enumerate(row):
        image.paste(picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC), (SIDE * k, 0))
    left, right = 130, image.width - 24
    for k, (label, at) in enumerate(frame.items()):
        y = SIDE + ROW * k + ROW // 2 + 6
        draw.text((left - 20, y), label, fill="#333333", font=font, anchor="rm")
        draw.rounded_rectangle((left, y - 3, right, y + 3), 3, fill="#dddddd")
        x = left + (right - left) * at
        draw.rounded_rectangle((left, y - 3, x, y + 3), 3, fill="#3f7ad9")
        draw.ellipse((x - 9, y - 9, x + 9, y + 9), fill="#3f7ad9")
    return image


def main() -> None:
    """Write the animation: it rests at both ends of each pull."""
    frames = positions()
    sheets = [sheet(row, frame) for row, frame in zip(pictures(frames), frames, strict=True)]
    times = [{0.0: 400, 1.0: 900}.get(max(frame.values()), 80) for frame in frames]
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    sheets[0].save(target, save_all=True, append_images=sheets[1:], duration=times, loop=0, quality=82, method=6)


if __name__ == "__main__":
    main()
