"""Recipes of one node: ComfyUI serves ``subgraphs/*.json`` as blueprints; in the page they are subgraphs that run."""

import asyncio
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLUEPRINTS = sorted(ROOT.glob("subgraphs/*.json"))
IDS = set(re.findall(r'node_id="(\w+)"', "".join(p.read_text("utf-8") for p in (ROOT / "nodes").rglob("*.py"))))
DEFINITIONS = json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
AROUND = """(() => {
    const host = app.graph._nodes[0]
    const model = add('VitrineLoadPortraits', 500, 80), text = add('CLIPTextEncode', 500, 300)
    const size = add('EmptyLatentImage', 500, 600), shown = add('PreviewImage', 900, 80)
    for (const name of ['width', 'height']) size.widgets.find(w => w.name === name).value = 64
    join(model, 1, text, 'clip'); join(model, 0, host, 'model'); join(text, 0, host, 'positive')
    join(size, 0, host, 'latent'); join(model, 2, host, 'vae'); join(host, 0, shown, 'images')
})()"""


@pytest.mark.parametrize("path", BLUEPRINTS, ids=lambda p: p.stem)
def test_a_blueprint_is_one_node_of_known_ones(path):
    graph = json.loads(path.read_text(encoding="utf-8"))
    (host,), (inner,) = graph["nodes"], graph["definitions"]["subgraphs"]
    assert host["type"] == inner["id"] and inner["name"] == path.stem
    assert inner["category"] == "Vitrine" and len(inner["description"]) > 40
    ours = [n for n in inner["nodes"] if n["type"].startswith("Vitrine")]
    assert ours and {n["type"] for n in ours} <= IDS
    for node in ours:
        assert {i["name"] for i in node["inputs"]} <= set(DEFINITIONS[node["type"]]["inputs"])
    assert all(i["linkIds"] for i in inner["inputs"]) and all(o["linkIds"] for o in inner["outputs"])


async def _place(driver, address, graph):
    import aiohttp

    async with aiohttp.ClientSession() as session, driver.page(address) as tab:
        async with session.get(f"{address}/global_subgraphs") as answer:
            listed = {e["name"] for e in (await answer.json()).values() if "vitrine" in e["info"]["node_pack"]}
        await tab.evaluate(f"app.loadGraphData({json.dumps(graph)})")
        await tab.wait_for("app.graph._nodes.length === 1")
        widgets = await tab.evaluate("app.graph._nodes[0].widgets.map(w => w.name)")
        await tab.evaluate(f"{driver.TOOLS}; null")
        await tab.evaluate(AROUND)
        await tab.settle()
        return listed, widgets, await tab.run(address), tab.faults()


@pytest.mark.nightly
def test_one_is_placed_and_runs(driver, address):
    graph = json.loads((ROOT / "subgraphs" / "Sample in one step.json").read_text(encoding="utf-8"))
    listed, widgets, entry, errors = asyncio.run(_place(driver, address, graph))
    assert listed == {p.stem for p in BLUEPRINTS} and len(listed) >= 4
    assert {"student", "seed"} <= set(widgets) and not errors
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"]
    assert any(o.get("images") for o in entry["outputs"].values())
