"""Checkpoints of a run that a stranger published: three of James Hughes' DDPM of digits (MIT)."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from vitrine.engine.copies.training_runs import named_runs, training_run

FOLDER = Path(os.environ.get("VITRINE_PUBLISHED") or "none") / "james-hughes1+diffusion-mnist"
FILES = [FOLDER / f"ddpm_checkpoint_0001_{epoch:04d}.pt" for epoch in (0, 100, 400)]
NUMBERS = [(np._core.multiarray.scalar, "numpy.core.multiarray.scalar"), np.dtype, np.dtypes.Float64DType]
"""What a list of losses in the file is made of."""

pytestmark = pytest.mark.skipif(
    not FILES[0].is_file(), reason="set VITRINE_PUBLISHED to a folder with james-hughes1+diffusion-mnist"
)


def weights_of(path):
    """All weights as one vector; a pickle, read without running anything."""
    with torch.serialization.safe_globals(NUMBERS):
        state = torch.load(path, weights_only=True, map_location="cpu")["model_state_dict"]
    return torch.cat([v.double().flatten() for _, v in sorted(state.items()) if v.is_floating_point()])


def test_the_run_goes_the_same_way_to_its_end():
    ((labelled, members),) = named_runs(FILES)
    assert [step for step, _ in members] == [0, 100, 400] and not labelled
    rows = torch.stack([weights_of(path) for _, path in members])
    products = rows @ rows.T
    run = training_run("ddpm", [str(step) for step, _ in members], products, from_zero=False)
    true = torch.nn.functional.cosine_similarity(rows[2] - rows[1], rows[1] - rows[0], dim=0)
    assert run.checkpoints[2].cosine == pytest.approx(float(true), abs=1e-3) and float(true) > 0
    assert run.verdict == "not measured" and run.headline == "Too few checkpoints"
