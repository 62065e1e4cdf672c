"""Core's sampling graphs with a tap, a blocker and a late W2W model on their MODEL.

Asked for nothing, they are the plain graph, bit for bit. Asked for something, they are what is computed here by other
means: rows found by looking at their texts, steps by the sampler's own levels, the later model as another network.
"""

from collections import defaultdict
from contextlib import ExitStack

import pytest
import torch
from vitrine.engine.nemo import BlockConfig, NeuronSet, block, value_sites
from vitrine.engine.tracing.addresses import resolve
from vitrine.engine.tracing.hooks import capture
from vitrine_tests.comfy.guided_graphs import MIDDLE, NEURONS, VALUES
from vitrine_tests.comfy.sampling_graphs import GRAPHS, Scene
from vitrine_tests.lanes import nightly_but

ALL = {"factor": 0.0, "branch": "cond", "start_percent": 0.0, "end_percent": 1.0}
LATE = 500.0
OWN_WEIGHTS = {"LoRA hooks with keyframes"}
"""Graphs that change the network's weights themselves."""
JOINT = ("text to image", "hires fix", "inpaint, noise mask", "regional, masks", "Split Sigmas", "Latent From Batch")
BEHIND_A_LATE_MODEL = [name for name in GRAPHS if name != "ModelMergeSimple"]  # which is refused there
DAILY = [list(GRAPHS)[first::3] for first in range(3)]
"""Graphs for each of the three tests below: by day each graph is in one of them, at night in all."""


@pytest.fixture(scope="module")
def scene(comfy):
    made = Scene.of(comfy)
    space = comfy.call("VitrineLoadW2WSpace", space_file="portraits people (shipped)", components=0)[0]
    draw = {"spread": 1.0, "components": 0, "truncation": 0.0, "wanted": ""}
    one, other = (comfy.call("VitrineW2WSample", space=space, seed=seed, **draw)[0] for seed in (1, 2))
    made.made = {"space": space, "one": one, "other": other, "neurons": NEURONS, "tapped": [VALUES, MIDDLE]}
    made.made["lora"] = applied(made, made.model, other)
    another, _, _ = comfy.call("VitrineLoadPortraits")
    assert another.model is not made.model.model
    made.made["network"] = applied(made, another, other)
    made.made["network"].patch_model()
    return made


@pytest.fixture(scope="module")
def flow(comfy):
    made = Scene.of(comfy, "flow portraits, 128 px", 16)
    sites = [site.address for site in value_sites(made.model.model.diffusion_model, "all")]
    made.made = {"neurons": NeuronSet({sites[0]: tuple(range(40))}), "tapped": [sites[-1]]}
    return made


def applied(scene, model, w2w, **late):
    told = {"space": scene.made["space"], "w2w_model": w2w, "strength": 1.0, "start_timestep": 1000.0} | late
    return scene.comfy.call("VitrineApplyW2WModel", model=model, **told)[0]


def tapped(scene, model):
    told = {"layers": " ".join(scene.made["tapped"]), "record_steps": "all"}
    return scene.comfy.call("VitrineTapDuringSampling", model=model, **told)


def blocked(scene, model, **settings):
    told = {"neurons": scene.made["neurons"]} | ALL | settings
    return scene.comfy.call("VitrineNEMONeuronBlocker", model=model, **told)[0]


def asks_for_nothing(scene, model):
    """Every node of ours that acts in a run, each set so that it changes nothing."""
    from vitrine.nodes.comfy.nemo import blocked as wrapped

    made = scene.made
    if "space" in made:
        model = applied(scene, model, made["one"], strength=0.0, late_model=made["other"], start_timestep=LATE)
    model = blocked(scene, model, neurons=NeuronSet({}))
    model = wrapped(model, made["neurons"], BlockConfig(1.0, "cond"))  # the node itself would leave it out
    return blocked(scene, model, tokens="9000")


