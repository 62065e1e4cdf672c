"""`vitrine emd train`: distil a one-step student. Heavy imports are in `run`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from ..engine.errors import refuse
from ..engine.io.files import named, parse_table
from ..engine.pipelines.loading import LoadConfig
from ..engine.settings.setting_checks import OutFolder
from .options import Load

PORTRAITS: dict[str, Any] = {
    "steps": 2000,
    "batch": 16,
    "rank": 16,
    "guidance": 3.0,
    "score_updates": 2,
    "ema": 0.999,
    "lr_generator": 1e-4,
    "lr_score": 5e-4,
    "weight": "dmd",
    "auto_gz": False,
    "chain": {"steps": 4, "ge": 0.16, "gz": 0.01, "clip": 20.0},
}
"""Training settings of the shipped student."""


def _read(path: Path) -> dict[str, Any]:
    with named(path, "config", "a JSON object", "see vitrine emd train --help"):
        return parse_table(path.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Train:
    """Distil a one-step student; the same command resumes an interrupted run, bit for bit.

    CONFIG is a JSON file: {"model": folder or hub id, "prompts": text file, "base": name, "size": [height, width],
    "train": {settings}}.
    Without one, a student of the portraits model is trained. Under `accelerate launch` (on CPU cores `torchrun`),
    with `-m vitrine.cli.main emd train`, processes divide each batch.
    """

    config: Positional[Annotated[Path | None, arg(metavar="[CONFIG]")]] = None
    """JSON file; see above."""
    out: OutFolder = Path("emd-student")
    """Folder for state.safetensors and the exported LoRA files."""
    stop_after: int | None = None
    """Stop after this many steps in total (the state is saved)."""
    diff_instruct: bool = False
    """Train the baseline instead: one step of eps, z frozen."""

    start: Path | None = None
    """LoRA of a student (kohya names) to start from, instead of the teacher."""
    start_score: Path | None = None
    """The score adapter that was trained with it."""
    memory: str = "1GB"
    """Memory for encoded prompts; larger lists are stored in the run's folder until it is finished."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 when finished."""
        import dataclasses

        from ..engine.emd.chain import EStepConfig
        from ..engine.emd.train_config import EMDTrainConfig
        from ..engine.pipelines.emd_training import TEXTS, training_parts
        from ..engine.runtime.processes import launched
        from ..engine.runtime.stages import Stages

        settings = _read(self.config) if self.config else {"train": PORTRAITS}
        unknown = set(settings) - {"model", "prompts", "base", "size", "train"}
        if unknown:
            raise refuse("config", sorted(unknown), "model, prompts, base, size, train", "remove them")
        config = EMDTrainConfig.from_dict(settings.pop("train", {}))
        for path in filter(None, (self.start, self.start_score)):
            if not path.is_file():
                raise refuse("file", str(path), "an existing LoRA file", "check the path")
        if self.diff_instruct:
            config = dataclasses.replace(config, chain=EStepConfig.diff_instruct())
        workers = launched()
        names = ("encoding prompts", "calibrating", "distilling")
        stages = Stages(dict.fromkeys(names), shown=not workers.index)
        shared: dict[str, Any] = {"folder": self.out, "memory": self.memory, "workers": workers}
        shared["progress"] = stages.bar("encoding prompts")
        trainer = training_parts(**settings, load=self.load, **shared).trainer(config, self.out)
        if self.start is not None:
            trainer.start_from(self.start, self.start_score)
        calibration = trainer.calibrate(stages.bar("calibrating"))
        if not workers.index:
            print(calibration or f"gz {trainer.chain.gz:.3g}, not calibrated")
        files = trainer.run(stages.bar("distilling"), self.stop_after)
        if not workers.index:
            print(f"skipped {trainer.skipped}")
            print("student: " + ", ".join(map(str, files)))
            if trainer.done == config.steps:
                shutil.rmtree(self.out / TEXTS, ignore_errors=True)
        return 0


COMMANDS: dict[str, type] = {"train": Train}
