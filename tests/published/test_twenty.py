"""Twenty LoRAs of as many authors in one weights2weights space. Nineteen state no licence: they are brought by hand.

``VITRINE_PUBLISHED_OTHERS`` is a folder with ``OWNER+NAME/PATH`` of each file in ``others.json``.
"""

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from vitrine.engine.w2w import build_space
from vitrine.engine.w2w.building.folder_summary import look_at_folder
from vitrine.engine.w2w.loras.lora_files import read_lora
from vitrine.engine.w2w.loras.low_rank import squared_change
from vitrine.engine.w2w.loras.near_copies import SAME
from vitrine.engine.w2w.space.map_layout import map_of, neighbours_of
from vitrine_tests.benchmarks.conftest import peak, restart_peak
from vitrine_tests.published.bring import table
from vitrine_tests.published.test_published import LARGEST, compared, measured
from vitrine_tests.published.weights import by_hand, entry_of, file_of, keep

NOTHING = "thehydrowave"
"""Whose file is zero in every layer."""
LICENSED = "stable-diffusion-v1.5-lora/pytorch_lora_weights.safetensors"


def brought(kind):
    """(repository, path, bytes) of each file of a kind."""
    entries = [entry for entry in table("others.json") if entry["as"] == kind]
    return [(entry["repository"], entry["path"], by_hand(entry)) for entry in entries]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the twenty, each under its author's name; pickles are converted."""
    into, licensed = tmp_path_factory.mktemp("twenty"), entry_of(LICENSED)
    contents = [*brought("one of twenty"), (licensed["repository"], LICENSED, file_of(licensed).read_bytes())]
    for repository, path, data in contents:
        file = into / f"{repository.split('/')[0]}{Path(path).suffix}"
        file.write_bytes(data)
        if file.suffix == ".bin":
            tensors = torch.load(file, weights_only=True, map_location="cpu")
            save_file({key: value.contiguous() for key, value in tensors.items()}, file.with_suffix(".safetensors"))
            file.unlink()
    return into


def test_each_is_read_as_diffusers_reads_it(folder):
    files = sorted(folder.iterdir())
    figures = {path.stem: measured(path) for path in files}
    assert len(figures) == 20 and all(figure["outcome"] == "read" for figure in figures.values())
    assert [name for name, figure in figures.items() if figure["zero"]] == [NOTHING]
    for name, figure in figures.items():
        keep(f"others, {name}", figure)
        assert figure["difference"] <= LARGEST, name


def test_one_space_of_twenty_authors(folder):
    restart_peak("cpu")
    start = time.perf_counter()
    look = look_at_folder(folder)
    space = build_space(folder).space
    layout = map_of(space)
    seconds, memory = time.perf_counter() - start, peak("cpu") / 1024
    near, names = neighbours_of(space, 19), [file.name for file in look.scan.good]
    pairs = sorted((round(d, 2), *sorted((names[i], other))) for i, row in near.items() for other, d in row)
    assert len(names) == 20 and not look.scan.bad and not look.copies and memory < 6
    strengths = sorted((float(f"{squared_change(read_lora(file)) ** 0.5:.2g}"), file.name) for file in look.scan.good)
    assert strengths[0] == (0.0, NOTHING) and strengths[1][0] > 0
    keep("twenty in one space, cost", {"seconds": round(seconds), "GiB": round(memory, 1)})
    compared("twenty in one space", {
        "outcome": "built", "mode": look.mode, "layers": len(look.scan.shapes),
        "effective directions": round(look.effective, 1), "kept": round(layout.kept, 2),
        "chance": round(layout.chance, 2), "weakest": list(strengths[1]), "strongest": list(strengths[-1]),
        "weakest two": sorted(name for _, name in strengths[:2]), "nothing": NOTHING, "nearest": list(pairs[0]),
        "farthest": list(pairs[-1]),
    })  # fmt: skip


def test_twins_in_other_spellings_are_found(folder, tmp_path):
    """One author's file in two spellings, another's in two formats with alpha in a header and in the settings."""
    for repository, path, data in brought("twin"):
        own = tmp_path / f"{repository.split('/')[0]}-{Path(path).stem.removesuffix('_model').removesuffix('_config')}"
        own.mkdir(exist_ok=True)
        (own / Path(path).name).write_bytes(data)
    look = look_at_folder([*sorted(folder.iterdir()), *sorted(tmp_path.rglob("*.safetensors"))])
    twins = sorted(" = ".join(sorted((copy.first, copy.second))) for copy in look.copies if copy.distance < SAME)
    assert len(look.scan.good) == 23 and len(twins) == 2
    compared(
        "twins",
        {
            "outcome": "found",
            "pairs": twins,
            "near": [str(c) for c in look.copies if str(c) not in twins and c.distance >= SAME],
        },
    )
