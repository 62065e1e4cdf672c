"""ComfyUI's real page in headless Chromium, over the DevTools protocol.

Tests wait for states, never for a number of seconds: :meth:`Page.wait_for` an expression, :meth:`Page.hear` words on
the console, else :meth:`Page.settle`.
"""

import asyncio
import base64
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from vitrine_tests.comfy.page_version import page_to_test
from vitrine_tests.hangs import HANGS

CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
QUIET = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--enable-unsafe-swiftshader",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=2100,1200",
]


VISITED = {"Comfy.TutorialCompleted": True}
"""Settings of a user who came before: on a first visit the page lays its templates over the graph, seconds late on a
busy machine, and they take every click."""


async def polls(what):
    """Comes back twenty times a second; after HANGS, TimeoutError with what was waited for."""
    for _ in range(20 * HANGS):
        yield
        await asyncio.sleep(0.05)
    raise TimeoutError(what)


@contextmanager
def free_port():
    """A port that no other process is given meanwhile, though a server that is told it may listen there."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", 0))
        yield s.getsockname()[1]


@contextmanager
def server(comfyui, pack, base, flags=()):
    """ComfyUI with only this pack, in a folder of ours; yields its address."""
    (base / "custom_nodes").mkdir(parents=True, exist_ok=True)
    settings = base / "user" / "default" / "comfy.settings.json"
    settings.parent.mkdir(parents=True)
    shown, served = page_to_test()
    own = {"Comfy.InstalledVersion": shown}  # whose defaults a new installation has
    settings.write_text(json.dumps(VISITED | own))
    (base / "custom_nodes" / "vitrine-pack").symlink_to(pack)
    with free_port() as port, (base / "server.log").open("w") as log:
        command = [
            sys.executable, str(Path(__file__).parent / "launch.py"), str(comfyui), "--cpu", "--port", str(port),
            "--base-directory", str(base), "--disable-api-nodes", "--database-url", "sqlite:///:memory:",
            *served, *flags,
        ]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": ""}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=base, env=environment)
        try:
            _answers(process, f"http://127.0.0.1:{port}", base / "server.log")
            yield f"http://127.0.0.1:{port}"
        finally:
            Browser.close_idle(f"http://127.0.0.1:{port}")
            process.terminate()
            process.wait(HANGS)


def _answers(process, address, log):
    """Waits until the server answers."""
    for _ in range(10 * HANGS):
        if process.poll() is not None:
            raise RuntimeError(log.read_text()[-3000:])
        with suppress(urllib.error.URLError):
            urllib.request.urlopen(f"{address}/system_stats", timeout=HANGS).close()
            return
        time.sleep(0.1)
    raise TimeoutError(log.read_text()[-3000:])


OURS = re.compile(r"/extensions/vitrine-pack/|extension 'vitrine\.|^security: (?!.*/assets/)")
"""Our scripts' address as :func:`server` links the pack; their extensions' names; what the policy blocked, but for the
page's own scripts, which look for models elsewhere."""


def complaints(message):
    """The error or deprecation in a DevTools message, if it is one, with the addresses of the scripts it came from."""
    said, kind = message.get("params", {}), message.get("method")
    if kind == "Runtime.exceptionThrown":
        found = said["exceptionDetails"]
        words = found.get("exception", {}).get("description") or found["text"]
    elif kind == "Log.entryAdded" and said["entry"]["level"] == "error":
        found = said["entry"]
        if found["source"] == "network" and not found.get("url", "").endswith(".js"):
            return []  # such as a route that does not know a node before its first run
        words = f"{found['source']}: {found['text']}"
    elif kind == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning"):
        found = said
        words = " ".join(str(a.get("preview") or a.get("description") or a.get("value")) for a in said["args"])
        if said["type"] == "warning" and "deprecated" not in words:
            return []
    else:
        return []
    frames = [f["url"] for f in found.get("stackTrace", {}).get("callFrames", [])]
    return [" ".join([words, found.get("url", ""), *dict.fromkeys(frames)])]


SOON = 340
"""Milliseconds: shorter timers of the page are waited for, such as those after which it looks again at what changed."""