class ByHand:
    """Clones that do, or note, what our nodes are asked for; found by other means than theirs.

    Attributes:
        seen: step of the newest run -> [(address, row of the prompt)], of the step's first forward of it.
    """

    def __init__(self, scene):
        self.scene, self.texts = scene, [scene.conds[name][0][0][0] for name in ("positive", "second")]
        self.seen, self._levels = defaultdict(list), None

    def _clone(self, model, apply):
        import comfy.patcher_extension

        clone = model.clone()
        clone.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.APPLY_MODEL, "test", apply)
        return clone

    def _rows(self, text):
        return [any(torch.equal(row[: len(own)], own) for own in self.texts) for row in text]

    def blocks(self, model, start):
        """In the prompt's rows, from a share of the run on."""

        def apply(executor, x, t, concat=None, text=None, control=None, options=None, **conditions):
            levels = options["sample_sigmas"]
            with ExitStack() as stack:
                if int((levels - t[0]).abs().argmin()) >= start * (len(levels) - 1):
                    network, rows = executor.class_obj.diffusion_model, torch.tensor(self._rows(text))
                    stack.enter_context(block(network, self.scene.made["neurons"], rows=rows))
                return executor(x, t, concat, text, control, options, **conditions)

        return self._clone(model, apply)

    def is_late(self, model, network, moving=False):
        """Another network from a timestep on; with what the graph adds to the weights, where it does."""
        import comfy.model_management

        comfy.model_management.load_models_gpu([model])
        before = {k: v.clone() for k, v in model.model.diffusion_model.state_dict().items()} if moving else {}
        other = network.model.diffusion_model.state_dict()

        def apply(executor, x, t, *args, **conditions):
            if float(executor.class_obj.model_sampling.timestep(t[:1])) > LATE:
                return executor(x, t, *args, **conditions)
            now = executor.class_obj.diffusion_model.state_dict()
            kept = {k: other[k].clone() for k in before}
            for k, value in before.items():
                other[k].add_(now[k] - value)
            try:
                return network.model._apply_model(x, t, *args, **conditions)
            finally:
                for k, value in kept.items():
                    other[k].copy_(value)

        return self._clone(model, apply)

    def notes(self, model):
        """What the tapped layers give for the prompt's rows."""
        network = model.model.diffusion_model
        sites = resolve(network, self.scene.made["tapped"])
        texts = {site.address for site in sites if site.kind == "text"}

        def apply(executor, x, t, concat=None, text=None, control=None, options=None, **conditions):
            levels, found = options["sample_sigmas"], []
            if levels is not self._levels:
                self._levels = levels
                self.seen.clear()
            step = int((levels - t[0]).abs().argmin())
            rows = self._rows(text)

            def keep(activation):
                words = activation.address in texts
                for row, own in zip(activation.tensor.clone(), rows, strict=True):
                    if own:
                        found.append((activation.address, row[: len(self.texts[0])] if words else row))

            with capture(network, sites, reduce=keep):
                out = executor(x, t, concat, text, control, options, **conditions)
            key = [tuple(row.flatten(1)[0].tolist()) for row, own in zip(text, rows, strict=True) if own]
            if not any(key == known for known, _ in self.seen[step]):
                self.seen[step].append((key, found))
            return out

        return self._clone(model, apply)


def samples(latents):
    return [latent["samples"] for latent in latents]


