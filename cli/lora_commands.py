"""`vitrine lora report`: contents, effect, copying and cost of LoRA files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from ..engine.pipelines.loading import SHIPPED, LoadConfig
from ..engine.settings.setting_checks import AtLeast, Count, OutFolder, OwnSide
from .options import Load


@dataclass(frozen=True)
class Report:
    """Is my LoRA overfitted? One page: contents, affected layers, copying, cost, neighbours.

    Writes report.html and report.json. Parts that need no model come first; the same command resumes.
    """

    files: Positional[Annotated[tuple[Path, ...], arg(metavar="FILE [FILE ...]")]]
    """LoRA files (.safetensors) of any key format."""
    base: str = ""
    """Pipeline folder, hub id or .safetensors file of their base model; none: only parts without a model."""
    pictures: Path | None = None
    """Folder with the training pictures; captions are read from text files next to them, as in trainers."""
    captions: Path | None = None
    """Captions that the LoRAs were trained with: a list of prompts, as in nemo check."""
    trigger: tuple[str, ...] = ()
    """Trigger words; none: those in the files."""
    ordinary: Path | None = None
    """Prompts unrelated to the LoRAs; none: eight about dogs, streets and soup."""
    folder: Path | None = None
    """Folder of LoRAs to search for duplicates and merges; none: the files of this report."""
    space: Path | None = None
    """A space (.w2w.safetensors) in which to locate the LoRAs."""
    clip: Path | None = None
    """Folder of a CLIP (transformers, both sides): agreement of pictures with their prompts."""
    budget: Annotated[float, AtLeast(0)] = 0.0
    """Minutes for sampling; unfinished parts are listed, and the next call resumes. 0: no limit."""
    out: OutFolder = Path("lora-report")
    """Folder of the report."""
    seeds: Annotated[int, AtLeast(2)] = 4
    """Samples per prompt."""
    first_seed: int = 2000
    """Seed of the first sample."""
    steps: Count = 4
    """Sampling steps; four are enough to detect copies."""
    guidance: float = 3.0
    """Guidance scale."""
    prompts: Count = 4
    """Most captions to sample."""
    height: OwnSide = 0
    """In pixels; 0: the model's default."""
    width: OwnSide = 0
    """In pixels; 0: the model's default."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 on success, whatever the verdicts."""
        from ..engine.pipelines.lora_report_samples import ReportConfig
        from ..engine.pipelines.lora_reports import lora_report
        from ..engine.runtime.progress import TqdmProgress

        config = ReportConfig(self.seeds, self.first_seed, self.steps, self.guidance, prompts=self.prompts)
        report = lora_report(
            self.files, self.out, self._model if self.base else None, self._material(), config, self.budget or None,
            TqdmProgress("samples"),
        )  # fmt: skip
        print(report.text())
        print(f"-> {report.page}, {report.folder / 'report.json'}")
        return 0

    def _model(self) -> Any:
        from ..engine.pipelines.loading import load_pipeline
        from ..engine.pipelines.lora_on_pipeline import PipelineModel

        pipe: Any = load_pipeline(self.base, None, self.load)
        pipe.set_progress_bar_config(disable=True)
        return PipelineModel(pipe, (self.height, self.width) if self.height and self.width else None)

    def _material(self) -> Any:
        from ..engine.io.prompt_files import read_prompts
        from ..engine.nemo.check import Pictures
        from ..engine.pipelines.lora_reports import Material, captions_beside, pictures_of

        pictures = Pictures()
        captions: list[str] = []
        if self.pictures is not None:
            pictures, paths = pictures_of(self.pictures)
            captions = captions_beside(paths)
        if self.captions is not None:
            captions = read_prompts(self.captions)[0]
        extra: dict[str, Any] = {} if self.ordinary is None else {"ordinary": tuple(read_prompts(self.ordinary, 2)[0])}
        if self.clip is not None:
            from ..evidence.metrics.clip import Clip

            extra["judge"] = Clip.load(str(self.clip))
        if self.ordinary is None and self.base == SHIPPED:
            from ..engine.portraits import caption, sample_scenes

            extra["ordinary"] = tuple(caption(sample_scenes(range(8_400_000, 8_400_008))))
        return Material(pictures, tuple(captions), self.trigger, folder=self.folder, space=self.space, **extra)


COMMANDS: dict[str, type] = {"report": Report}
