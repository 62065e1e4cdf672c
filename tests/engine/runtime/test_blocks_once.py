"""A change to a network is entered by one ``with``: a second one used to end the first, or to act twice."""

import importlib
import inspect
import pkgutil

import pytest
import torch
import vitrine.engine
from vitrine.engine.control import (
    ControlEmbedder,
    ControlSpec,
    GammaConfig,
    Injection,
    ReferenceBlend,
    SizeCondition,
    control_width,
)
from vitrine.engine.control.embedding_hook import AddedVector
from vitrine.engine.errors import VitrineError
from vitrine.engine.jobs.run import Run
from vitrine.engine.resolution import ResolutionTransferConfig, apply
from vitrine.engine.resolution.receptive import Spread
from vitrine.engine.resolution.rotary_patch import RotaryPositions
from vitrine.engine.resolution.transfer import facts_of, plan_transfer
from vitrine.engine.tracing.hooks import capture, edit
from vitrine.engine.w2w import BatchedLora, Manifest, initial_lora
from vitrine_tests import models
from vitrine_tests.machine import stock

NO_CHANGE = {
    "Features": "rows that are read; closing deletes a temporary folder",
    "ActivationWriter": "a file's buffer, written at each end",
    "RowFile": "a file",
    "CopyReader": "a file",
    "named": "an error's file name",
    "Peak": "a count of bytes, PyTorch's own kind of block",
    "_OpenBlock": "other blocks, within one run",
    "ForwardClock": "a base",
    "_Added": "a base",
    "_Hooks": "a base",
    "OneBlock": "a base",
    "Undoable": "a base",
    "Watched": "a base",
}


def unet():
    return models.unet()


def lora(net):
    layers = initial_lora(net, rank=1, alpha=1.0)
    manifest = Manifest.of(layers)
    return BatchedLora(net, manifest, manifest.flatten(layers)[None])


def injection(net):
    made = ControlEmbedder(ControlSpec(), control_width(net))
    return Injection(net, made, made.spec.rows(SizeCondition().controls((64, 64), made.spec)), GammaConfig())


def rotary():
    pipe = stock.flux()
    plan = plan_transfer(facts_of(pipe), ResolutionTransferConfig((128, 128), (64, 64)))
    return RotaryPositions(pipe.transformer, plan)


MADE = {
    "Capture": lambda: capture(unet(), "mid-vit-out"),
    "Edit": lambda: edit(unet(), {"mid-vit-out": lambda x: x}),
    "BatchedLora": lambda: lora(unet()),
    "Injection": lambda: injection(models.pixart()),
    "AddedVector": lambda: AddedVector(net := models.pixart(), torch.zeros(1, control_width(net))),
    "ReferenceBlend": lambda: ReferenceBlend(models.unet_xl(), GammaConfig(), pixels=(64, 64)),
    "Spread": lambda: Spread(unet(), (2, 2)),
    "RotaryPositions": rotary,
    "Applied": lambda: apply(stock.sd(), ResolutionTransferConfig((128, 128), (64, 64))),
}


@pytest.mark.parametrize("name", MADE)
def test_a_second_with_is_refused(name):
    made = MADE[name]()
    with made, pytest.raises(VitrineError, match="block"), made:
        pytest.fail("entered twice")


def test_a_run_too(tmp_path):
    run = Run(tmp_path, "job", {})
    with run, pytest.raises(VitrineError), run:
        pytest.fail("entered twice")


def test_every_block_has_its_case():
    found = set()
    for module in pkgutil.walk_packages(vitrine.engine.__path__, "vitrine.engine."):
        loaded = importlib.import_module(module.name)
        found |= {
            name
            for name, kind in vars(loaded).items()
            if inspect.isclass(kind) and kind.__module__ == module.name and hasattr(kind, "__enter__")
        }
    assert found == set(MADE) | {"Run"} | set(NO_CHANGE)
