"""Core's *Compare Images* in the classic page, where it is a grey bar without our script; Nodes 2.0 has core's own."""

import asyncio

import pytest
from vitrine_tests.lanes import page_modes

BUILD = """(async () => {
    window.compare = add('ImageCompare', 500, 80)
    join(add('VitrineRenderPortrait', 60, 80, { seed: 1, count: 1 }), 0, compare, 'image_a')
    join(add('VitrineRenderPortrait', 60, 600, { seed: 2, count: 1 }), 0, compare, 'image_b')
})()"""
LOADED = "[...document.querySelectorAll('.vitrine-compare img')].filter(i => i.naturalWidth).length === 2"
SHARE = "document.querySelector('.vitrine-compare').dataset.share"
CLIP = "document.querySelectorAll('.vitrine-compare img')[1].style.clipPath"


async def _walk(driver, address, vue):
    async with driver.page(address) as tab:
        await tab.build(BUILD, vue)
        await tab.run(address)
        seen = {"ours": await tab.evaluate("document.querySelectorAll('.vitrine-compare').length"), "clips": []}
        if not vue:
            await tab.wait_for(LOADED)
            left, top, width, height = await tab.box(".vitrine-compare")
            for share in (0.25, 0.75):
                where = {"x": left + share * width, "y": top + height / 2, "pointerType": "mouse"}
                await tab.send("Input.dispatchMouseEvent", type="mouseMoved", **where)
                await tab.wait_for(
                    f"Math.abs(document.querySelector('.vitrine-compare').dataset.share - {share}) < 0.01"
                )
                seen["clips"].append(await tab.evaluate(CLIP))
            seen["height"] = height
        saved = "app.graph.serialize().nodes.find(n => n.type === 'ImageCompare').widgets_values ?? []"
        seen["saved"] = await tab.evaluate(saved)
        return seen, tab.faults()


@page_modes("classic")
def test_two_pictures_under_the_mouse(driver, address, vue):
    seen, errors = asyncio.run(_walk(driver, address, vue))
    assert not errors and seen["ours"] == (0 if vue else 1)
    assert len(seen["saved"]) <= 1, "nothing of ours is saved"
    if not vue:
        shares = [float(clip.split()[1].rstrip("%")) for clip in seen["clips"]]
        assert shares == pytest.approx([75, 25], abs=1) and seen["height"] >= 200
