"""The server while people are dragged on *W2W Edit*'s panels: how long anything else waits, and how soon pictures come.

Real server, many clients, no browser. ``VITRINE_BENCH_PACK`` measures another checkout of the pack in the same way.
"""

import asyncio
import importlib.util
import os
import statistics
import time
from itertools import count
from pathlib import Path

import pytest

COMFYUI = Path(os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI")).expanduser()
ROOT = Path(__file__).parents[2]
PACK = Path(os.environ.get("VITRINE_BENCH_PACK") or ROOT)
SECONDS = float(os.environ.get("VITRINE_BENCH_SECONDS", "15"))
PROMISED = 0.2
"""Seconds that /system_stats may take while eight tabs drag."""
SLIDERS = {f"label_{i}": "" for i in range(1, 5)} | {f"strength_{i}": 0.0 for i in range(1, 5)}
PERSON = {"seed": 4, "factor": 1.0, "components": 0, "truncation": 0.0, "wanted": "", "attributes": "auto"}
GRAPH = {
    "4": ("VitrineLoadW2WSpace", {"space_file": "portraits people (shipped)", "components": 0}),
    "5": ("VitrineW2WSample", {"space": ["4", 0], **PERSON}),
    "6": ("VitrineW2WEdit", {"space": ["4", 0], "w2w_model": ["5", 0], "protect": "", **SLIDERS}),
    "10": ("PreviewAny", {"source": ["6", 1]}),
}
STATIC = "/extensions/vitrine-pack/people.js"


async def _run(session, address, client):
    """Queue the graph as a page does, and wait for its end."""
    prompt = {number: {"class_type": kind, "inputs": inputs} for number, (kind, inputs) in GRAPH.items()}
    body = {"prompt": prompt, "client_id": client, "extra_data": {"extra_pnginfo": {"workflow": {"id": "bench"}}}}
    async with session.post(f"{address}/prompt", json=body) as answer:
        assert answer.status == 200, await answer.text()
        number = (await answer.json())["prompt_id"]
    while True:
        async with session.get(f"{address}/history/{number}") as answer:
            if number in await answer.json():
                return
        await asyncio.sleep(0.1)


async def _drag(session, address, client, until, waits):
    """What a panel does: after a run it asks for the map, in a drag for one picture at a time, of the latest place."""
    key = {"client": client, "workflow": "bench", "node": "6"}
    async with session.post(f"{address}/vitrine/space", json=key) as answer:
        assert answer.status == 200, await answer.text()
    for place in count():
        if time.perf_counter() > until:
            return
        x = f"{-0.9 + place * 0.037 % 1.8:.4f}"
        inputs = SLIDERS | {"label_1": "beard", "strength_1": 2.0, "more": "", "place": f"{x} 0.3"}
        body = {"client": client, "workflow": "bench", "node": "6", "inputs": inputs, "prompt": "", "seed": 7}
        began = time.perf_counter()
        async with session.post(f"{address}/vitrine/person", json=body) as answer:
            content = await answer.json()
        if answer.status == 409:  # the worker still tidies up after its run
            await asyncio.sleep(0.5)
            continue
        assert answer.status == 200 and content["picture"], content
        waits["picture"].append(time.perf_counter() - began)


async def _look(session, address, until, waits):
    while time.perf_counter() < until:
        for path in ("/system_stats", "/queue", STATIC):
            began = time.perf_counter()
            async with session.get(f"{address}{path}") as answer:
                await answer.read()
                assert answer.status == 200
            waits[path].append(time.perf_counter() - began)
        await asyncio.sleep(0.05)


async def measured(address, clients, seconds=SECONDS):
    """path or "picture" -> seconds that each request waited."""
    import aiohttp

    waits = {key: [] for key in ("picture", "/system_stats", "/queue", STATIC)}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        for number in range(clients):
            await _run(session, address, f"client {number}")
        await _drag(session, address, "client 0", time.perf_counter() + 0.01, {"picture": []})  # networks are loaded
        until = time.perf_counter() + seconds
        dragging = [_drag(session, address, f"client {number}", until, waits) for number in range(clients)]
        await asyncio.gather(*dragging, _look(session, address, until, waits))
    return waits


def sentence(clients, waits):
    """One line: median and largest of each, and the load of the machine."""
    parts = [f"{key} {statistics.median(w):.3f} s (largest {max(w):.3f}, {len(w)})" for key, w in waits.items() if w]
    return f"{clients} clients: {'; '.join(parts)}; load {os.getloadavg()[0]:.1f}"


def _lane(name):
    """A file of the ComfyUI lane."""
    spec = importlib.util.spec_from_file_location(f"vitrine_lane_{name}", ROOT / "tests" / "comfy" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loaded(clients, folder):
    """:func:`measured` on a server started for it."""
    with _lane("page").server(COMFYUI, PACK, folder / "base") as address:
        return asyncio.run(measured(address, clients))


@pytest.mark.parametrize("clients", [1, 8, 60])
def test_the_server_answers_while_panels_render(bench, tmp_path, clients):
    if reason := _lane("conftest").why_not():
        pytest.skip(reason)
    waits = bench.benchmark.pedantic(loaded, args=(clients, tmp_path), rounds=1)
    bench.say(sentence(clients, waits))
    if clients == 8:
        bench.at_most("seconds, /system_stats", statistics.median(waits["/system_stats"]), PROMISED)
