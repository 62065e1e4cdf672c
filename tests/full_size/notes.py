"""The notes "Your own model", followed word for word: each part of the sentence is found in ``WORDS`` and done.

A part that no entry of ``WORDS`` knows is an error: a note that is written anew must still be one that can be followed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitrine_tests.templates import reached, read, subgraphs, without_boxes

ROOT = Path(__file__).parents[2]
NAMES = json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
CORE = {
    "EmptyLatentImage": "Empty Latent Image", "CheckpointLoaderSimple": "Load Checkpoint", "LoadImage": "Load Image",
    "BatchImagesNode": "Batch Images", "BatchMasksNode": "Batch Masks", "LoraLoaderModelOnly": "Load LoRA",
}  # fmt: skip
PORTRAITS = ("VitrineLoadPortraits", "VitrineLoadPortraitsTransformer")
STEP = r"(?:on [^;]* set|swap|set|choose|write|take|leave|put|connect|empty|switch|change) "
OWN_SIDES = {"sd15": 512, "sdxl": 1024}
"""What the families were trained at."""


def note(workflow: str) -> str:
    """The steps below "Your own model:" in a workflow's note, in one line, without marks of emphasis."""
    return steps_in(note_texts(workflow))


def steps_in(text: str) -> str:
    """The same of a text, a numbered list or sentences: "swap this; set that"; what is no step is left out."""
    said = text.partition("**Your own model:**")[2].strip().split("\n\n")[0]
    parts = re.split(r"(?<!SD 1)\.(?:\s|$)", re.sub(r"^\d+\. ", "", said, flags=re.M))
    steps = [plain(part[0].lower() + part[1:]) for part in parts if part]
    return "; ".join(step for step in steps if re.match(STEP, step))


def note_texts(workflow: str) -> str:
    """All that a workflow's notes say."""
    graph = json.loads((ROOT / "workflows" / f"{workflow}.json").read_text(encoding="utf-8"))
    return "\n".join(str(n["widgets_values"][0]) for n in graph["nodes"] if n["type"] in ("Note", "MarkdownNote"))


def for_transformers(workflow: str) -> str:
    """What a workflow's note says of "Flux and other transformers", after what it says of your own model."""
    return transformers_in(note_texts(workflow), workflow)


def transformers_in(text: str, workflow: str = "") -> str:
    """The same of a text; the empty string where it says nothing of them."""
    found = re.findall(r"other transformers: ([^\n]*)", text)
    assert len(found) < 2, f"{workflow} says it twice"
    return plain(found[0]) if found else ""


def plain(text: str) -> str:
    """The first sentence, in one line; what stands between backticks is typed as it is, its asterisks too."""
    words = re.sub(r"`([^`]*)`|\*", lambda match: match[1] or "", " ".join(text.split()))
    return re.split(r"(?<!SD 1)\.(?= |$)", words)[0]


def families_of(workflow: str) -> list[str]:
    """Those a note is for: what it says is for SDXL is not tried on SD1.5."""
    return ["sdxl"] if "with SDXL" in note(workflow) else ["sd15", "sdxl"]


