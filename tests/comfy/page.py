"""ComfyUI's real page in headless Chromium, over the DevTools protocol; used by test_page.py."""

import asyncio
import base64
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from pathlib import Path

CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
QUIET = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-unsafe-swiftshader", "--disable-quic",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=2100,1200",
]  # fmt: skip


HANGS = 1200
"""Seconds after which a state will not come any more: no bound on how fast a machine is, but an end for what hangs."""

VISITED = {"Comfy.TutorialCompleted": True}
"""Settings of a user who came before: on a first visit the page lays its templates over the graph, seconds late on a
busy machine, and they take every click."""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def server(comfyui, pack, base, flags=(), user=None):
    """ComfyUI with only this pack, in a folder of ours, with these settings of the user's; yields its address."""
    (base / "custom_nodes").mkdir(parents=True)
    settings = base / "user" / "default" / "comfy.settings.json"
    settings.parent.mkdir(parents=True)
    own = {"Comfy.InstalledVersion": version("comfyui-frontend-package")}  # whose defaults a new installation has
    settings.write_text(json.dumps(VISITED | own | (user or {})))
    (base / "custom_nodes" / "vitrine-pack").symlink_to(pack)
    port = free_port()
    command = [
        sys.executable, str(Path(__file__).parent / "launch.py"), str(comfyui), "--cpu", "--port", str(port),
        "--base-directory", str(base), "--disable-api-nodes", "--database-url", "sqlite:///:memory:", *flags,
    ]  # fmt: skip
    log = (base / "server.log").open("w")
    environment = os.environ | {"PYTHONPATH": ""}
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=base, env=environment)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(2 * HANGS):
            if process.poll() is not None:
                raise RuntimeError((base / "server.log").read_text()[-3000:])
            try:
                urllib.request.urlopen(f"{address}/system_stats", timeout=60).close()
                break
            except urllib.error.URLError:
                time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait(HANGS)
        log.close()


OURS = re.compile(r"/extensions/vitrine-pack/|extension 'vitrine\.|^security: (?!.*/assets/)")
"""Our scripts' address as :func:`server` links the pack; their extensions' names; what the policy blocked, but for the
page's own scripts, which look for models elsewhere."""


def complaints(message):
    """The error in a DevTools message, if it is one, with the addresses of the scripts it came from."""
    said, kind = message.get("params", {}), message.get("method")
    if kind == "Runtime.exceptionThrown":
        found = said["exceptionDetails"]
        words = found.get("exception", {}).get("description") or found["text"]
    elif kind == "Log.entryAdded" and said["entry"]["level"] == "error":
        found = said["entry"]
        if found["source"] == "network" and not found.get("url", "").endswith(".js"):
            return []  # such as a route that does not know a node before its first run
        words = f"{found['source']}: {found['text']}"
    elif kind == "Runtime.consoleAPICalled" and said["type"] == "error":
        found = said
        words = " ".join(str(a.get("preview") or a.get("description") or a.get("value")) for a in said["args"])
    else:
        return []
    frames = [f["url"] for f in found.get("stackTrace", {}).get("callFrames", [])]
    return [" ".join([words, found.get("url", ""), *dict.fromkeys(frames)])]


STILL = """(async () => {
    const frame = () => new Promise(requestAnimationFrame)
    const box = () => {
        const r = document.querySelector(%s).getBoundingClientRect()
        return [r.x, r.y, r.width, r.height]
    }
    let last = box()
    for (let still = 0, frames = 0; still < 10 && frames < 600; frames++) {
        await frame()
        const now = box()
        still = String(now) === String(last) ? still + 1 : 0
        last = now
    }
    return last
})()"""


READY = (
    "window.app.graph && Object.keys(LiteGraph.registered_node_types).length > 100"
    " && app.graph._nodes.length && app.extensionManager?.workflow?.activeWorkflow"
)
"""Until the page has put its first graph there; loaded later it would take the place of a test's own."""


