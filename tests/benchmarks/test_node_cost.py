"""What the pack adds to ComfyUI's start, and each node takes in the shipped workflows, beside one bare forward of the
portraits network.
"""

import importlib.util
import itertools
import json
import os
import statistics
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from vitrine_tests.templates import SHIPPED

ROOT = Path(__file__).parents[2]
WORKFLOWS = [p.stem for p in SHIPPED]
ROUNDS = 2
_seconds: dict[str, list[float]] = defaultdict(list)


def _lane(name):
    """A file of the ComfyUI lane; its fixtures are used here too."""
    spec = importlib.util.spec_from_file_location(f"vitrine_lane_{name}", ROOT / "tests" / "comfy" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_started = _lane("conftest")
comfyui, comfy = _started.comfyui, _started.comfy  # one started ComfyUI
xl = _lane("test_control").xl  # one small SDXL-shaped MODEL
packs, empty, start = (getattr(_lane("test_import_cost"), name) for name in ("packs", "empty", "start"))


def test_start(bench, empty, tmp_path):
    """CPU seconds of loading the pack, after a first start has compiled it, beside a pack without nodes."""
    pack = empty.parent / "vitrine-pack"
    pack.symlink_to(ROOT)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(tmp_path / "compiled")
    ours, theirs = [], []

    def run():
        for seconds, found in zip((theirs, ours), start(empty, pack, env=env)["packs"], strict=True):
            seconds.append(found["seconds"])

    run()
    first = ours.pop() - theirs.pop()
    bench.benchmark.pedantic(run, rounds=bench.rounds(5))
    bench.record("start of ComfyUI", "a pack without nodes", "ComfyUI", ours, theirs)
    added = statistics.median(ours) - statistics.median(theirs)
    bench.say(f"the pack adds {added:.2f} s of CPU time to a start, {first:.2f} s to the first of all")
    bench.at_most("seconds of a start", added, 0.3)


@pytest.fixture
def timed(comfy, bench, monkeypatch):
    """(display name, seconds) of every node of ours that ran, in the order they ended."""
    found, plain = [], comfy.execution.get_output_data

    async def around(prompt_id, unique_id, obj, *args, **kwargs):
        start = bench.now()
        result = await plain(prompt_id, unique_id, obj, *args, **kwargs)
        schema = obj.GET_SCHEMA() if hasattr(obj, "GET_SCHEMA") else None
        if schema is not None and schema.node_id.startswith("Vitrine"):
            found.append((schema.display_name, bench.now() - start))
        return result

    monkeypatch.setattr(comfy.execution, "get_output_data", around)
    return found


@pytest.mark.parametrize("name", WORKFLOWS)
def test_nodes_of_a_workflow(name, bench, comfy, timed):
    """The longest call of each node in a run; a workflow's own row is all of its run, loading included."""
    graph = json.loads((ROOT / "workflows" / "api" / f"{name}.json").read_text())
    bare = bench.model("portraits")

    names = itertools.count()

    def run():
        timed.clear()
        for node in graph.values():
            if node["class_type"] == "VitrineNEMOCopyCheck":  # a finished check would only be read
                node["inputs"]["name"] = f"bench-{next(names)}"
        _, error = comfy.run(graph)
        assert error is None, error
        longest: dict[str, float] = {}
        for node, seconds in timed:
            longest[node] = max(longest.get(node, 0.0), seconds)
        for node, seconds in longest.items():
            mine[node].append(seconds)

    mine: dict[str, list[float]] = defaultdict(list)
    bare(), run()
    mine.clear()
    forwards = []

    def once():
        forwards.append(min(bench.seconds(bare) for _ in range(5)))

    bench.benchmark.pedantic(run, setup=once, rounds=ROUNDS)
    whole = list(bench.benchmark.stats.stats.data)
    bench.record(f"workflow: {name}", "bare forward", bare.label, whole, forwards)
    for node, seconds in mine.items():
        if node not in _seconds:  # the first workflow that uses a node stands for it
            _seconds[node] = seconds
            bench.record(f"node: {node}", "bare forward", bare.label, seconds, forwards)


def test_a_node_that_no_shipped_run_executes(bench, comfy, xl):
    """Size Weight Schedule is bypassed in its workflow: the model there brings a curve of its own."""
    settings = {"form": "power_cos", "alpha": 1.0, "clock": "native", "reference": "target"}
    settings |= {"reference_width": 64, "reference_height": 64}
    name = comfy.nodes.NODE_CLASS_MAPPINGS["VitrineApplyGammaSchedule"].define_schema().display_name
    bare = bench.model("portraits")

    def run():
        comfy.call("VitrineApplyGammaSchedule", model=xl.model, **settings)

    bench.compare(f"node: {name}", bare.label, run, {"bare forward": bare})


def test_the_lora_report(bench, comfy):
    """Of one caption with two seeds: its template is on a user's model."""
    from vitrine.nodes.comfy.lora import usual_student

    model, clip, vae = comfy.call("VitrineLoadPortraits")[:3]
    asked = {"lora": usual_student(), "captions": "a smiling face", "trigger": "", "ordinary": "a pale face\na cap"}
    few = {"seeds": 2, "minutes": 0.0, "first_seed": 2000, "steps": 4, "cfg": 3.0, "prompts": 1, "compare": False}
    latent, names = {"samples": torch.zeros(1, 4, 16, 16)}, itertools.count()
    bare = bench.model("portraits")

    def run():
        own = {"model": model, "clip": clip, "vae": vae, "latent": latent, "name": f"bench-{next(names)}"}
        comfy.call("VitrineLoRAReport", **own, **asked, **few)

    bench.compare("node: LoRA Report", bare.label, run, {"bare forward": bare}, rounds=ROUNDS, warm=0)


def _waited_for(bench, method, run, bare, promised):
    """Seconds that a hand waits: the median of rounds between which a bare forward runs, held to what is promised."""
    options = {"rounds": 10, "summary": statistics.median}
    row = bench.compare(method, bare.label, run, {"bare forward": bare}, **options)["bare forward"]
    bench.benchmark.extra_info["rows"][-1]["promised"] = promised
    bench.at_most(f"seconds, {method}", row.ours, promised)


def test_a_click_in_the_picker_becomes_a_map(bench, comfy):
    """At most 0.3 s, for the most that is kept of a picture: 1280 channels at 64 x 64. Another point in each round."""
    from vitrine.nodes.comfy import similarity

    bare = bench.model("portraits")
    drawn = torch.Generator().manual_seed(0)
    picker = similarity.Clickable({}, torch.randn(1280, similarity.SIDE, similarity.SIDE, generator=drawn).half())
    places = itertools.count()

    def click():
        assert similarity.similarity_map(picker, 0.3 + 0.001 * next(places), 0.6)["values"]

    _waited_for(bench, "picker: a click becomes a map", click, bare, 0.3)


def test_a_drag_in_the_panel_becomes_a_picture(bench, comfy):
    """At most half a second. The person is dragged elsewhere in each round, so no answer is kept from before."""
    from vitrine.nodes import w2w
    from vitrine.nodes.comfy import people

    bare, name = bench.model("portraits"), "portraits people (shipped)"
    space = comfy.call("VitrineLoadW2WSpace", space_file=name, components=0)[0]
    person = comfy.call("VitrineW2WSample", space=space, seed=4, factor=1.0, components=0, truncation=0.0, wanted="")[0]
    renderer = people.renderer_of(space, None, None, None, None, "")[0]
    panel = people.PanelSession(space, w2w.usual_map, person, lambda inputs: w2w.moved(space, person, inputs), renderer)
    places = itertools.count()

    def drag():
        asked = {"label_1": "beard", "strength_1": 2.0, "more": "glasses: 1.5", "place": f"0.{next(places):04d} 0.3"}
        assert people.portrait(panel, asked, "", 7, released=False)["picture"]

    _waited_for(bench, "panel: a drag becomes a picture", drag, bare, 0.5)
