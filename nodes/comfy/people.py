"""The panel of *Person Sliders (W2W)*: a space's map and sliders, and the person they make, drawn without a run.

While a hand drags, a one-step student draws, where there is one; on release the model itself does, in a few steps.

The page asks ``POST /vitrine/space`` and ``POST /vitrine/person``. Both know a node since its last run, and answer
from the node's own function, so the graph's next run gives the same person.
"""

from __future__ import annotations

import asyncio
import base64
import json
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from io import BytesIO
from typing import Any

import comfy.sample
import torch

from ...engine.diffusion.noise import seeded_noise
from ...engine.emd import check_network, one_step
from ...engine.errors import VitrineError, printable, refuse
from ...engine.portraits.shipped import STUDENT_FOLDER, student_file
from ...engine.w2w import Space, SpaceMap, W2WModel, listed, member_names, place_of, reach, score
from .conditioning import condition_of
from .emd import checked_latents, with_prediction
from .lora import preset_in, with_student
from .model import backbone_of, blank_latents, decode, denoiser_of, is_sdxl
from .page_routes import in_thread, key_in, not_run, number_in, post, text_in
from .panel_state import PanelStates
from .portraits import WEIGHTS, LatentFormat, load_clip, load_model, load_vae
from .render_thread import RENDERS
from .run_watch import RUNS
from .w2w import applied

SHOWN = 1500
"""The most models on the map."""
PROMPT = "a smiling face with navy shirt on blue"
"""Of the shipped people, where the page names none."""
PROMPT_LETTERS, FIELD_LETTERS, FIELDS, STRENGTH = 2_000, 8_000, 16, 20.0
"""The most of a prompt, of a text field, of fields, and of a slider: as the node's own."""
RELEASED_STEPS, SAMPLER, SCHEDULER = 6, "dpmpp_2m", "sgm_uniform"
"""How the released picture is drawn."""
SHIPPED_CFG, CONNECTED_CFG = 2.0, 6.0
"""Guidance of the shipped people's templates, and of a connected model with a negative prompt."""
ORDINARY_STEPS = "none: ordinary steps of the model"
"""Where *Person Sliders (W2W)* names no student."""
BASE = "vitrine portraits"
"""What a space of the shipped model says it was built on."""


@dataclass(frozen=True)
class PersonRenderer:
    """What the panel's picture is made with.

    Attributes:
        model: the base MODEL of the space, without a student.
        positive: prompt -> CONDITIONING.
        negative: None samples without guidance.
        vae: as the nodes take it.
        student: LoRA file of a one-step student; None draws nothing while a hand drags.
        cfg: guidance scale of the released picture.
        prompted: whether the page's prompt counts.
    """

    model: Any
    positive: Callable[[str], list]
    negative: list | None
    vae: Any
    student: str | None
    cfg: float = CONNECTED_CFG
    prompted: bool = False


@dataclass(frozen=True, eq=False)
class PanelSession:
    """A *Person Sliders (W2W)* that has run.

    Attributes:
        space, map_of: the space, and how it is laid out.
        before, moved: the model before the edit, and the edit.
        renderer: what draws; None where something is missing.
        missing: names of the inputs that a picture needs.
    """

    space: Space
    map_of: Callable[[Space], SpaceMap]
    before: W2WModel
    moved: Callable[[Mapping[str, Any]], W2WModel]
    renderer: Callable[[], PersonRenderer] | None
    missing: tuple[str, ...] = ()


SESSIONS: PanelStates[PanelSession] = PanelStates()
_LAYOUTS: weakref.WeakKeyDictionary[PanelSession, bytes] = weakref.WeakKeyDictionary()


class _Connected:
    """What is connected to the node. MODEL and VAE are ComfyUI's to keep and to free, and the prompt goes with them."""

    def __init__(self, model: Any, positive: list, negative: list | None, vae: Any, student: str) -> None:
        self._model, self._vae = weakref.ref(model, self._forget), weakref.ref(vae, self._forget)
        self._positive: list = positive
        self._negative = negative
        self._student = None if student == ORDINARY_STEPS else student

    def _forget(self, gone: Any) -> None:
        self._positive, self._negative = [], None

    def __call__(self) -> PersonRenderer:
        model, vae, positive, negative = self._model(), self._vae(), self._positive, self._negative
        if model is None or vae is None:
            raise refuse("model", "one that ComfyUI has freed", "a model in its memory", "run the graph once")
        return PersonRenderer(model, lambda prompt: positive, negative, vae, self._student)