class Page:
    """One open tab."""

    def __init__(self, socket_):
        self.socket, self.number, self.console = socket_, 0, []

    async def send(self, method, **params):
        self.number += 1
        await self.socket.send_json({"id": self.number, "method": method, "params": params})
        while True:
            message = json.loads((await self.socket.receive(timeout=HANGS)).data)
            self.console += complaints(message)
            if message.get("id") == self.number:
                return message.get("result", message)

    def faults(self):
        """What went wrong in this pack's scripts: errors, also those the page caught, and breaches of its policy."""
        return [c for c in self.console if OURS.search(c)]

    async def evaluate(self, expression):
        """The JSON value of a JavaScript expression; promises are awaited."""
        answer = await self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    async def wait_for(self, expression, seconds=HANGS):
        """Poll until the expression is true."""
        for _ in range(int(seconds * 2)):
            if await self.evaluate(f"(() => {{ try {{ return !!({expression}) }} catch (e) {{ return false }} }})()"):
                return
            await asyncio.sleep(0.5)
        raise TimeoutError(expression)

    async def box(self, selector):
        """x, y, width and height of an element in the window, once it has stood still for ten frames."""
        return await self.evaluate(STILL % json.dumps(selector))

    async def drag(self, places, button="left", modifiers=0, clicks=1):
        """Press at the first of the (x, y) places in the window, move over the others, let go at the last."""
        held = {"button": button, "modifiers": modifiers}
        steps = [("mouseMoved", places[0], {}), ("mousePressed", places[0], held | {"clickCount": clicks})]
        steps += [("mouseMoved", place, held) for place in places[1:]]
        steps += [("mouseReleased", places[-1], held | {"clickCount": clicks})]
        for kind, (x, y), more in steps:
            await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, pointerType="mouse", **more)
        await self.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 300)))")

    async def run(self, address, queue="app.queuePrompt(0)", seconds=HANGS):
        """Queue what is open and wait; the run's entry in the server's history, whether it succeeded or not."""
        import aiohttp

        async with aiohttp.ClientSession() as session:
            await session.post(f"{address}/history", json={"clear": True})
            await self.evaluate(queue)
            for _ in range(2 * seconds):
                async with session.get(f"{address}/history") as answer:
                    entries = list((await answer.json()).values())
                if entries and (entries[0]["status"]["completed"] or entries[0]["status"]["status_str"] == "error"):
                    return entries[0]
                await asyncio.sleep(0.5)
        raise TimeoutError("the run")

    async def press(self, key, code):
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            await self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    async def screenshot(self, path):
        answer = await self.send("Page.captureScreenshot", format="png")
        Path(path).write_bytes(base64.b64decode(answer["data"]))


@asynccontextmanager
async def page(address):
    """A tab on ``address`` with the graph editor ready."""
    import aiohttp

    port, profile = free_port(), tempfile.mkdtemp(prefix="vitrine-chromium-")
    own = [f"--remote-debugging-port={port}", "--remote-allow-origins=*", f"--user-data-dir={profile}"]
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    browser = subprocess.Popen([CHROMIUM, *QUIET, *own, "about:blank"], **nowhere)
    try:
        async with aiohttp.ClientSession() as session:
            tabs = []
            for _ in range(2 * HANGS):
                try:
                    async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                        tabs = [t for t in await answer.json(content_type=None) if t["type"] == "page"]
                        break
                except aiohttp.ClientConnectorError:
                    await asyncio.sleep(0.5)
            async with session.ws_connect(tabs[0]["webSocketDebuggerUrl"], max_msg_size=0) as connection:
                tab = Page(connection)
                await tab.send("Page.enable")
                await tab.send("Runtime.enable")
                await tab.send("Log.enable")
                await tab.send("Page.navigate", url=address)
                await tab.wait_for(READY)
                yield tab
    finally:
        browser.terminate()
        browser.wait(HANGS)
        shutil.rmtree(profile, ignore_errors=True)


def results(rows, path, side=112, wide=1000):
    """Write (title, PNG bytes of a batch) rows as one picture: what a workflow shows, large enough to see.

    Returns [title, boxes of its pictures on the sheet] of each row, as docs/sheets.py reads them.
    """
    import io

    from PIL import Image, ImageDraw

    sheet, x, y, low = Image.new("RGB", (wide, 8000), "white"), 8, 8, 0
    draw, places = ImageDraw.Draw(sheet), []
    for title, pictures in rows:
        opened = [Image.open(io.BytesIO(p)).convert("RGB") for p in pictures]
        scale = min(side / opened[0].height, 3 * side / opened[0].width)
        opened = [i.resize((round(i.width * scale), round(i.height * scale)), Image.Resampling.LANCZOS) for i in opened]
        width = sum(i.width + 3 for i in opened)
        if x > 8 and x + width > wide:
            x, y = 8, low + 12
        draw.text((x, y), title, "black", font_size=13)
        places.append([title, []])
        for image in opened:
            if x + image.width > wide:
                x, y, width = 8, low - 12, wide  # what follows a batch of several lines begins a line
            sheet.paste(image, (x, y + 18))
            places[-1][1].append([x, y + 18, *image.size])
            x, low = x + image.width + 3, max(low, y + 18 + image.height)
        x = wide if width == wide else x + 16
    sheet.crop((0, 0, wide, low + 8)).save(path, quality=88)
    return places