@dataclass
class Following:
    """An API graph that is changed as a note says.

    Attributes:
        graph: node id -> class and inputs.
        family: ``sd15``, ``sdxl``, or a transformer's.
        own: what the user has: names of files and folders, by kind.
    """

    graph: dict[str, Any]
    family: str
    own: dict[str, Any]
    workflow: str = ""
    sliders: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, workflow: str, family: str, own: dict[str, Any]) -> Following:
        """The workflow as it ships."""
        return cls(without_boxes(read(ROOT / "workflows" / "api" / f"{workflow}.json")), family, own, workflow)

    def follow(self, sentence: str) -> None:
        """Do all that the steps of a note say. An unknown part is an AssertionError."""
        for part in sentence.split("; "):
            known = [(match, act) for words, act in WORDS if (match := re.fullmatch(words, part))]
            assert len(known) == 1, f"{self.workflow}: nobody knows how to follow {part!r}"
            known[0][1](self, *known[0][0].groups())

    # --- the graph ------------------------------------------------------------------------------------------------
    def of(self, name: str) -> list[str]:
        """Ids of the nodes with a display name, or of those in the box with that title; there must be one."""
        ids = [i for i, node in self.graph.items() if _name(node["class_type"]) == name]
        box = subgraphs(read(ROOT / "workflows" / f"{self.workflow}.json")).get(name, {"nodes": []})
        ids += [str(node["id"]) for node in box["nodes"]]
        assert ids, f"{self.workflow} has no {name}"
        return ids

    def inputs(self, node_id: str) -> dict[str, Any]:
        """Inputs of a node."""
        found: dict[str, Any] = self.graph[node_id]["inputs"]
        return found

    def add(self, kind: str, **inputs: Any) -> str:
        """A new node; returns its id."""
        node_id = str(1 + max(int(i) for i in self.graph))
        self.graph[node_id] = {"class_type": kind, "inputs": inputs}
        return node_id

    def relink(self, old: list, new: list) -> None:
        """Lead every link from one output to another."""
        for node in self.graph.values():
            for key, value in node["inputs"].items():
                if value == old:
                    node["inputs"][key] = new

    def remove(self, node_id: str) -> None:
        """Take a node out: a MODEL passes by, all else behind it goes too."""
        model = self.inputs(node_id).get("model")
        passes = model is not None and self.graph[node_id]["class_type"] in ("VitrineLoadControl",)
        if passes:
            self.relink([node_id, 0], model)
        del self.graph[node_id]
        for other in [i for i, n in self.graph.items() if any(_from(v) == node_id for v in n["inputs"].values())]:
            if other in self.graph:
                self.remove(other)

    def having(self, name: str, nodes: Iterable[str] | None = None) -> dict[str, str]:
        """Node -> id of its input that the page shows under a name."""
        found = {i: _input(self.graph[i]["class_type"], name) for i in (nodes or self.graph)}
        return {i: key for i, key in found.items() if key in self.inputs(i)}

    def set_everywhere(self, name: str, value: Any, nodes: list[str] | None = None) -> None:
        """Set an input wherever it is."""
        having = self.having(name, nodes)
        assert having, f"{self.workflow}: no node has {name}"
        for node_id, key in having.items():
            self.inputs(node_id)[key] = value


def _name(kind: str) -> str:
    return CORE.get(kind) or NAMES.get(kind, {}).get("display_name", kind)


def _input(kind: str, shown: str) -> str:
    """Id of the input that a node shows under a name."""
    inputs = NAMES.get(kind, {}).get("inputs", {})
    return next((key for key, entry in inputs.items() if entry["name"] == shown), shown)


def _from(value: Any) -> str | None:
    return value[0] if isinstance(value, list) else None


# --- what the words mean ------------------------------------------------------------------------------------------
def swap_loader(f: Following, name: str) -> None:
    for node_id in f.of(name):
        f.graph[node_id] = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": f.own["checkpoint"]}}


def swap_renders(f: Following) -> None:
    """As many pictures as were drawn, if there are, one node each, joined where there are several."""
    for node_id in f.of("Render Portrait"):
        count, label = f.inputs(node_id)["count"], node_id
        loaded = [f.add("LoadImage", image=f.own["pictures"][i]) for i in range(min(count, len(f.own["pictures"])))]
        images, masks = [loaded[0], 0], [loaded[0], 1]
        if len(loaded) > 1:
            images = [f.add("BatchImagesNode", **{f"images.image{i}": [n, 0] for i, n in enumerate(loaded)}), 0]
            masks = [f.add("BatchMasksNode", **{f"masks.mask{i}": [n, 1] for i, n in enumerate(loaded)}), 0]
        f.relink([label, 0], images)
        f.relink([label, 2], masks)
        del f.graph[label]


def set_side(f: Following, first: str, sdxl: str | None = None) -> None:
    side = int(sdxl or first) if f.family == "sdxl" else int(first)
    for node_id in f.of("Empty Latent Image"):
        f.inputs(node_id).update(width=side, height=side)


def set_side_in(f: Following, box: str, first: str, sdxl: str | None = None) -> None:
    """The same in a subgraph, whose box shows the two numbers."""
    assert any(f.graph[i]["class_type"] == "EmptyLatentImage" for i in f.of(box)), box
    set_side(f, first, sdxl)


def set_both(f: Following, first: str, one: str, second: str, other: str) -> None:
    for name, value in ((first, one), (second, other)):
        f.set_everywhere(name, _number(value))


def _number(text: str) -> Any:
    if text.isdigit():
        return int(text)
    return float(text) if text.replace(".", "", 1).isdigit() else text


def train_sizes(f: Following, value: str) -> None:
    set_both(f, "train_width", value, "train_height", value)


def target_sizes(f: Following, value: str) -> None:
    set_both(f, "target_width", value, "target_height", value)


