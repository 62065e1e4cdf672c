"""What the page tests take for an error of ours is seen: thrown, caught by the page, refused by its policy."""

import asyncio
import json

from vitrine_tests.comfy.conftest import BROKEN

SCRIPT = """import { app } from "../../scripts/app.js";
app.registerExtension({ name: "vitrine.broken", setup() { throw new Error("in a hook"); } });
console.warn("input.link is deprecated.");
console.warn("said for no reason");
setTimeout(() => { window.broken = true; throw new Error("in a timer"); }, 500);
new Image().src = "https://example.org/elsewhere.png";
"""
LISTED = f"""(() => {{
    const {{ fetch }} = window
    window.fetch = (...asked) => String(asked[0]?.url ?? asked[0]).endsWith('/api/extensions')
        ? Promise.resolve(Response.json([{json.dumps(BROKEN)}])) : fetch(...asked)
}})()"""
"""The broken script is all that the page is told of."""


async def _seen(driver, address):
    async with driver.page(address, alone=True, before=LISTED) as tab:
        await tab.wait_for("window.broken")
        await tab.evaluate("setTimeout(() => { throw new Error('of somebody else') }, 0)")
        for words in ("in a hook", "in a timer", "security: ", "of somebody else"):
            await tab.hear(words)
        return tab.faults(), tab.console


def test_errors_of_our_scripts_are_seen(driver, address, page_base):
    """The pack's only script here is a broken one, at an address as those of ours have."""
    (page_base / "broken.js").write_text(SCRIPT, encoding="utf-8")
    faults, console = asyncio.run(_seen(driver, address))
    for expected in ("in a hook", "in a timer", "security: ", "is deprecated"):
        assert any(expected in f for f in faults), (expected, console)
    assert not any("no reason" in c for c in console)
    assert any("of somebody else" in c for c in console) and not any("somebody else" in f for f in faults)


async def _next_sees(driver, address, change):
    """What a test sees of a mark that the one before left in the page, with a change of it."""
    async with driver.page(address) as tab:
        await tab.evaluate(f"window.mark = 1; {change}")
    async with driver.page(address) as tab:
        return await tab.evaluate("window.mark")


REPLACED = "import('/scripts/api.js').then(({ api }) => { api.fetchApi = () => 0 })"


def test_a_page_with_replaced_requests_is_not_given_to_the_next_test(driver, address):
    assert asyncio.run(_next_sees(driver, address, "null")) == 1, "the next test is given the same page"
    for change in (REPLACED, "window.fetch = () => 0; null"):
        assert asyncio.run(_next_sees(driver, address, change)) is None
