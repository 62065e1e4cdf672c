"""What the page tests take for an error of ours is seen: thrown, caught by the page, refused by its policy."""

import asyncio
import os
from pathlib import Path

COMFYUI = Path(os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI")).expanduser()
SCRIPT = """import { app } from "../../scripts/app.js";
app.registerExtension({ name: "vitrine.broken", setup() { throw new Error("in a hook"); } });
console.warn("input.link is deprecated.");
console.warn("said for no reason");
setTimeout(() => { window.broken = true; throw new Error("in a timer"); }, 500);
new Image().src = "https://example.org/elsewhere.png";
"""


async def _seen(driver, address):
    async with driver.page(address) as tab:
        await tab.wait_for("window.broken")
        await tab.evaluate("setTimeout(() => { throw new Error('of somebody else') }, 0)")
        for words in ("in a hook", "in a timer", "security: ", "of somebody else"):
            await tab.hear(words)
        return tab.faults(), tab.console


def test_errors_of_our_scripts_are_seen(driver, tmp_path):
    """The pack here is one broken script, under the name that ours has in the other page tests."""
    pack = tmp_path / "pack"
    (pack / "web").mkdir(parents=True)
    (pack / "__init__.py").write_text('NODE_CLASS_MAPPINGS, WEB_DIRECTORY = {}, "web"\n')
    (pack / "web" / "broken.js").write_text(SCRIPT)
    with driver.server(COMFYUI, pack, tmp_path / "base") as address:
        faults, console = asyncio.run(_seen(driver, address))
    for expected in ("in a hook", "in a timer", "security: ", "is deprecated"):
        assert any(expected in f for f in faults), (expected, console)
    assert not any("no reason" in c for c in console)
    assert any("of somebody else" in c for c in console) and not any("somebody else" in f for f in faults)
