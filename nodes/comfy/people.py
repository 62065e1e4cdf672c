"""The panel of *W2W Edit*: a space's map and sliders, and the person they make, drawn in one step without a run.

The page asks ``POST /vitrine/space`` and ``POST /vitrine/person``. Both know a node since its last run, and answer
from the node's own function, so the graph's next run gives the same person.
"""

from __future__ import annotations

import asyncio
import base64
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from io import BytesIO
from typing import Any

import torch

from ...engine.diffusion.noise import seeded_noise
from ...engine.emd import check_network, one_step
from ...engine.errors import VitrineError
from ...engine.portraits.shipped import STUDENT_FOLDER, student_file
from ...engine.w2w import Space, SpaceMap, W2WModel, listed, member_names, place_of, reach, score
from .conditioning import condition_of
from .emd import with_prediction
from .lora import NO_STUDENT, contract_in, with_student
from .model import backbone_of, blank_latents, decode, is_sdxl, loading_denoiser_of
from .portraits import WEIGHTS, LatentFormat, load_clip, load_model, load_vae
from .w2w import applied

NODES, SHOWN = 4, 1500
"""Nodes that are remembered, and the most models on the map."""
PROMPT = "a smiling face with navy shirt on blue"
"""Of the shipped people, where the page names none."""
BASE = "vitrine portraits"
"""What a space of the shipped model says it was built on."""


@dataclass(frozen=True)
class Easel:
    """What the panel draws with.

    Attributes:
        model: the base MODEL of the space, without a student.
        positive: prompt -> CONDITIONING.
        vae, student: as the nodes take them.
        prompted: whether the page's prompt counts.
    """

    model: Any
    positive: Callable[[str], list]
    vae: Any
    student: str
    prompted: bool = False


@dataclass(frozen=True)
class Panel:
    """A *W2W Edit* that has run: its space, how that is laid out, the model before the edit, and the edit."""

    space: Space
    map_of: Callable[[Space], SpaceMap]
    before: W2WModel
    moved: Callable[[Mapping[str, Any]], W2WModel]
    easel: Callable[[], Easel] | None


_panels: OrderedDict[str, Panel] = OrderedDict()


class Busy(Exception):
    """The graph runs: models cannot be used beside it."""


def remember(hidden: Any, panel: Panel) -> None:
    """Keep a node's panel; the node that ran longest ago is forgotten.

    Args:
        hidden: the node's, with its ``unique_id``; None where no graph runs it.
    """
    if hidden is None:
        return
    node_id = str(hidden.unique_id)
    _panels[node_id] = panel
    _panels.move_to_end(node_id)
    while len(_panels) > NODES:
        _panels.popitem(last=False)


def easel(space: Space, model: Any, positive: list | None, vae: Any, student: str) -> Callable[[], Easel] | None:
    """How a panel draws: with what is connected, else for spaces of the shipped model with that; None if not at all."""
    if model is not None and positive and vae is not None and student != NO_STUDENT:
        return lambda: Easel(model, lambda prompt: positive, vae, student)
    return shipped if model is None and space.info.get("base") == BASE else None


@lru_cache(maxsize=1)
def shipped() -> Easel:
    """The portraits model with its student: networks of the panel's own."""
    clip = load_clip(str(WEIGHTS))
    encoded = lru_cache(maxsize=8)(lambda prompt: clip.encode_from_tokens_scheduled(clip.tokenize(prompt or PROMPT)))
    return Easel(
        load_model(str(WEIGHTS)), encoded, load_vae(str(WEIGHTS)), str(student_file().relative_to(STUDENT_FOLDER)), True
    )


def drawn(easel: Easel, space: Space, person: W2WModel, prompt: str, seed: int) -> torch.Tensor:
    """IMAGE (1, H, W, 3): what *Apply W2W Model*, *EMD One-Step Generator* and *VAE Decode* make of the first model.

    Raises:
        VitrineError: The space, the student or the prompt does not fit the model.
    """
    contract = contract_in(easel.student)
    contract = contract if contract.prediction == "x0" else replace(contract, prediction="model")
    check_network(contract, backbone_of(easel.model))
    runner = applied(easel.model, space, person, None, 1000.0, 1.0)
    runner = with_prediction(with_student(runner, easel.student), contract.prediction)
    blank = blank_latents(runner, {"samples": torch.zeros(1, 4, *_cells(easel.model))})
    z = seeded_noise([seed], tuple(blank.shape[1:])).to(blank.device)
    cond = condition_of(runner, easel.positive(prompt), blank)
    x0 = one_step(loading_denoiser_of(runner), z, cond, replace(contract, prediction="model"))
    return decode(runner, easel.vae, x0)


