"""Tests run against the installed package, or against this folder when nothing is installed.

What test files share is imported as ``vitrine_tests``. No folder of tests goes on the path, where tests/comfy would
stand in for ComfyUI's own ``comfy``.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

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

# No bound on seconds, and the same examples each time, so that lanes A and B pass or fail alike on every machine.
# `pytest --hypothesis-profile nightly` searches anew, and longer.
settings.register_profile(
    "same", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "nightly", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("same")

pytest.register_assert_rewrite("vitrine_tests")
shared = ModuleType("vitrine_tests")
shared.__path__ = [str(HERE)]
sys.modules["vitrine_tests"] = shared


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