def your_size(f: Following) -> None:
    side = OWN_SIDES.get(f.family, 512) * 3 // 2
    target_sizes(f, str(side))
    set_side(f, str(side))


def on_unets(f: Following, *words: str) -> None:
    if f.family in OWN_SIDES:
        set_both(f, *words)


def on_sd3(f: Following, name: str, value: str) -> None:
    if f.family == "sd35":
        f.set_everywhere(name, value)


def positions_and_field(f: Following, name: str, value: str, on_sd3: str, other: str, field: str) -> None:
    set_both(f, name, on_sd3 if f.family == "sd35" else value, other, field)


def set_typed(f: Following, name: str, value: str) -> None:
    """An input of every node in which it is typed and not connected."""
    typed = [i for i, key in f.having(name).items() if not isinstance(f.inputs(i)[key], list)]
    assert len(typed) == 2, f"{f.workflow}: {name} is typed in {typed}"
    f.set_everywhere(name, value, typed)


def choose_typed(f: Following, node: str, layers: str) -> None:
    for name, value in (("selection", "addresses below"), ("layers", layers)):
        f.set_everywhere(name, value, f.of(node))


def set_of(f: Following, name: str, node: str, value: str) -> None:
    f.set_everywhere(name, value, f.of(node))


def choose_selection(f: Following, sd15: str, sdxl: str) -> None:
    f.set_everywhere("selection", sdxl if f.family == "sdxl" else sd15, f.of("Activation Tap"))


def choose_student(f: Following) -> None:
    for node_id in f.of("EMD One-Step Generator"):
        f.inputs(node_id).update(student=f.own["student"], contract=f.own["preset"])


def choose_student_and_style(f: Following) -> None:
    choose_student(f)
    f.set_everywhere("lora_name", f.own["student"], f.of("Load LoRA"))


def leave_out(f: Following, name: str) -> None:
    for node_id in f.of(name):
        if node_id in f.graph:
            f.remove(node_id)


def switch_on(f: Following, name: str) -> None:
    """A node that is bypassed in the page: put it in, with what it has there, before those it leads to."""
    page = read(ROOT / "workflows" / f"{f.workflow}.json")
    (node,) = [n for n in page["nodes"] if _name(n["type"]) == name and n["mode"] == 4]
    names = [i["name"] for i in node["inputs"] if "widget" in i] or list(NAMES[node["type"]]["inputs"])[1:]
    loader = f.of("Load Checkpoint")[0]
    made = f.add(node["type"], **dict(zip(names, node["widgets_values"], strict=True)), model=[loader, 0])
    for link, origin, *_ in page["links"]:
        if origin == node["id"]:
            for target, socket in reached(page, link):
                f.inputs(str(target))[socket] = [made, 0]


def own_space(f: Following) -> None:
    f.set_everywhere("space_file", f.own["space"], f.of("Load W2W Space"))
    f.sliders = [f.own["slider"]]


def write_sliders(f: Following) -> None:
    for node_id in f.of("W2W Edit"):
        given = f.inputs(node_id)
        for place in range(1, 5):
            if given[f"label_{place}"]:
                given[f"label_{place}"] = f.sliders[0] if place == 1 else ""


def own_files(f: Following) -> None:
    for name, (key, kind) in {
        "Load Neurons": ("file", "neurons"), "Load W2W Space": ("space_file", "space"),
        "Load W2W Model": ("file", "person"), "Load Layer Preset": ("file", "places"),
        "Load Activations": ("file", "taps"),
    }.items():  # fmt: skip
        f.set_everywhere(key, f.own[kind], f.of(name))


def choose_folder(f: Following) -> None:
    f.set_everywhere("folder", f.own["folder"], f.of("Build W2W Space"))


def connect_space(f: Following) -> None:
    (old,), (new,) = f.of("Load W2W Space"), f.of("Build W2W Space")
    f.relink([old, 0], [new, 0])
    del f.graph[old]


def write_names(f: Following) -> None:
    f.set_everywhere("labels", f.own["labels"], f.of("Train W2W Direction"))


def write_prompts(f: Following) -> None:
    """Two seeds are enough to see it run."""
    for node_id in f.of("NEMO Copy Check"):
        texts = {"prompts": "a red cube\na tree by a lake", "ordinary": "a dog\na street at night\na bowl of soup"}
        f.inputs(node_id).update(texts, seeds=2, name=f"notes_{f.family}")


