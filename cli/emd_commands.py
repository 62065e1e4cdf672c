"""`vitrine emd train`: distil a one-step student. Heavy imports are in `run`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from ..engine.errors import refuse
from ..engine.io.files import named, parse_table
from ..engine.io.prompt_files import read_prompts
from ..engine.pipelines.loading import LoadConfig
from ..engine.settings.setting_checks import Count, OutFile, OutFolder, Side
from .options import Load

PORTRAITS: dict[str, Any] = {
    "steps": 2000, "batch": 16, "rank": 16, "guidance": 3.0, "score_updates": 2, "ema": 0.999,
    "lr_generator": 1e-4, "lr_score": 5e-4, "weight": "dmd", "meter_every": 100, "auto_gz": False,
    "chain": {"steps": 4, "ge": 0.16, "gz": 0.01, "clip": 20.0},
}  # fmt: skip
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

        from ..engine.emd.chain_config import EStepConfig
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
        stages = Stages(dict.fromkeys(("encoding prompts", "distilling")), shown=not workers.index)
        shared: dict[str, Any] = {"folder": self.out, "memory": self.memory, "workers": workers}
        shared["progress"] = stages.bar("encoding prompts")
        trainer = training_parts(**settings, load=self.load, **shared).trainer(config, self.out)
        if self.start is not None:
            trainer.start_from(self.start, self.start_score)
        files = trainer.run(stages.bar("distilling"), self.stop_after)
        if not workers.index:
            print(trainer.calibration or f"gz {trainer.chain.gz:.3g}")
            print(f"skipped {trainer.skipped}, bias {trainer.meter}")
            print("student: " + ", ".join(map(str, files)))
            if trainer.done == config.steps:
                shutil.rmtree(self.out / TEXTS, ignore_errors=True)
        return 0


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a student, or all checkpoints of a run, against its teacher at equal prompts and seeds.

    Baselines: the teacher with a single step, and the teacher with other seeds.
    """

    student: Positional[Annotated[Path, arg(metavar="STUDENT")]]
    """A student's file, LoRA or whole network; or OUT/checkpoints of a run, whose best one is reported."""
    prompts: Path
    """Text, one prompt per line; or CSV, TSV, JSON, JSONL with a column prompt, caption or text."""
    model: str = "portraits"
    """The teacher: portraits, a diffusers folder or a hub id."""
    features: str = "readout"
    """The feature network: `readout` (attribute classifier) for portraits, else a transformers folder."""
    clip: str = ""
    """A transformers folder of a CLIPModel, for a CLIP score; optional."""
    seeds: Count = 4
    """Pictures per prompt."""
    steps: Count = 30
    """Sampling steps of the teacher."""
    guidance: float = 3.0
    """Guidance scale of the teacher."""
    size: tuple[Side, Side] | None = None
    """Height and width in pixels; by default the teacher pipeline's."""
    out: OutFile | None = None
    """JSON file for the results."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 when finished."""
        from ..engine.io.files import write_json
        from ..engine.pipelines.loading import load_pipeline
        from ..engine.runtime.progress import TqdmProgress
        from ..evidence.emd.clip_score import Clip
        from ..evidence.emd.evaluate import Judges, Protocol, best, checkpoints, evaluate, features_of

        lines, _ = read_prompts(self.prompts)
        students, protocol = (
            checkpoints(self.student),
            Protocol(lines, self.seeds, self.steps, self.guidance, size=self.size),
        )
        judges = Judges(features_of(self.features), Clip.load(self.clip) if self.clip else None)
        pipe = load_pipeline(self.model, None, self.load)
        rows = evaluate(pipe, students, judges, protocol, progress=TqdmProgress("judging"))
        for name, row in rows.items():
            print(name, *(f"{key} {value:g}" for key, value in row.items()), sep="\n    ")
        if len(students) > 1:
            print(f"best: {best(rows, students)}")
        if self.out is not None:
            write_json(self.out, rows)
        return 0


COMMANDS: dict[str, type] = {"train": Train, "evaluate": Evaluate}
