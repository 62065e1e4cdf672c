"""The curve drawn below Size Weight Schedule in ComfyUI's real page, classic and Nodes 2.0."""

import asyncio

from vitrine_tests.lanes import page_modes

BUILD = """(async () => {
    const n = add('VitrineApplyGammaSchedule', 300, 40)
    window.curve = n
    press(n)
})()"""
TEXT = "app.graph._nodes[0].widgets.find(w => w.name === 'points').value"
OPEN = "document.querySelector('canvas.vitrine-curve')?.getBoundingClientRect().height > 150"
EDGE, LEFT, LOW = 14, 30, 42
"""Pixels round the curve's field; the scales stand left and below."""


async def _drag(tab, *points, button="left"):
    """Real mouse events at (progress, weight)."""
    left, top, width, height = await tab.box("canvas.vitrine-curve")
    width, height = width - LEFT - EDGE, height - EDGE - LOW
    await tab.drag([(left + LEFT + x * width, top + EDGE + (1 - y) * height) for x, y in points], button)


async def _walk(driver, address, vue):
    async with driver.page(address) as tab:
        await tab.build(BUILD, vue)
        await tab.wait_for(OPEN)
        seen = [await tab.evaluate(TEXT)]
        for gesture in (((0.2, 0.1),), ((0.8, 0.9),), ((0.8, 0.9), (0.7, 0.6), (0.6, 0.5)), ((0.4, 0.3),)):
            await _drag(tab, *gesture)
            seen.append(await tab.evaluate(TEXT))
        await _drag(tab, (0.4, 0.3), button="right")
        seen.append(await tab.evaluate(TEXT))
        await tab.reload()
        await tab.wait_for(OPEN)
        seen.append(await tab.evaluate(TEXT))
        return seen, tab.faults()


@page_modes("Nodes 2.0")
def test_a_curve_is_clicked_dragged_cleared_and_saved(driver, address, vue):
    from vitrine.engine.control import DRAWN, GammaConfig

    (start, *texts), faults = asyncio.run(_walk(driver, address, vue))
    expected = [[(0.2, 0.1)], [(0.2, 0.1), (0.8, 0.9)], [(0.2, 0.1), (0.6, 0.5)]]
    expected += [[(0.2, 0.1), (0.4, 0.3), (0.6, 0.5)], expected[-1]]
    assert start == "" and not faults and texts[-1] == texts[-2], "kept in the saved graph"
    for text, points in zip(texts, expected, strict=False):
        found = [tuple(map(float, part.split(":"))) for part in text.split(", ")]
        assert len(found) == len(points), text
        assert all(abs(a - b) < 0.02 for p, q in zip(found, points, strict=True) for a, b in zip(p, q, strict=True))
        assert GammaConfig(DRAWN, points=text).number(1000.0) == found[0][1], "what the page writes is read"