WATCH = """(() => {
    const pending = window.vitrinePending = new Set()
    const { fetch, setTimeout, clearTimeout } = window, timers = new Map()
    const still = new CSSStyleSheet()
    still.replaceSync('*, *::before, *::after { transition: none !important; animation: none !important }')
    document.adoptedStyleSheets.push(still)
    window.fetch = async (...asked) => {
        const key = `fetch ${asked[0]?.url ?? asked[0]}`
        pending.add(key)
        try { const answer = await fetch(...asked); await answer.clone().arrayBuffer(); return answer }
        finally { pending.delete(key) }
    }
    window.setTimeout = (act, after, ...more) => {
        const ours = new Error().stack.split('\\n')[2]?.includes('/vitrine-pack/')
        if (typeof act !== 'function' || !(ours || after <= SOON)) return setTimeout(act, after, ...more)
        const key = { toString: () => `timer ${act}` }
        pending.add(key)
        const timer = setTimeout(() => { pending.delete(key); act(...more) }, after)
        timers.set(timer, key)
        return timer
    }
    window.clearTimeout = timer => { pending.delete(timers.get(timer)); clearTimeout(timer) }
})()""".replace("SOON", str(SOON))
"""Notes in ``vitrinePending`` the requests that have not been answered, our scripts' timers and the page's short ones.
What is not ours to wait for: a tooltip, and the page's own copy of the workflow, both half a second later. Nothing
fades or slides, so that a panel is there or is not."""

SETTLED = """(async () => {
    const began = performance.now(), changes = []
    const watch = new MutationObserver(found => changes.push(...found))
    watch.observe(document, { subtree: true, childList: true, attributes: true, characterData: true })
    const boxes = () => JSON.stringify((window.app?.graph?._nodes ?? []).map(
        n => [n.id, ...n.pos, ...n.size, (n.imgs ?? []).every(i => i.complete)]))
    const loading = () => [...document.images].filter(i => !i.complete && i.loading !== 'lazy').map(i => i.src)
    let last = boxes(), moves = []
    for (let still = 0; still < FRAMES;) {
        await new Promise(requestAnimationFrame)
        const now = boxes()
        const found = [...changes.splice(0).map(c => `${c.type} ${c.attributeName} of ${c.target.nodeName} `
            + `${c.target.className ?? ''}`), ...loading(), ...window.vitrinePending, ...(now === last ? [] : [now])]
        still = found.length ? 0 : still + 1
        if (found.length) moves = found
        last = now
        if (performance.now() - began > 1000 * HANGS) throw new Error(`never still: ${moves.slice(0, 9).join(' | ')}`)
    }
    watch.disconnect()
})()"""

ENDED = """(async () => {
    const { api } = await import('/scripts/api.js')
    window.vitrineEnded = false
    for (const how of ['success', 'error', 'interrupted'])
        api.addEventListener(`execution_${how}`, () => { window.vitrineEnded = true }, { once: true })
})()"""
"""Sets ``vitrineEnded`` once the page has been told the end of a run; all that its nodes showed was told before."""

RELOAD = """(async () => {
    const saved = JSON.parse(JSON.stringify(app.graph.serialize()))
    await app.extensionManager.command.execute('Comfy.NewBlankWorkflow')
    await app.loadGraphData(saved)
})()"""

TOOLS = """Object.assign(window, {
    add: (type, x, y, values = {}) => {
        const n = LiteGraph.createNode(type)
        n.pos = [x, y]
        app.graph.add(n)
        for (const [name, value] of Object.entries({ control_after_generate: 'fixed', ...values })) {
            const w = n.widgets?.find(w => w.name === name)
            if (w) w.value = value
            else if (name in values) throw new Error(`${type} has no input ${name}`)
        }
        return n
    },
    join: (from, slot, to, name) => from.connect(slot, to, to.inputs.findIndex(i => i.name === name)),
    kind: name => app.graph._nodes.find(n => n.comfyClass === name),
    press: n => {
        const b = n.widgets.find(w => w.type === 'button' && w.name !== 'advanced')
        b.callback(b.value, app.canvas, n)
    },
})"""
"""What scripts of the tests call: a new node with values of its widgets, a link to an input by its name, the node of a
class, and the button that opens a node's panel."""

READY = (
    "window.app.graph && Object.keys(LiteGraph.registered_node_types).length > 100"
    " && app.graph._nodes.length && app.extensionManager?.workflow?.activeWorkflow"
)
"""Until the page has put its first graph there; loaded later it would take the place of a test's own."""
OWN = "import('/scripts/api.js').then(({ api }) => [window.fetch, window.open, api.fetchApi])"
"""What a page asks its server by, and opens others with."""