def _cells(model: Any) -> tuple[int, int]:
    """Latent cells of the size a model was trained at: ours has 16 a side, SD 64, SDXL 128."""
    if isinstance(model.get_model_object("latent_format"), LatentFormat):
        return 16, 16
    try:
        return (128, 128) if is_sdxl(model) else (64, 64)
    except VitrineError:
        return 64, 64


def laid_out(panel: Panel) -> dict[str, Any]:
    """The map and the sliders, as the page draws them."""
    space, chart, person = panel.space, panel.map_of(panel.space), panel.before.coefficients[0]
    chosen = torch.linspace(0, len(chart.coordinates) - 1, min(SHOWN, len(chart.coordinates))).round().long()
    names, width = member_names(space), len(person)
    labels = [{
        "name": label, "reach": round(reach(space, vector), 2),
        "value": round(float(score(vector[:width], person)), 2),
        "scores": [None if v != v else round(v, 2) for v in chart.labels[label][chosen].tolist()],
    } for label, vector in listed(space).items()]  # fmt: skip
    return {
        "points": [[round(v, 4) for v in row] for row in chart.coordinates[chosen].tolist()],
        "names": [names[i] for i in chosen.tolist()], "labels": labels,
        "person": place_of(space, chart, person).tolist(), "draws": panel.easel is not None,
        "prompt": PROMPT if panel.easel is shipped else None,
    }  # fmt: skip


def portrait(panel: Panel, inputs: Mapping[str, Any], prompt: str, seed: int) -> dict[str, Any]:
    """The edited person's PNG; without one where nothing draws.

    Raises:
        VitrineError: As the node's own run would.
        Busy: A graph is being run.
    """
    person = panel.moved(inputs)
    if panel.easel is None:
        return {"picture": None}
    from PIL import Image

    with torch.inference_mode(), _between_runs():
        image = drawn(panel.easel(), panel.space, person, prompt, seed)[0]
    file = BytesIO()
    levels = (255.0 * image.cpu().float()).clamp(0, 255).byte().numpy()  # as core's Preview Image rounds
    Image.fromarray(levels).save(file, "PNG", compress_level=1)
    return {"picture": base64.b64encode(file.getvalue()).decode()}


@contextmanager
def _between_runs() -> Iterator[None]:
    """No run begins while the block is open: clones of a MODEL share one network, which holds one set of patches."""
    from server import PromptServer

    queue = PromptServer.instance.prompt_queue
    if not hasattr(queue, "mutex"):
        yield
        return
    with queue.mutex:  # held while the queue hands out its next run
        if queue.currently_running:
            raise Busy
        yield


async def _answered(request: Any, work: Callable[[Panel, dict], dict]) -> tuple[dict[str, Any], int]:
    try:
        asked = await request.json()
        panel = _panels.get(str(asked["node"]))
    except (ValueError, TypeError, KeyError):
        return {"error": "node"}, 400
    if panel is None:
        return {"error": "run the node once"}, 404
    try:
        return await asyncio.to_thread(work, panel, asked), 200
    except Busy:
        return {"error": "the graph runs"}, 409
    except (VitrineError, ValueError, TypeError, KeyError) as error:
        return {"error": str(error)}, 400


def register() -> None:
    """Answer the page, where there is a server; importing the nodes elsewhere needs none."""
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    if server is None or not hasattr(server, "routes"):
        return
    from aiohttp import web

    @server.routes.post("/vitrine/space")
    async def space(request: Any) -> Any:
        content, status = await _answered(request, lambda panel, asked: laid_out(panel))
        return web.json_response(content, status=status)

    @server.routes.post("/vitrine/person")
    async def person(request: Any) -> Any:
        def work(panel: Panel, asked: dict[str, Any]) -> dict[str, Any]:
            return portrait(panel, dict(asked["inputs"]), str(asked.get("prompt") or ""), int(asked.get("seed", 0)))

        content, status = await _answered(request, work)
        return web.json_response(content, status=status)
