"""Training of the portraits' model on faces of DiceBear's Avataaars."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from ...engine.runtime.processes import launched
from ...engine.runtime.progress import Progress, silent
from .avataaars import LAYERS, avataaars, open_model
from .card import SHEET, write_sheet
from .train import main
from .train_config import TrainConfig


def train_avataaars(
    layers: str | Path, config: TrainConfig, progress: Callable[[str], Progress] = lambda name: silent
) -> Path:
    """The portraits' training on the faces of a file of layers; returns the model's folder, with layers and a sheet.

    Raises:
        VitrineError: If the file is not one of layers.
        OutOfTime: As :func:`.train.main`; the same call resumes.
    """
    folder = main(config, progress, avataaars(Path(layers)))
    if launched().index == 0:  # the others may be here before the first has written the model
        shutil.copyfile(layers, folder / LAYERS)
        write_sheet(open_model(folder), folder / SHEET)
    return folder
