"""Pages that ComfyUI opens for us are in a sandbox: a file that somebody put into the output folder runs nothing."""

import asyncio
import base64
import io
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from PIL import Image
from vitrine_tests.comfy.conftest import BY_DEFAULT, ROOT

WEB = ROOT / "nodes" / "web"
OPENED = {"report.js": "the LoRA report"}
"""Script -> the page that it opens. Copy Check's page and the others are opened from their folder, outside ComfyUI."""


@pytest.mark.parametrize("script", sorted(p.name for p in WEB.glob("*.js")))
def test_every_page_that_is_opened_is_sandboxed(script):
    """A script that opens a tab, a frame or a page of its own is listed above, and shows it in a sandbox."""
    text = (WEB / script).read_text(encoding="utf-8")
    opens = re.search(r"window\.open|createElement\(\"iframe\"\)|srcdoc|createObjectURL|document\.write", text)
    assert bool(opens) == (script in OPENED)
    if opens:
        assert 'setAttribute("sandbox", "")' in text and "default-src 'none'" in text
        assert "createObjectURL" not in text and "allow-scripts" not in text


LINK, BUTTON = (100, 150), (100, 250)
BLUE, GREEN = (0, 0, 255), (0, 255, 0)
"""Where the page below is clicked; what was clicked turns green, without a script."""
HOSTILE = """<!doctype html><title>report</title>
<style>a, button { position: absolute; left: 0; width: 200px; height: 60px; background: #00f }
:focus { background: #0f0; outline: 0; border: 0 }</style><base href="SERVER/">
<script>new Image().src = 'SERVER/script'; localStorage.setItem('WHO', 'reached'); document.title = 'reached'
try { opener.reached.push('WHO') } catch (e) {} try { top.opener.reached.push('WHO') } catch (e) {}
</script><img src="SERVER/picture"><img src="data:," onerror="new Image().src = 'SERVER/onerror'">
<svg onload="new Image().src = 'SERVER/onload'"></svg><link rel="stylesheet" href="SERVER/style">
<iframe src="SERVER/frame"></iframe><object data="SERVER/object"></object>
<iframe srcdoc="&lt;script&gt;new Image().src = 'SERVER/nested'&lt;/script&gt;"></iframe>
<a style="top: 120px" href="javascript:void(new Image().src = 'SERVER/link')">link</a>
<form action="SERVER/form" target="_blank"><button style="top: 220px">form</button></form>"""
REFRESHED = (
    '<!doctype html><meta http-equiv="refresh" content="0;url=SERVER/refresh"><style>html { background: #0f0 }</style>'
)
TRIES = {"script", "picture", "onerror", "onload", "style", "frame", "object", "nested", "link", "form", "refresh"}
OPEN = """(() => {
    window.tabs = []; window.asked = []; window.reached = []
    const open = window.open, fetched = window.fetch
    window.open = (...args) => { tabs.push(open(...args)); return tabs.at(-1) }
    window.fetch = (...args) => { asked.push(String(args[0]?.url ?? args[0])); return fetched(...args) }
    window.node = add('VitrineLoRAReport', 300, 100)
    window.name_it = name => { node.widgets.find(w => w.name === 'name').value = name }
})()"""
PLACE = """(() => {
    const b = node.widgets.find(w => w.type === 'button' && w.name !== 'advanced')
    const r = app.canvas.canvas.getBoundingClientRect()
    return [r.x + node.pos[0] + node.size[0] / 2, r.y + node.pos[1] + b.last_y + 10]
})()"""


def written(text, server, who):
    return text.replace("SERVER", f"{server}/{who}").replace("WHO", who)


class Listener(ThreadingHTTPServer):
    """What it is asked for, as who/what."""

    def __init__(self):
        self.asked = asked = set()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                asked.add(self.path.strip("/").partition("?")[0])
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args):
                """Not into the tests' output."""

        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *args):
        self.shutdown()
        self.server_close()


async def seen(driver, tab, place, wanted):
    """Wait for a colour on a page."""
    async for _ in driver.polls(f"{wanted} at {place} of a page"):
        shot = await tab.send("Page.captureScreenshot", format="png")
        if Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB").getpixel(place) == wanted:
            return


async def clicked(driver, tab):
    """Click the link of a page, see that it was, and click the button, which may open a tab before this one."""
    await seen(driver, tab, LINK, BLUE)
    await tab.click(*LINK)
    await seen(driver, tab, LINK, GREEN)
    await tab.click(*BUTTON)


async def tried(driver, address, listener):
    """Open the two reports with our button, then the same files as a page that nobody sandboxed."""
    async with driver.page(f"{address}/?{BY_DEFAULT}", alone=True) as tab:
        await tab.build(OPEN)
        for name in ("../evil", "..", ".hidden", "a/b", "a\\b", ""):
            await tab.evaluate(f"name_it({json.dumps(name)}); press(node)")
        await tab.settle()
        asked = await tab.evaluate("[tabs.length, asked.filter(a => a.includes('report.html'))]")
        assert asked == [0, []], "names that are no plain names open nothing, and ask for nothing"
        place = await tab.evaluate(PLACE)
        for number, (name, act) in enumerate((("mine", clicked), ("refreshed", None))):
            await tab.send("Page.bringToFront")
            await tab.evaluate(f"name_it('{name}')")
            await tab.click(*place)
            await tab.wait_for(f"tabs[{number}]?.document.querySelector('iframe')")
            if act:
                async with tab.newest_tab() as opened:
                    await act(driver, opened)
        title = await tab.evaluate("tabs[0].document.title")
        for text, act in ((HOSTILE, clicked), (REFRESHED, None)):
            page = json.dumps(written(text, listener.address, "control"))
            script = f"open(URL.createObjectURL(new Blob([{page}], {{ type: 'text/html' }})))"
            await tab.send("Runtime.evaluate", expression=script, userGesture=True)
            if act:
                async with tab.newest_tab() as opened:
                    await act(driver, opened)
        async for _ in driver.polls("all that the page tries where nothing stops it"):
            if {f"control/{what}" for what in TRIES} <= listener.asked:
                break
        kept = "['control', 'ours'].map(who => localStorage.getItem(who))"
        return title, await tab.evaluate(f"[...reached, ...{kept}]")


def test_a_report_of_somebody_else_runs_nothing(driver, address, page_base):
    with Listener() as listener:
        for name, text in (("mine", HOSTILE), ("refreshed", REFRESHED), ("evil", HOSTILE)):
            folder = page_base / "output" / "vitrine_lora_report" / name
            folder.mkdir(parents=True)
            (folder / "report.html").write_text(written(text, listener.address, "ours"))
        title, reached = asyncio.run(tried(driver, address, listener))
        asked = listener.asked
    assert reached == ["control", "control", "reached", None], "what it does to ComfyUI's page, and ours does not"
    assert {what for what in asked if what.startswith("ours")} == set()
    assert title == "LoRA report"
