"""Dropdowns of what a field could hold: labels of the connected space, layers of the connected model."""

import asyncio
import json

from vitrine_tests.lanes import page_modes

PEOPLE = "portraits people (shipped)"


def test_what_is_known_before_a_run(comfy):
    from vitrine.engine.portraits import load_portraits
    from vitrine.engine.portraits.flow import FLOW_WEIGHTS
    from vitrine.engine.portraits.shipped import shipped_models
    from vitrine.engine.tracing.addresses import sites_of
    from vitrine.engine.w2w import listed
    from vitrine.nodes.comfy.choices import choices

    space = comfy.call("VitrineLoadW2WSpace", space_file=PEOPLE, components=0)[0]
    assert choices({"space_file": PEOPLE}) == sorted(listed(space))
    for name, folder in shipped_models().items():
        listed = choices({"shipped": name})
        assert len(listed) > 20 and (folder == FLOW_WEIGHTS or listed == list(sites_of(load_portraits().unet)))
    for unknown in ({"node": "999"}, {"space_file": "gone"}, {"shipped": "gone"}, {}):
        assert choices(unknown) is None


def test_a_node_that_ran_is_known(comfy):
    """Of any model: here *Tap During Sampling* and *Person Sliders (W2W)* in a graph."""
    from vitrine.nodes.comfy import choices

    graph = {
        "71": ("VitrineLoadPortraits", {"model": "portraits, 64 px"}),
        "72": ("VitrineTapDuringSampling", {"model": ["71", 0], "layers": "auto", "record_steps": "0"}),
        "73": ("VitrineActivePatches", {"model": ["72", 0]}),
        "74": ("PreviewAny", {"source": ["73", 1]}),
    }
    _, error = comfy.run({k: {"class_type": kind, "inputs": inputs} for k, (kind, inputs) in graph.items()})
    assert error is None, error
    assert choices.choices({"node": "72"}) == choices.choices({"shipped": "portraits, 64 px"})
    assert choices.choices({"node": "72", "shipped": "gone"}) == choices.choices({"node": "72"})


# --- in the page --------------------------------------------------------------------------------------------------
BUILD = """(async () => {
    const model = add('VitrineLoadPortraits', 60, 80), space = add('VitrineLoadW2WSpace', 60, 300)
    const edit = add('VitrineW2WEdit', 480, 60), tap = add('VitrineTapDuringSampling', 960, 60)
    join(space, 0, edit, 'space'); join(model, 0, tap, 'model')
    window.named = kind
    window.field = (type, name) => named(type).widgets.find(w => w.name === name)
    window.choose = (type, name, value) => {
        const w = field(type, name); w.value = value; w.callback(value, app.canvas, named(type)) }
})()"""
LABELS = "field('VitrineW2WEdit', 'label_2').options.values"
VALUES = "Object.fromEntries(named('VitrineW2WEdit').widgets.map(w => [w.name, w.value]))"
SENT = "app.graphToPrompt().then(p => Object.values(p.output).map(n => [n.class_type, n.inputs]))"


PROTECTED = ("bald", "beard", "bald")


async def _walk(driver, address, vue):
    async with driver.page(address) as tab:
        await tab.build(BUILD, vue)
        await tab.wait_for(f"{LABELS}.includes('glasses')")
        await tab.wait_for("named('VitrineTapDuringSampling').widgets.at(-1).options.values.length > 20")
        seen = {"labels": await tab.evaluate(LABELS), "before": await tab.evaluate(VALUES)}
        for name, value in [("label_1", "beard"), ("label_2", "glasses"), *(("protect", v) for v in PROTECTED)]:
            await tab.evaluate(f"choose('VitrineW2WEdit', '{name}', '{value}')")
        await tab.evaluate("choose('VitrineW2WEdit', 'label_3', 'of my own space')")  # what dialog and links may bring
        await tab.evaluate("choose('VitrineLoadW2WSpace', 'colour_by', 'beard')")
        for value in ("mid-vit-out", "up-level0-out"):
            script = "const w = named('VitrineTapDuringSampling').widgets.at(-1); w.value = VALUE; w.callback(VALUE)"
            await tab.evaluate(f"(() => {{ {script.replace('VALUE', json.dumps(value))} }})()")
        seen["chosen"] = await tab.evaluate(VALUES)
        await tab.reload()
        await tab.wait_for(f"{LABELS}.includes('glasses')")
        await tab.settle()
        seen["reloaded"], seen["sent"] = await tab.evaluate(VALUES), dict(await tab.evaluate(SENT))
        seen["own"] = await tab.evaluate("field('VitrineW2WEdit', 'label_3').options.values")
        return seen, tab.faults()


@page_modes("classic")
def test_fields_become_dropdowns_and_keep_their_values(driver, address, vue):
    seen, faults = asyncio.run(_walk(driver, address, vue))
    assert {"beard", "glasses", "bald"} <= set(seen["labels"]) and len(seen["labels"]) > 18, "none, labels, to type"
    assert seen["before"]["label_1"] == seen["before"]["protect"] == ""
    chosen = {"label_1": "beard", "label_2": "glasses", "label_3": "of my own space", "protect": "beard"}
    assert chosen.items() <= seen["chosen"].items() and seen["chosen"] == seen["reloaded"]
    assert "of my own space" in seen["own"] and "glasses" in seen["own"]
    edit, tap = seen["sent"]["VitrineW2WEdit"], seen["sent"]["VitrineTapDuringSampling"]
    assert chosen.items() <= edit.items() and seen["sent"]["VitrineLoadW2WSpace"]["colour_by"] == "beard"
    assert tap["layers"].split() == ["mid-vit-out", "up-level0-out"] and set(tap) == {
        "model",
        "layers",
        "record_steps",
        "first_step",
        "selection",
    }
    assert not faults