def renderer_of(
    space: Space, model: Any, positive: list | None, negative: list | None, vae: Any, student: str
) -> tuple[Callable[[], PersonRenderer] | None, tuple[str, ...]]:
    """(what a panel draws with, inputs that are missing): the connected model, else the shipped one for its spaces."""
    if model is None and space.info.get("base") == BASE:
        return shipped, ()
    needed = {"model": model, "positive": positive or None, "vae": vae}
    missing = tuple(name for name, value in needed.items() if value is None)
    if missing or not positive:
        return None, missing
    return _Connected(model, positive, negative, vae, student), ()


@lru_cache(maxsize=1)
def shipped() -> PersonRenderer:
    """The portraits model with its student: networks of the panel's own, until ComfyUI unloads models."""
    clip = load_clip(str(WEIGHTS))
    encoded = lru_cache(maxsize=8)(lambda prompt: clip.encode_from_tokens_scheduled(clip.tokenize(prompt or PROMPT)))
    negative = clip.encode_from_tokens_scheduled(clip.tokenize(""))
    student = student_file().relative_to(STUDENT_FOLDER).as_posix()
    return PersonRenderer(
        load_model(str(WEIGHTS)), encoded, negative, load_vae(str(WEIGHTS)), student, SHIPPED_CFG, prompted=True
    )


RUNS.freed.append(lambda flags: shipped.cache_clear())


