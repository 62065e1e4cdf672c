"""ComfyUI's real page set to another language: our nodes' titles, menu folder, sockets and widgets follow."""

import asyncio
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHOWN = """(() => {
    const type = LiteGraph.registered_node_types['VitrineActivationTap'], node = LiteGraph.createNode(type.type)
    const name = s => s.label || s.localized_name || s.name
    return {title: node.title, category: type.category, description: type.nodeData.description,
            inputs: node.inputs.map(name), outputs: node.outputs.map(name)}
})()"""


async def _shown(driver, address, language):
    import aiohttp

    async with aiohttp.ClientSession() as session:
        await session.post(f"{address}/settings/Comfy.Locale", json=language)
        try:
            async with driver.page(address, alone=True) as tab:
                return await tab.evaluate(SHOWN)
        finally:
            await session.post(f"{address}/settings/Comfy.Locale", json="en")


def test_the_page_speaks_the_users_language(driver, address):
    shown = asyncio.run(_shown(driver, address, "zh"))
    table = json.loads((ROOT / "locales" / "zh" / "nodeDefs.json").read_text(encoding="utf-8"))["VitrineActivationTap"]
    menu = json.loads((ROOT / "locales" / "zh" / "main.json").read_text(encoding="utf-8"))["nodeCategories"]
    assert shown["title"] == table["display_name"] and shown["description"] == table["description"]
    assert shown["category"] == "/".join(menu[part] for part in ("Vitrine", "activations"))
    assert shown["inputs"] == [i["name"] for i in table["inputs"].values()]
    assert shown["outputs"] == [o["name"] for o in table["outputs"].values()]
