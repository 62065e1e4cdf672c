"""What the pack adds to ComfyUI's start, and how long a hand waits for its panels, beside one bare forward of the
portraits network.
"""

import importlib.util
import itertools
import os
import statistics
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def _lane(name):
    """A file of the ComfyUI lane; its fixtures are used here too."""
    spec = importlib.util.spec_from_file_location(f"vitrine_lane_{name}", ROOT / "tests" / "comfy" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_started = _lane("conftest")
comfyui, comfy = _started.comfyui, _started.comfy  # one started ComfyUI
packs, empty, start = (getattr(_lane("test_import_cost"), name) for name in ("packs", "empty", "start"))


def test_start(bench, empty, tmp_path):
    """CPU seconds of loading the pack, after a first start has compiled it, beside a pack without nodes."""
    pack = empty.parent / "vitrine-pack"
    pack.symlink_to(ROOT)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(tmp_path / "compiled")
    ours, theirs, whole = [], [], []

    def run():
        comfyui_start = start(empty, pack, env=env)
        whole.append(comfyui_start["own seconds"])
        for seconds, loaded in zip((theirs, ours), comfyui_start["packs"], strict=True):
            seconds.append(loaded["seconds"])

    run()
    first = ours.pop() - theirs.pop()
    whole.clear()
    bench.benchmark.pedantic(run, rounds=bench.rounds(5))
    bench.record("start of ComfyUI", "a pack without nodes", "ComfyUI", ours, theirs)
    added = statistics.median(ours) - statistics.median(theirs)
    bench.say(f"the pack adds {added:.2f} s of CPU time to a start, {first:.2f} s to the first of all")
    bench.at_most("share of ComfyUI's own start", added / statistics.median(whole), 0.07)


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
    person = comfy.call("VitrineW2WSample", space=space, seed=4, spread=1.0, components=0, truncation=0.0, wanted="")[0]
    renderer = people.renderer_of(space, None, None, None, None, "")[0]
    panel = people.PanelSession(space, w2w.usual_map, person, lambda inputs: w2w.moved(space, person, inputs), renderer)
    places = itertools.count()

    def drag():
        asked = {"label_1": "beard", "strength_1": 2.0, "more": "glasses: 1.5", "place": f"0.{next(places):04d} 0.3"}
        assert people.portrait(panel, asked, "", 7, released=False)["picture"]

    _waited_for(bench, "panel: a drag becomes a picture", drag, bare, 0.5)