def sampled(
    renderer: PersonRenderer,
    space: Space,
    person: W2WModel,
    prompt: str,
    seed: int,
    check: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """IMAGE (1, H, W, 3): what *Apply Person (W2W)*, *KSampler* in a few steps and *VAE Decode* make of one model.

    Args:
        check: called before each step; may raise.
    """
    runner = applied(renderer.model, space, person, None, 1000.0, 1.0)
    blank = blank_latents(runner, {"samples": torch.zeros(1, 4, *_cells(renderer.model))}).cpu()
    positive = renderer.positive(prompt)
    guided = renderer.negative is not None
    check()
    latents = comfy.sample.sample(
        runner, comfy.sample.prepare_noise(blank, seed), RELEASED_STEPS, renderer.cfg if guided else 1.0, SAMPLER,
        SCHEDULER, positive, renderer.negative if guided else positive, blank, disable_pbar=True, seed=seed,
        callback=lambda step, x0, x, total: check(),
    )  # fmt: skip
    check()
    image: torch.Tensor = renderer.vae.decode(checked_latents(latents))
    return image.reshape(-1, *image.shape[-3:])


def rendered(
    renderer: PersonRenderer,
    space: Space,
    person: W2WModel,
    prompt: str,
    seed: int,
    check: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """IMAGE (1, H, W, 3): what *Apply Person (W2W)*, *One-Step Sampler (EMD)* and *VAE Decode* make of the first model.

    Args:
        check: called between two stages; may raise.
    """
    assert renderer.student is not None
    preset = preset_in(renderer.student)
    preset = preset if preset.prediction == "x0" else replace(preset, prediction="model")
    check_network(preset, backbone_of(renderer.model))
    runner = applied(renderer.model, space, person, None, 1000.0, 1.0)
    runner = with_prediction(with_student(runner, renderer.student), preset.prediction)
    blank = blank_latents(runner, {"samples": torch.zeros(1, 4, *_cells(renderer.model))})
    z = seeded_noise([seed], tuple(blank.shape[1:])).to(blank.device)
    check()
    cond = condition_of(runner, renderer.positive(prompt), blank)
    check()
    x0 = checked_latents(one_step(denoiser_of(runner), z, cond, replace(preset, prediction="model")))
    check()
    return decode(runner, renderer.vae, x0)


def _cells(model: Any) -> tuple[int, int]:
    """Latent cells of the size a model was trained at: ours has 16 a side, SD 64, SDXL 128."""
    if isinstance(model.get_model_object("latent_format"), LatentFormat):
        return 16, 16
    try:
        return (128, 128) if is_sdxl(model) else (64, 64)
    except VitrineError:
        return 64, 64


def _on_the_map(space: Space) -> torch.Tensor:
    """Numbers of the training models that the map shows."""
    count = len(space.coefficients)
    return torch.linspace(0, count - 1, min(SHOWN, count)).round().long()


def training_portrait(
    session: PanelSession, dot: int, prompt: str, seed: int, check: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """The PNG of the training model behind a dot of the map; without one where nothing draws."""
    chosen = _on_the_map(session.space)
    if dot >= len(chosen):
        raise refuse("dot", dot, f"a number below {len(chosen)}", "open the panel again")
    row = session.space.coefficients[int(chosen[dot])][None].float()
    return _drawn(session, W2WModel(row, session.space.identity), prompt, seed, True, check)


def laid_out(session: PanelSession) -> dict[str, Any]:
    """The map and the sliders, as the page shows them."""
    space, chart, person = session.space, session.map_of(session.space), session.before.coefficients[0]
    chosen = _on_the_map(space)
    names, width = member_names(space), len(person)
    labels = [
        {
            "name": label,
            "reach": round(reach(space, vector), 2),
            "value": round(float(score(vector[:width], person)), 2),
            "scores": [None if v != v else round(v, 2) for v in chart.labels[label][chosen].tolist()],
        }
        for label, vector in listed(space).items()
    ]
    return {
        "points": [[round(v, 4) for v in row] for row in chart.coordinates[chosen].tolist()],
        "names": [names[i] for i in chosen.tolist()],
        "labels": labels,
        "person": place_of(space, chart, person).tolist(),
        "draws": session.renderer is not None,
        "missing": list(session.missing),
        "prompt": PROMPT if session.renderer is shipped else None,
    }


def layout_text(session: PanelSession) -> bytes:
    """:func:`laid_out` as JSON, made once: it has tens of thousands of numbers, and all tabs ask when a run ends."""
    text = _LAYOUTS.get(session)
    if text is None:
        text = _LAYOUTS[session] = json.dumps(laid_out(session)).encode()
    return text


def portrait(
    session: PanelSession,
    inputs: Mapping[str, Any],
    prompt: str,
    seed: int,
    released: bool = True,
    check: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The edited person's PNG; without one where nothing draws.

    Args:
        released: whether the hand has let go: a few steps of the model itself, where a student draws in one meanwhile.
        check: called between two stages; may raise.
    """
    return _drawn(session, session.moved(inputs), prompt, seed, released, check)


def _drawn(
    session: PanelSession, person: W2WModel, prompt: str, seed: int, released: bool, check: Callable[[], None]
) -> dict[str, Any]:
    renderer = None if session.renderer is None else session.renderer()
    if renderer is None or (renderer.student is None and not released):
        return {"picture": None}
    from PIL import Image

    check()
    draw = sampled if released else rendered
    with torch.inference_mode():
        image = draw(renderer, session.space, person, prompt, seed, check)[0]
    file = BytesIO()
    levels = (255.0 * image.cpu().float()).clamp(0, 255).byte().numpy()  # as core's Preview Image rounds
    Image.fromarray(levels).save(file, "PNG", compress_level=1)
    return {"picture": base64.b64encode(file.getvalue()).decode()}


def fields_in(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The node's text fields, switches and sliders that a request brings."""
    inputs = asked.get("inputs", {})
    if not isinstance(inputs, Mapping) or len(inputs) > FIELDS:
        raise refuse("inputs", type(inputs).__name__, f"an object of at most {FIELDS} fields", "send the node's own")
    for name, value in inputs.items():
        if name.startswith("strength_"):
            number_in(inputs, name, -STRENGTH, STRENGTH)
        elif not isinstance(value, bool):
            text_in(inputs, printable(name), FIELD_LETTERS)
    return dict(inputs)


async def _space(asked: dict[str, Any], request: Any) -> bytes:
    session = SESSIONS.find(key_in(asked))
    if session is None:
        raise not_run()
    return await in_thread(layout_text, session)  # type: ignore[no-any-return]


async def _person(asked: dict[str, Any], request: Any) -> dict[str, Any]:
    key = key_in(asked)
    session, inputs, prompt = SESSIONS.find(key), fields_in(asked), text_in(asked, "prompt", PROMPT_LETTERS)
    seed, released = number_in(asked, "seed", 0, 2**64 - 1, 0), asked.get("released", True) is not False
    if session is None:
        raise not_run()

    def gone() -> bool:
        return request.transport is None or request.transport.is_closing()

    if "dot" in asked:
        dot = number_in(asked, "dot", 0, SHOWN - 1)
        answer = RENDERS.ask((key, "dot"), lambda check: training_portrait(session, dot, prompt, seed, check), gone)
        return await asyncio.wrap_future(answer)  # type: ignore[no-any-return]
    answer = RENDERS.ask(key, lambda check: portrait(session, inputs, prompt, seed, released, check), gone)
    return await asyncio.wrap_future(answer)  # type: ignore[no-any-return]


def register() -> None:
    """Answer the page, where there is a server."""
    post("/vitrine/space", _space)
    post("/vitrine/person", _person)
