"""The notes "Your own model" and the templates "... your model" on small models of the transformer families: the tests.

Two files run them, half of the families each, so that two processes share the work.

What a note says is done word for word, as on full-size UNets in tests/full_size, then what it says of transformers.
Without that, words for UNets (a published selection, `up-*`) are refused plainly. LTX-2 is refused with its reason
(test_ltx2.py): it has no note to follow.
"""

import re

import pytest
from vitrine_tests.comfy.tiny_user import Tiny
from vitrine_tests.full_size.material import COMFYUI
from vitrine_tests.full_size.notes import Following, note
from vitrine_tests.lanes import nightly_but

RUN = (
    "Sample at twice the size (demo)", "Sample at twice the size, transformer (demo)",
    "Stop the model copying a picture (demo)", "Check a model for copies (demo)",
    "Turn a folder of LoRAs into sliders (demo)", "Pull sliders on a person (demo)",
    "Change a person halfway through (demo)", "Sample in one step (demo)", "Sample a person in one step (demo)",
    "Look inside a copied picture (demo)", "Reuse saved neurons, people and layers (demo)",
    "Make your own slider, threshold and space (demo)",
)  # fmt: skip
"""Notes whose words serve every family as they are."""
LONG = {"Check a model for copies (demo)", "Make your own slider, threshold and space (demo)"}
"""Those that are followed at night only."""
UNET_WORDS = {
    "See what the model sees (demo)": "address: given up-level",
    "Find the same part (demo)": r"address: given up-\*",
}
"""Notes whose first sentence is for UNets -> what is said of it; a second one is for transformers."""
TEMPLATES = (
    "See what the model sees (your checkpoint)", "Find the same part (your checkpoint)",
    "Sample at twice the size (your checkpoint)", "Stop the model copying a picture (your checkpoint)",
    "Turn a folder of LoRAs into sliders (your checkpoint)",
)  # fmt: skip


@pytest.fixture(scope="module")
def batches(comfy):
    """Core's *Batch Images* and *Batch Masks*; nodes_latent.py comes first, as when ComfyUI starts."""
    load = comfy.nodes.load_custom_node
    files = [COMFYUI / "comfy_extras" / f"{name}.py" for name in ("nodes_latent", "nodes_post_processing")]
    return all([comfy.loop.run_until_complete(load(str(file), module_parent="comfy_extras")) for file in files])


def users_of(families):
    """A fixture: a user with the small model of each of these families, whose loader every graph finds."""

    @pytest.fixture(scope="module", params=families)
    def tiny(request, comfy, batches, tmp_path_factory):
        import comfy.sd as core

        if not batches:
            pytest.skip("ComfyUI's Batch Images does not load here")
        user = Tiny(request.param, tmp_path_factory.mktemp(request.param), comfy)
        load, core.load_checkpoint_guess_config = core.load_checkpoint_guess_config, lambda *a, **k: (*user.parts, None)
        yield user
        core.load_checkpoint_guess_config = load

    return tiny


def shown(history, graph):
    previews = [i for i, node in graph.items() if node["class_type"] == "PreviewImage"]
    return previews and all(history["outputs"][i]["images"] for i in previews)


REFUSED = {
    ("anima", "Stop the model copying a picture (demo)"): ("attack_steps", "a network that core can differentiate"),
    ("anima", "Pull sliders on a person (demo)"): ("VitrineW2WInvert", "a network that core can differentiate"),
}
"""What core's attention kernel has no derivative for; without it the graph runs."""
JOINT = ("VitrineNEMOBake", "whose weights read image tokens too")
"""Where one projection reads text and picture, neurons are blocked while sampling and cannot be baked."""


@pytest.mark.parametrize("workflow", nightly_but(RUN, [name for name in RUN if name not in LONG]))
def test_the_note_can_be_followed(tiny, workflow):
    following = tiny.following(workflow)
    history, error = tiny.run(following.graph)
    bakes = workflow == "Reuse saved neurons, people and layers (demo)" and not tiny.reads_text_alone
    without, said = JOINT if bakes else REFUSED.get((tiny.name, workflow), ("", ""))
    if without:
        assert error and said in error, error
        left_out(following, without)
        history, error = tiny.run(following.graph)
    assert error is None, error
    assert shown(history, following.graph)


def left_out(following, name):
    """An input at 0, or a kind of node with all behind it."""
    for node_id in list(following.graph):
        if node_id not in following.graph:
            continue
        if name in following.inputs(node_id):
            following.inputs(node_id)[name] = 0
        elif following.graph[node_id]["class_type"] == name:
            following.remove(node_id)


@pytest.mark.parametrize("workflow", UNET_WORDS)
def test_the_note_for_transformers_can_be_followed(tiny, workflow):
    """Without its second sentence the first is refused, with what would be taken."""
    following = Following.start(workflow, tiny.name, tiny.own)
    following.follow(note(workflow))
    _, error = tiny.run(following.graph)
    assert error and re.search(UNET_WORDS[workflow], error) and "layers of this model" in error, error
    graph = tiny.following(workflow).graph
    history, error = tiny.run(graph)
    assert error is None and shown(history, graph), error


@pytest.mark.parametrize("workflow", TEMPLATES)
def test_the_template_runs(tiny, workflow):
    graph = tiny.template(workflow)
    history, error = tiny.run(graph)
    assert error is None, error
    assert shown(history, graph)
