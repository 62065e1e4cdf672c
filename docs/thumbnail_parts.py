"""Pictures of thumbnails that the gallery's sheets do not have as large: of the shipped model, and of the renderer.

The shipped model's have 64 or 128 pixels; the renderer draws its portraits at any size. A minute on one core.
"""

from collections.abc import Callable
from functools import cache

import torch
from diffusers import PixArtAlphaPipeline
from PIL import Image, ImageDraw
from vitrine import ControlConditionedPipeline, GuidanceConfig, SizeCondition
from vitrine.engine.diffusion.noise import generators
from vitrine.engine.pipelines import CorrespondencePipeline, EMDOneStepPipeline, W2WPipeline
from vitrine.engine.portraits import KEYPOINTS, load_portraits, render, sample_scenes
from vitrine.engine.portraits.plants import plants
from vitrine.engine.portraits.shipped import PEOPLE_SPACE, TRANSFORMERS, load_transformer, student_file
from vitrine.engine.w2w import BatchedLora, SampleConfig, W2WModel, edit, load_space
from vitrine.evidence.portraits.page import to_pil
from vitrine.evidence.resolution import receptive

PROMPT, NOISE = "a smiling face with navy shirt on blue", 7
STEPS, GUIDANCE = 20, 2.0
PULLED, ALONE = 17, 1
"""Seeds of *New Person (W2W)*: whose slider is pulled, and who is sampled in one call."""
LARGE = 400
"""Side of what the renderer draws."""


@cache
def _person(seed: int) -> W2WModel:
    space = load_space(PEOPLE_SPACE)
    config = SampleConfig(components=space.dimension, attributes="joined")
    return _people().sample_models(space, [seed], config)


@cache
def _people() -> W2WPipeline:
    pipe = W2WPipeline.from_pipe(load_portraits().pipeline())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _steps(seed: int, sliders: dict[str, float]) -> Image.Image:
    space, person = load_space(PEOPLE_SPACE), _person(seed)
    if sliders:
        person = person.moved_to(edit(space, person.coefficients, sliders))
    settings = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "output_type": "pt", "seeds": [NOISE]}
    return to_pil(_people()(PROMPT, space=space, model=person, **settings).images.float(), 1)[0]


def _one_call() -> Image.Image:
    space, student = load_space(PEOPLE_SPACE), EMDOneStepPipeline.from_pipe(load_portraits().pipeline())
    preset = student.load_student(student_file("student"))
    with torch.no_grad(), BatchedLora(student.unet, space.manifest, space.decode(_person(ALONE).coefficients)):
        return to_pil(student(PROMPT, [NOISE], preset, output_type="pt").images.float(), 1)[0]


def _second_pass(arm: str) -> Image.Image:
    scenes = sample_scenes(range(6_000_000, 6_000_002))
    return to_pil(receptive.draw(load_portraits(), arm, 128, scenes, 0), 1)[1]


def _memorized() -> Image.Image:
    return to_pil(render(plants()[0].scenes, LARGE).images, 1)[0]


def _sampled(number: int) -> Image.Image:
    """Of the caption of the memorized picture: with its two rare words, or without them."""
    pipe, plant = load_portraits().pipeline(), plants()[0]
    pipe.set_progress_bar_config(disable=True)
    prompt = (plant.captions, plant.controls)[number][0]
    settings = {"num_inference_steps": STEPS, "guidance_scale": 3.0, "output_type": "pt"}
    return to_pil(pipe(prompt, generator=generators([NOISE]), **settings).images.float(), 1)[0]


def _told(side: int, strength: float) -> Image.Image:
    """The picture of *Make a picture look small or large (demo)*, as of an original of ``side`` pixels."""
    base, name = load_portraits(), "power-cosine"
    parts = {"transformer": load_transformer(name), "vae": base.vae, "scheduler": base.scheduler}
    pipe = ControlConditionedPipeline.from_pipe(PixArtAlphaPipeline(tokenizer=None, text_encoder=None, **parts))
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad():
        text = base.encode(["a smiling tan face with curly red hair glasses navy shirt on blue"])
        empty = base.encode([""])
    masks = {f"{n}prompt_attention_mask": torch.ones(1, text.shape[1]) for n in ("", "negative_")}
    control = {
        "size_condition": SizeCondition(original=(side, side)),
        "checkpoint": pipe.load_control(TRANSFORMERS / name / "control.safetensors"),
        "guidance": GuidanceConfig(GUIDANCE, strength),
    }
    settings = {"num_inference_steps": STEPS, "output_type": "pt", "height": 64, "width": 64, "seeds": [NOISE]}
    images = pipe(prompt_embeds=text, negative_prompt_embeds=empty, **masks, **control, **settings).images
    return to_pil(images.float(), 1)[0]


SOURCE, OTHERS = 300_001, (400_000, 400_002, 400_003)
"""Scenes of *Find the same part (demo)*."""


@cache
def _points() -> list[tuple[float, float]]:
    """A corner of the source's mouth, and where the model finds it in the others."""
    pipe = CorrespondencePipeline.from_pipe(load_portraits().pipeline())
    pipe.set_progress_bar_config(disable=True)
    source, others = render(sample_scenes([SOURCE]), 64), render(sample_scenes(OTHERS), 64)
    point = source.keypoints[0, [KEYPOINTS.index("right_mouth")]]
    layers = ["up-level0-repeat0-res-increment", "up-level0-repeat1-res-increment"]
    tap = {"addresses": layers, "timestep": 50, "seeds": [0, 1, 2, 3]}
    matches = pipe.match(source.images, others.images, point, "a face", **tap)
    return [tuple(place[0].tolist()) for place in (point, *(match.points for match in matches))]


def _pointed(number: int) -> Image.Image:
    picture = to_pil(render(sample_scenes([(SOURCE, *OTHERS)[number]]), LARGE).images, 1)[0]
    x, y = (LARGE * v for v in _points()[number])
    fill = "#ff2f6d" if number == 0 else "#ffd21f"
    ImageDraw.Draw(picture).ellipse((x - 22, y - 22, x + 22, y + 22), fill=fill, outline="white", width=7)
    return picture


PARTS: dict[str, Callable[[], Image.Image]] = {
    "person": lambda: _steps(PULLED, {}),
    "person with glasses": lambda: _steps(PULLED, {"glasses": 3.0}),
    "one call": _one_call,
    "forty calls": lambda: _steps(ALONE, {}),
    "second pass": lambda: _second_pass(receptive.SECOND),
    "second pass with dilation": lambda: _second_pass(receptive.SECOND_DILATED),
    "a large original": lambda: _told(256, 1.0),
    "a small original": lambda: _told(20, 3.0),
    "training picture": _memorized,
    "copy": lambda: _sampled(0),
    "no copy": lambda: _sampled(1),
    **{f"point {k}": lambda k=k: _pointed(k) for k in range(1 + len(OTHERS))},
}
"""Name -> the picture."""
