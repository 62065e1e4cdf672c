"""Full-size checkpoints: skipped unless ``VITRINE_FULL_SIZE`` asks for them, one model in memory at a time."""

import gc
import os
from pathlib import Path

import pytest
import torch
from vitrine_tests.comfy.conftest import beside, comfy, comfyui  # noqa: F401  fixtures

HERE = Path(__file__).parent
SIDE = int(os.environ.get("VITRINE_FULL_SIZE_SIDE", "96"))
"""Of the pictures, in pixels: the point is the weights."""
ASKED = os.environ.get("VITRINE_FULL_SIZE", "")


def families():
    """``VITRINE_FULL_SIZE=1``: both; or the names of those wanted."""
    return ["sd15", "sdxl"] if ASKED in ("", "1") else ASKED.split(",")


def pytest_collection_modifyitems(items):
    """Nothing runs unasked; all tests of a family and a library follow each other, the smaller family first."""
    mine = [i for i in items if HERE in i.path.parents]
    if not ASKED:
        for item in (i for i in mine if i.path.stem != "test_page"):
            item.add_marker(pytest.mark.skip(reason="an hour and 9 GB of disk: set VITRINE_FULL_SIZE=1, sd15 or sdxl"))
    mine.sort(key=lambda item: "sdxl" in item.name)
    items[:] = [i for i in items if HERE not in i.path.parents] + mine


@pytest.fixture(scope="session", autouse=True)
def page_is_written():
    """``VITRINE_WRITE_DOCS=1``: figures.json and docs/full_size.md follow from this run."""
    yield
    from vitrine_tests.full_size import measure

    if measure.WRITE and ASKED:
        from vitrine_tests.full_size import page

        page.write()


class Held:
    """The one model in memory: asking for another lets go of it."""

    def __init__(self):
        self.key, self.model = None, None

    def get(self, key, make):
        """The model under a key, made unless it is the one held."""
        if key != self.key:
            self.release()
            self.key, self.model = key, make()
        return self.model

    def release(self):
        """Let go, and have ComfyUI let go of what it keeps loaded."""
        import sys

        self.key = self.model = None
        if "comfy.model_management" in sys.modules:
            sys.modules["comfy.model_management"].unload_all_models()
        gc.collect()


@pytest.fixture(scope="session")
def held():
    """Holds one full-size model at a time."""
    found = Held()
    yield found
    found.release()


@pytest.fixture
def precision(comfy, monkeypatch):  # noqa: F811
    """family -> how ComfyUI keeps its UNet from here on; it computes in float32.

    SD1.5 in float32, what ComfyUI does on a CPU; SDXL in float16, as it does with ``--fp16-unet`` there and on a GPU.
    """
    from comfy.cli_args import args

    def keep(family):
        monkeypatch.setattr(args, "fp16_unet", family == "sdxl")
        return torch.float16 if family == "sdxl" else torch.float32

    return keep


@pytest.fixture
def scene(comfy, precision, held, tmp_path_factory):  # noqa: F811
    """family -> its checkpoint in ComfyUI, and what the nodes' cases share."""
    from vitrine_tests.full_size.scene import Scene

    def get(family):
        precision(family)
        folder = tmp_path_factory.getbasetemp() / f"scene-{family}"
        return held.get(("ComfyUI", family), lambda: Scene(comfy, family, folder, SIDE))

    return get


@pytest.fixture
def loaded(comfy, held, tmp_path_factory):  # noqa: F811  its tokenizer's files, and the file itself, come from ComfyUI
    """family -> its checkpoint in diffusers."""
    from vitrine_tests.full_size.pipeline_cases import Loaded

    return lambda family: held.get(("diffusers", family), lambda: Loaded(family, tmp_path_factory.mktemp(family), SIDE))
