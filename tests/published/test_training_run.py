"""Training runs that strangers published with their checkpoints, and what the page of each says.

``VITRINE_PUBLISHED_OTHERS`` is a folder with ``OWNER+NAME/PATH`` of each file in ``runs.json``, 80 MB.
"""

import re

import numpy as np
import pytest
import torch
from vitrine.engine.copies.training_runs import named_runs, runs_among, training_run
from vitrine.engine.w2w.loras.lora_files import read_header
from vitrine_tests.published.bring import table
from vitrine_tests.published.test_published import compared
from vitrine_tests.published.weights import by_hand, entry_of, file_of

NUMBERS = [(np._core.multiarray.scalar, "numpy.core.multiarray.scalar"), np.dtype, np.dtypes.Float64DType]
"""What a list of losses in a file is made of."""
RUNS = table("runs.json")


def weights_of(path):
    """All weights as one vector; a pickle, read without running anything."""
    with torch.serialization.safe_globals(NUMBERS):
        state = torch.load(path, weights_only=True, map_location="cpu")
    state = state.get("model_state_dict", state)
    return torch.cat([v.double().flatten() for _, v in sorted(state.items()) if v.is_floating_point()])


def step_of(path):
    numbers = re.findall(r"\d+", f"{path.parent.name if 'lora' in path.stem else ''} {path.stem}")
    return str(int(numbers[-1])) if numbers else "last"


def read_run(name, paths):
    """As ``vitrine lora report`` reads LoRAs; a whole model's weights are the same rule's, which reads no pickles."""
    if paths[0].suffix == ".safetensors":
        (run,) = runs_among([read_header(path) for path in paths])
        return run
    rows = torch.stack([weights_of(path) for path in paths])
    return training_run(name, [step_of(path) for path in paths], rows @ rows.T, from_zero=False)


def test_the_run_goes_the_same_way_to_its_end():
    files = [file_of(entry_of(f"ddpm_checkpoint_0001_{epoch:04d}.pt")) for epoch in (0, 100, 400)]
    ((labelled, members),) = named_runs(files)
    assert [step for step, _ in members] == [0, 100, 400] and not labelled
    rows = torch.stack([weights_of(path) for _, path in members])
    run = read_run("ddpm", files)
    true = torch.nn.functional.cosine_similarity(rows[2] - rows[1], rows[1] - rows[0], dim=0)
    assert run.checkpoints[2].cosine == pytest.approx(float(true), abs=1e-3) and float(true) > 0
    assert run.verdict == "not measured" and run.headline == "Too few checkpoints"


@pytest.mark.parametrize("known", RUNS, ids=[f"{run['repository']}, {run['name']}" for run in RUNS])
def test_what_the_page_says_of_a_run(known, tmp_path):
    paths = []
    for file in known["files"]:
        data = by_hand(file | {"repository": known["repository"]})
        paths.append(tmp_path / file["path"])
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        paths[-1].write_bytes(data)
    run = read_run(known["name"], paths)
    assert len(run.checkpoints) == len({file["sha256"] for file in known["files"]}), "the last step may be there twice"
    figure = {"outcome": "read", "checkpoints": len(run.checkpoints), "headline": run.headline, "verdict": run.verdict}
    figure["steps"] = f"{run.checkpoints[0].label} to {run.checkpoints[-1].label}"
    figure["cosines"] = [round(point.cosine, 2) for point in run.checkpoints if point.cosine is not None]
    compared(f"run, {known['repository']}, {known['name']}", figure)
