"""ComfyUI's real page set to another language: our nodes' titles, menu folder, sockets and widgets follow."""

import asyncio
import json
import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMFYUI = Path(os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI")).expanduser()
SHOWN = """(() => {
    const type = LiteGraph.registered_node_types['VitrineActivationTap'], node = LiteGraph.createNode(type.type)
    const name = s => s.label || s.localized_name || s.name
    return {title: node.title, category: type.category, description: type.nodeData.description,
            inputs: node.inputs.map(name), outputs: node.outputs.map(name)}
})()"""


async def _shown(driver, base, language):
    with driver.server(COMFYUI, ROOT, base, user={"Comfy.Locale": language}) as address:
        async with driver.page(address) as tab:
            await tab.wait_for("LiteGraph.registered_node_types['VitrineActivationTap']")
            return await tab.evaluate(SHOWN)


def test_the_page_speaks_the_users_language(driver, tmp_path):
    shown = asyncio.run(_shown(driver, tmp_path / "base", "zh"))
    table = json.loads((ROOT / "locales" / "zh" / "nodeDefs.json").read_text(encoding="utf-8"))["VitrineActivationTap"]
    menu = json.loads((ROOT / "locales" / "zh" / "main.json").read_text(encoding="utf-8"))["nodeCategories"]
    assert shown["title"] == table["display_name"] and shown["description"] == table["description"]
    assert shown["category"] == "/".join(menu[part] for part in ("Vitrine", "activations"))
    assert shown["inputs"] == [i["name"] for i in table["inputs"].values()]
    assert shown["outputs"] == [o["name"] for o in table["outputs"].values()]