def same(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def close(found, expected):
    return all(torch.allclose(a, b, atol=2e-3 * float(b.abs().max())) for a, b in zip(found, expected, strict=True))


def check_what_changes_nothing(scene, name):
    graph, hand = GRAPHS[name], ByHand(scene)
    plain = samples(graph(scene, hand.notes(scene.model)))
    assert same(plain, samples(graph(scene, scene.model)))
    model, recorder = tapped(scene, asks_for_nothing(scene, scene.model))
    assert same(samples(graph(scene, model)), plain)
    assert set(recorder.record) == set(hand.seen)
    for step, forwards in hand.seen.items():
        expected = [row for _, found in forwards for row in found]
        halves = {half: taps for half, taps in recorder.record[step].items() if half.partition(" ")[0] == "cond"}
        found = [(a, row) for taps in halves.values() for a in taps for row in taps[a].tensor]
        assert len(found) == len(expected) > 0
        assert all(any(a == b and torch.equal(row, other) for b, other in expected) for a, row in found)


def check_what_is_blocked(scene, name):
    graph = GRAPHS[name]
    found = samples(graph(scene, blocked(scene, scene.model, start_percent=0.3)))
    assert same(found, samples(graph(scene, ByHand(scene).blocks(scene.model, 0.3))))
    assert not same(found, samples(graph(scene, scene.model)))


@pytest.mark.parametrize("name", nightly_but(BEHIND_A_LATE_MODEL, DAILY[0]))
def test_what_changes_nothing_is_the_plain_graph_and_a_tap_keeps_its_rows(scene, name):
    check_what_changes_nothing(scene, name)


@pytest.mark.parametrize("name", nightly_but(GRAPHS, DAILY[1]))
def test_a_blocker_acts_on_the_prompts_rows_of_its_steps(scene, name):
    check_what_is_blocked(scene, name)


@pytest.mark.parametrize("name", nightly_but(BEHIND_A_LATE_MODEL, DAILY[2]))
def test_a_late_model_acts_from_its_timestep(scene, name):
    graph, made = GRAPHS[name], scene.made
    late = applied(scene, scene.model, made["one"], late_model=made["other"], start_timestep=LATE)
    found = samples(graph(scene, late))
    before = applied(scene, scene.model, made["one"])
    by_hand = ByHand(scene).is_late(before, made["network"], name in OWN_WEIGHTS)
    assert close(found, samples(graph(scene, by_hand)))
    assert not same(found, samples(graph(scene, before)))


@pytest.mark.parametrize("name", nightly_but(JOINT, JOINT[2:4]))
def test_graphs_of_a_transformer(flow, name):
    check_what_changes_nothing(flow, name)
    check_what_is_blocked(flow, name)


def listed(model):
    """A list of three latents, which the sampler runs one by one, through the executor."""
    graph = {
        "1": ("VitrineLoadPortraits", {"model": "portraits, 64 px"}),
        "2": ("CLIPTextEncode", {"text": "a smiling face", "clip": ["1", 1]}),
        "4": ("EmptyLatentImage", {"width": 128, "height": 128, "batch_size": 3}),
        "5": ("RebatchLatents", {"latents": ["4", 0], "batch_size": 1}),
        "11": ("KSampler", {"model": model, "positive": ["2", 0], "negative": ["2", 0], "latent_image": ["5", 0],
                            "seed": 5, "steps": 2, "cfg": 2.0, "sampler_name": "euler", "scheduler": "normal",
                            "denoise": 1.0}),
        "20": ("SaveLatent", {"samples": ["11", 0], "filename_prefix": "listed"}),
    }  # fmt: skip
    return {number: {"class_type": kind, "inputs": inputs} for number, (kind, inputs) in graph.items()}


def saved(comfy, graph):
    """What a graph's Save Latent wrote, and how many records Save Activations was given."""
    import folder_paths
    from safetensors.torch import load_file

    shown, error = comfy.run(graph)
    assert error is None, error
    out = folder_paths.get_output_directory()
    latents = [load_file(f"{out}/{entry['filename']}")["latent_tensor"] for entry in shown["outputs"]["20"]["latents"]]
    return latents, len(shown["outputs"].get("13", {"text": []})["text"])


def test_a_list_of_latents(comfy, scene):
    """Each element of a list has its own run; test_one_clock has the records of a list."""
    plain, _ = saved(comfy, listed(["1", 0]))
    graph = listed(["9", 0])
    tap = {"model": ["1", 0], "layers": MIDDLE, "record_steps": "all"}
    graph["9"] = {"class_type": "VitrineTapDuringSampling", "inputs": tap}
    collect = {"recorder": ["9", 1], "latent": ["11", 0], "step": 1, "half": "cond"}
    graph["12"] = {"class_type": "VitrineCollectTaps", "inputs": collect}
    graph["13"] = {"class_type": "VitrineSaveActivations", "inputs": {"activations": ["12", 0], "name": "listed"}}
    found, records = saved(comfy, graph)
    assert len(plain) == 3 and same(found, plain) and not torch.equal(plain[0], plain[1])
    assert records == 3