def choose_teacher(f: Following) -> None:
    """Whoever has no SD1.x folder has no use for the node."""
    if "teacher" in f.own:
        f.set_everywhere("base", f.own["teacher"], f.of("EMD Train Student"))
    else:
        leave_out(f, "EMD Train Student")


def change_sizes(f: Following, *numbers: str) -> None:
    """Size conditions, wherever one of the portraits' sizes is width and height."""
    old, new = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
    table = {int(a): int(b) for a, b in zip(old, new, strict=True)}
    nodes = [i for kind in ("Size and Crop Values", "Control-Conditioned Sampler") for i in _some(f, kind)]
    for node_id in nodes:
        given = f.inputs(node_id)
        given.update(width=table[given["width"]], height=table[given["height"]])


def _some(f: Following, name: str) -> list[str]:
    return [i for i, node in f.graph.items() if _name(node["class_type"]) == name]


WORDS: list[tuple[str, Callable[..., None]]] = [
    (r"swap (Load Portraits \w+) for Load Checkpoint(?: with SDXL)?", swap_loader),
    (r"swap (?:the )?Render Portrait(?: nodes)? for Load Image(?: with (?:a )?painted masks?)?"
     r"(?:, joined by Batch Images(?: and Batch Masks \(sixteen pictures of 512 px\))?)?", swap_renders),
    (r"set Empty Latent Image to (\d+)(?: \(SDXL: (\d+)\))?", set_side),
    (r"set width and height of (Prompt and size|Sample both) to (\d+)(?: \(SDXL: (\d+)\))?", set_side_in),
    (r"set (timestep_index|schedule) to (\w+) and (effect_fraction|pos_embed) to ([\w.]*\w)", set_both),
    (r"on a UNet \(SD1\.5, SDXL\) set (pos_embed) to (auto) and (receptive_field) to (dilate)", on_unets),
    (r"on SD3 set (pos_embed) to (auto)", on_sd3),
    (r"set (pos_embed) to (rope_yarn) \(SD3: (auto)\) and (receptive_field) to (none)", positions_and_field),
    (r"set both (layers) to (auto)", set_typed),
    (r"set selection of (Activation Tap) to addresses below and its layers to (auto)", choose_typed),
    (r"set timestep_index to (\d+)", lambda f, value: f.set_everywhere("timestep_index", int(value))),
    (r"set train_width and train_height to (\d+)(?: \(the family's usual size\))?", train_sizes),
    (r"set target_width and target_height to (\d+)", target_sizes),
    (r"set your size as target_width and target_height of Resolution Transfer Loader and as width and height of "
     r"Prompt and size", your_size),
    (r"set (layers|mode) of ([\w, ]+) to ([\w*-]+)", set_of),
    (r"empty the (layer) of (Activation Picture|Tap, save, and sample both)",
     lambda f, name, node: set_of(f, name, node, "")),
    (r"choose a published selection \(([\w.-]+), ([\w.-]+)\) in Activation Tap", choose_selection),
    (r"write 500 or more ordinary captions", lambda f: None),
    (r"choose (?:your|a) student LoRA(?: of that base)? and its preset \([\w, ]+\) in EMD One-Step Generator",
     choose_student),
    (r"choose (?:your|a) student LoRA(?: of that base)? and its preset \([\w, ]+\) in EMD One-Step Generator and in "
     r"The same in other ways, and any style LoRA there", choose_student_and_style),
    (r"leave ([\w ]+) out(?: unless the student came with a score network| \(the curve then works training-free\))?",
     leave_out),
    (r"switch ([\w ]+) on \(.*Ctrl\+B\)", switch_on),
    (r"choose your own space in Somebody", own_space),
    (r"write its sliders in W2W Edit", write_sliders),
    (r"choose your own files in the Load nodes and your space in Sample both", own_files),
    (r"put LoRAs of one kind into a folder below models/loras and choose it in Build W2W Space", choose_folder),
    (r"connect its SPACE instead of Load W2W Space", connect_space),
    (r"write your files' names in Train W2W Direction", write_names),
    (r"put a diffusers folder of an SD1\.x model into models/diffusers and choose it in EMD Train Student",
     choose_teacher),
    (r"write your prompts and ordinary captions in NEMO Copy Check", write_prompts),
    (r"change (\d+) to (\d+)", change_sizes),
    (r"change (\d+), (\d+) and (\d+) to (\d+), (\d+) and (\d+) in Size and Crop Values: three sizes and "
     r"Control-Conditioned Sampler", change_sizes),
]  # fmt: skip
"""Part of a sentence -> what it means for the graph."""
