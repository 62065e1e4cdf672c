"""Tests run against the installed package, or against this folder when nothing is installed.

What test files share is imported as ``vitrine_tests``. No folder of tests goes on the path, where tests/comfy would
stand in for ComfyUI's own ``comfy``.
"""

import importlib.util
import os
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
# Read when torch is imported. Where something else has one of two cores, threads that spin while they wait for each
# other make small networks a hundred times slower; what is computed does not change.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes are the parallelism

if importlib.util.find_spec("vitrine") is None:
    root = HERE.parent
    where = {"submodule_search_locations": [str(root)]}
    spec = importlib.util.spec_from_file_location("vitrine", root / "__init__.py", **where)
    sys.modules["vitrine"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["vitrine"])

pytest.register_assert_rewrite("vitrine_tests")
shared = ModuleType("vitrine_tests")
shared.__path__ = [str(HERE)]
sys.modules["vitrine_tests"] = shared


SLOW, SECONDS = HERE / "slow.txt", 2
"""Cases that take this long or longer, one a line; written by ``VITRINE_WRITE_SLOW=1 pytest -n 2 --dist loadfile``."""


def _whole(config):
    """Whether the whole suite runs: no file or folder of it is named."""
    return [Path(arg).name for arg in config.args] == [HERE.name]


def pytest_collection_modifyitems(config, items):
    """Of the whole suite the slow cases wait for VITRINE_SLOW=1; whoever names a file or a folder gets all of it."""
    asked = any(os.environ.get(name) for name in ("VITRINE_SLOW", "VITRINE_WRITE_SLOW"))
    if asked or not _whole(config):
        return
    slow = set(SLOW.read_text(encoding="utf-8").splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in slow])
    items[:] = [item for item in items if item.nodeid not in slow]


def pytest_terminal_summary(terminalreporter, config):
    """Write down which cases are slow; runs of a file, which some tests start, write nothing."""
    if os.environ.get("VITRINE_WRITE_SLOW") and _whole(config):
        seconds = Counter()
        for report in (r for reports in terminalreporter.stats.values() for r in reports if hasattr(r, "duration")):
            seconds[report.nodeid] += report.duration
        slow = sorted(nodeid for nodeid, taken in seconds.items() if taken >= SECONDS)
        SLOW.write_text("".join(f"{nodeid}\n" for nodeid in slow), encoding="utf-8")


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _without_hooks(network):
    for path, module in network.named_modules():
        left = [name for name in (*HOOKS, "forward") if vars(module).get(name)]
        assert not left, f"{path or type(network).__name__} keeps {', '.join(left)}"


@pytest.fixture
def no_hooks_left():
    """Called with networks: no module has a hook, or a ``forward`` of its own, now or when the test has ended."""
    watched = []

    def watch(*networks):
        watched.extend(networks)
        for network in networks:
            _without_hooks(network)

    yield watch
    for network in watched:
        _without_hooks(network)
