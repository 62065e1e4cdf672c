"""Real ComfyUI in this process: its node loader, its validator, its executor. Skips plainly where there is none."""

import asyncio
import importlib.util
import os
import re
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[2]
COMFYUI = Path(os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI")).expanduser()


def _beside(name):
    spec = importlib.util.spec_from_file_location(f"vitrine_comfy_{name}", Path(__file__).parent / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Server:
    """What the executor tells the page; here it is only remembered."""

    def __init__(self):
        self.client_id, self.last_node_id, self.events = None, None, []
        self.prompt_queue = SimpleNamespace(currently_running={})

    def send_sync(self, event, data, sid=None):
        self.events.append((event, data))


class Comfy:
    """Runs API-format graphs and keeps what chosen nodes return."""

    def __init__(self, folder):
        import execution
        import folder_paths
        import server

        import nodes

        folder_paths.set_output_directory(str(folder / "output"))
        folder_paths.set_temp_directory(str(folder / "temp"))
        for kind in ("w2w", "vitrine_neurons", "vitrine_presets", "vitrine_w2w", "loras"):  # not into the checkout
            folder_paths.add_model_folder_path(kind, str(folder / "models" / kind), is_default=True)
        self.execution, self.nodes, self.server = execution, nodes, _Server()
        server.PromptServer.instance = self.server
        self.loop = asyncio.new_event_loop()
        pack = folder / "custom_nodes" / "A-Vitrine-Pack"
        pack.parent.mkdir(parents=True)
        pack.symlink_to(ROOT)
        assert self.loop.run_until_complete(nodes.load_custom_node(str(pack)))
        for extra in (
            "nodes_preview_any",
            "nodes_custom_sampler",
            "nodes_image_compare",
            "nodes_mask",
        ):  # shipped workflows use them
            core = str(COMFYUI / "comfy_extras" / f"{extra}.py")
            assert self.loop.run_until_complete(nodes.load_custom_node(core, module_parent="comfy_extras"))

    def executor(self):
        """What the server has one of: it keeps nodes' outputs from one run to the next."""
        cache = {"cache_type": self.execution.CacheType.CLASSIC, "cache_args": {"ram": 0, "ram_inactive": 0, "lru": 0}}
        return self.execution.PromptExecutor(self.server, **cache)

    def run(self, graph, executor=None, about=None):
        """Validate and execute; returns (history result, error message or None).

        Args:
            about: what the page says of the run, such as ``client_id`` and the workflow in ``extra_pnginfo``.
        """
        name = str(uuid.uuid4())
        validate = self.execution.validate_prompt(name, graph, None)
        ok, error, outputs, node_errors = self.loop.run_until_complete(validate)
        if not ok:
            return None, f"{error} {node_errors}"
        executor = executor or self.executor()
        self.loop.run_until_complete(executor.execute_async(graph, name, about or {}, outputs))
        failed = next((m for e, m in executor.status_messages if e == "execution_error"), None)
        return executor.history_result, None if executor.success else str(failed)

    def call(self, node_id, **inputs):
        """Execute one node class as the executor does, in inference mode; returns its outputs."""
        node = self.nodes.NODE_CLASS_MAPPINGS[node_id]
        with torch.inference_mode():
            return node.execute(**with_choices(node, inputs)).result


def with_choices(node, inputs):
    """The inputs, with those that stand below a choice in its dictionary, as the executor hands them on."""
    schema = node.define_schema() if hasattr(node, "define_schema") else None
    nested = dict(inputs)
    for entry in schema.inputs if schema else ():
        if entry.io_type != "COMFY_DYNAMICCOMBO_V3":
            continue
        key = nested.get(entry.id, entry.options[0].key)
        if isinstance(key, dict):
            continue
        below = {i.id: nested.pop(i.id, i.default) for option in entry.options for i in option.inputs}
        chosen = next((option.inputs for option in entry.options if option.key == key), ())
        nested[entry.id] = {entry.id: key, **{i.id: below[i.id] for i in chosen}}
    return nested


MODULES = {"pyyaml": "yaml", "pillow": "PIL"}
"""Requirements of ComfyUI that are imported by another name."""
STAND_INS = ("torchvision", "torchaudio")
"""ComfyUI starts without these in launch.py."""


def why_not(folder=COMFYUI):
    """Why ComfyUI cannot run here, in a sentence; None where it can."""
    if not (folder / "main.py").is_file():
        return f"no ComfyUI checkout in {folder}: set COMFYUI_PATH"
    needed = (folder / "requirements.txt").read_text(encoding="utf-8").partition("#non essential")[0]
    names = [re.match(r"[\w-]+", line)[0].lower() for line in needed.splitlines() if line.strip()]
    lacking = [name for name in names if name not in STAND_INS and not _importable(name)]
    if lacking:
        return f"ComfyUI's requirements are not installed: {', '.join(lacking)} of {folder / 'requirements.txt'}"
    return None


def _importable(name):
    try:
        return importlib.util.find_spec(MODULES.get(name, name.replace("-", "_"))) is not None
    except ImportError:
        return False


@pytest.fixture(scope="session")
def comfyui():
    """The checkout's folder; skips with the reason where ComfyUI cannot run."""
    if reason := why_not():
        pytest.skip(reason)
    return COMFYUI


@pytest.fixture(scope="session")
def comfy(comfyui, tmp_path_factory):
    """A started ComfyUI with this pack loaded by its own loader."""
    # These ask at import whether torchvision is there; they must not be answered by a stand-in.
    from diffusers import AutoencoderKL, StableDiffusionPipeline  # noqa: F401

    _beside("launch").install_stand_ins()
    sys.path.insert(0, str(comfyui))
    import comfy.cli_args

    comfy.cli_args.args.cpu = not torch.cuda.is_available()
    comfy.cli_args.args.use_pytorch_cross_attention = True  # as on a GPU; test_page runs with the CPU's default
    import nodes  # noqa: F401

    return Comfy(tmp_path_factory.mktemp("comfy"))


@pytest.fixture(scope="session")
def beside():
    """Imports a file of this folder that is no test, by its name."""
    return _beside


@pytest.fixture(scope="session")
def driver(comfyui):
    """page.py: servers of their own processes, and tabs on them."""
    found = _beside("page")
    if found.CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    return found


@pytest.fixture(scope="session")
def page_base(tmp_path_factory):
    """The folder of the server that tests of the page share."""
    return tmp_path_factory.mktemp("page") / "base"


BY_DEFAULT = "as_by_default"
BROKEN = "/extensions/vitrine-pack/broken.js"
OF_THE_TESTS = f"""from pathlib import Path

from aiohttp import web
from server import PromptServer


async def without_policy(request, response):
    if "{BY_DEFAULT}" in request.query:
        response.headers.pop("Content-Security-Policy", None)


@PromptServer.instance.routes.get("{BROKEN}")
async def broken(request):
    return web.FileResponse(Path(__file__).parents[1] / "broken.js")


PromptServer.instance.app.on_response_prepare.append(without_policy)
NODE_CLASS_MAPPINGS = {{}}
"""
"""Behind the first query the page has no policy of its own, which --disable-api-nodes gives it. At the second address,
one of our scripts', is what a test writes there."""


@pytest.fixture(scope="session")
def address(driver, page_base):
    """Of that server. What a test leaves behind must not disturb the next."""
    (page_base / "custom_nodes").mkdir(parents=True)
    (page_base / "custom_nodes" / "of_the_tests.py").write_text(OF_THE_TESTS, encoding="utf-8")
    with driver.server(COMFYUI, ROOT, page_base) as found:
        yield found