class Page:
    """One open tab.

    Attributes:
        browser: address of the browser's list of tabs.
    """

    def __init__(self, socket_, browser=""):
        self.socket, self.browser, self.number, self.console = socket_, browser, 0, []

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

    async def load(self, address, before=""):
        """Open the page for the first time, after a script that runs before any of its own."""
        for domain in ("Page", "Runtime", "Log"):
            await self.send(f"{domain}.enable")
        await self.send("Page.addScriptToEvaluateOnNewDocument", source=f"{WATCH}; {before}")
        await self.send("Page.navigate", url=address)
        await self.wait_for(READY)
        await self.evaluate(f"{OWN}.then(own => {{ window.vitrineOwn = own }})")

    async def untouched(self):
        """Whether the page asks its server by its own functions, which a test may have replaced by others."""
        return await self.evaluate(f"{OWN}.then(own => own.every((f, i) => f === vitrineOwn[i]))")

    async def clear(self):
        """Leave nothing for the next test."""
        await self.send("Input.dispatchMouseEvent", type="mouseMoved", x=0, y=0)
        await self.command("NewBlankWorkflow")
        await self.send("Runtime.discardConsoleEntries")
        await self.send("Log.clear")

    async def go_on(self):
        """Go on where another test ended."""
        for domain in ("Page", "Runtime", "Log"):
            await self.send(f"{domain}.enable")
        await self.settle()

    async def evaluate(self, expression):
        """The JSON value of a JavaScript expression; promises are awaited."""
        answer = await self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    async def wait_for(self, expression):
        """Poll until the expression is true."""
        async for _ in polls(expression):
            if await self.evaluate(f"(() => {{ try {{ return !!({expression}) }} catch (e) {{ return false }} }})()"):
                return

    async def hear(self, words):
        """Wait until the page's console has said these words."""
        async for _ in polls(f"{words} on the console"):
            await self.evaluate("1")  # what the console said comes before the answer
            if any(words in said for said in self.console):
                return

    async def settle(self, frames=5):
        """Wait until in so many frames one after the other nothing has changed or is under way.

        That is: elements, the boxes of nodes, pictures that load, and what ``WATCH`` notes.
        """
        await self.evaluate(SETTLED.replace("FRAMES", str(frames)).replace("HANGS", str(HANGS)))

    async def build(self, script, vue=False):
        """Make a graph by a script in a new workflow, in the classic page or Nodes 2.0; shown unscaled from (0, 0)."""
        await self.evaluate(f"app.extensionManager.setting.set('Comfy.VueNodes.Enabled', {str(vue).lower()})")
        await self.evaluate("app.extensionManager.command.execute('Comfy.NewBlankWorkflow')")
        await self.evaluate(f"{TOOLS}; null")
        await self.evaluate(script)
        await self.settle()
        await self.evaluate(
            "(() => { app.canvas.ds.scale = 1; app.canvas.ds.offset = [0, 0]; app.canvas.setDirty(true, true) })()"
        )
        await self.settle()

    async def reload(self):
        """Save what is open and open it anew, as a user does who comes back."""
        await self.evaluate(RELOAD)
        await self.settle()

    async def command(self, name):
        """One of the page's own commands, such as Undo."""
        await self.evaluate(f"app.extensionManager.command.execute('Comfy.{name}')")
        await self.settle()

    async def box(self, selector):
        """x, y, width and height of an element in the window, once it is there and nothing moves."""
        element = f"document.querySelector({json.dumps(selector)})"
        await self.wait_for(element)
        await self.settle()
        found = f"{element}.getBoundingClientRect()"
        return await self.evaluate(f"(() => {{ const r = {found}; return [r.x, r.y, r.width, r.height] }})()")

    async def drag(self, places, button="left", modifiers=0, clicks=1):
        """Press at the first of the (x, y) places in the window, move over the others, let go at the last."""
        held = {"button": button, "modifiers": modifiers}
        steps = [("mouseMoved", places[0], {}), ("mousePressed", places[0], held | {"clickCount": clicks})]
        steps += [("mouseMoved", place, held) for place in places[1:]]
        steps += [("mouseReleased", places[-1], held | {"clickCount": clicks})]
        for kind, (x, y), more in steps:
            await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, pointerType="mouse", **more)
        await self.settle()

    async def run(self, address, queue="app.queuePrompt(0)"):
        """Queue what is open; the run's entry in the server's history once the page shows it, whether it succeeded."""
        import aiohttp

        await self.evaluate(ENDED)
        async with aiohttp.ClientSession() as session:
            await session.post(f"{address}/history", json={"clear": True})
            if await self.evaluate(queue) is False:
                raise RuntimeError(str(await self.evaluate("JSON.stringify(app.lastNodeErrors)")))
            async for _ in polls("the end of the run"):
                async with session.get(f"{address}/history") as answer:
                    entries = list((await answer.json()).values())
                if entries and (entries[0]["status"]["completed"] or entries[0]["status"]["status_str"] == "error"):
                    break
        await self.wait_for("window.vitrineEnded")
        await self.settle()
        return entries[0]

    async def press(self, key, code, modifiers=0):
        """Press and release a key; modifiers 2 is Ctrl."""
        told = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        for kind in ("rawKeyDown" if modifiers else "keyDown", "keyUp"):
            await self.send("Input.dispatchKeyEvent", type=kind, **told)

    async def click(self, x, y):
        """A real click, after which this tab may be behind another: nothing in it settles then."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    @asynccontextmanager
    async def newest_tab(self):
        """The tab that was opened last."""
        import aiohttp

        async with aiohttp.ClientSession() as session:
            async with session.get(self.browser) as answer:
                first = next(t for t in await answer.json(content_type=None) if t["type"] == "page")
            async with session.ws_connect(first["webSocketDebuggerUrl"], max_msg_size=0) as connection:
                yield Page(connection, self.browser)

    async def screenshot(self, path):
        answer = await self.send("Page.captureScreenshot", format="png")
        Path(path).write_bytes(base64.b64decode(answer["data"]))


class Browser:
    """A Chromium with one tab, which tests on one address use one after the other.

    Attributes:
        address: what the tab shows.
        tabs: address of its list of tabs.
    """

    idle: "list[Browser]" = []

    def __init__(self, address):
        self.address, self.tabs = address, ""
        self.profile = Path(tempfile.mkdtemp(prefix="vitrine-chromium-"))
        own = ["--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={self.profile}"]
        nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        command = [CHROMIUM, *QUIET, *own, "about:blank"]
        self.process = subprocess.Popen(command, **nowhere, start_new_session=True)

    async def tab(self):
        """Where DevTools speak to its tab."""
        import aiohttp

        written = self.profile / "DevToolsActivePort"
        async for _ in polls("a tab of the browser"):
            port = written.read_text().partition("\n")[0] if written.is_file() else ""
            if not port:  # the browser chooses one
                continue
            self.tabs = f"http://127.0.0.1:{port}/json"
            with suppress(aiohttp.ClientError):
                async with aiohttp.ClientSession() as session, session.get(self.tabs) as answer:
                    tabs = [t for t in await answer.json(content_type=None) if t["type"] == "page"]
                if tabs:
                    return tabs[0]["webSocketDebuggerUrl"]

    def rest(self):
        """Stop all its processes: an open page draws though nobody looks."""
        Browser.idle.append(self)
        os.killpg(self.process.pid, signal.SIGSTOP)

    def go_on(self):
        Browser.idle.remove(self)
        os.killpg(self.process.pid, signal.SIGCONT)

    def close(self):
        self.process.terminate()
        self.process.wait(HANGS)
        shutil.rmtree(self.profile, ignore_errors=True)

    @classmethod
    def close_idle(cls, address):
        """Those that nothing will use again once a server has ended."""
        for browser in [b for b in cls.idle if b.address == address]:
            browser.go_on()
            browser.close()


@asynccontextmanager
async def page(address, alone=False, before=""):
    """A tab on ``address`` with the graph editor ready.

    The page takes seconds to load, and what a test leaves there goes with its workflow: so the next test is given the
    same tab. Not where this one failed, or has replaced what the page asks its server by; ``alone`` is for a test that
    changes more, or looks at all open workflows, or has a script ``before`` the page's.
    """
    import aiohttp

    browser = next((b for b in Browser.idle if b.address == address and not alone), None)
    fresh, kept = browser is None, not alone
    if fresh:
        browser = Browser(address)
    else:
        browser.go_on()
    try:
        where = await browser.tab()
        async with aiohttp.ClientSession() as session, session.ws_connect(where, max_msg_size=0) as connection:
            tab = Page(connection, browser.tabs)
            await (tab.load(address, before) if fresh else tab.go_on())
            yield tab
            kept = kept and await tab.untouched()
            if kept:
                await tab.clear()
    except BaseException:
        kept = False
        raise
    finally:
        if kept:
            browser.rest()
        else:
            browser.close()
