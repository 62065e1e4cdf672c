"""`vitrine lora report`: what LoRA files are, where they act, what they copy, what they cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from ..pipelines.loading import SHIPPED, LoadConfig
from ..settings.setting_checks import AtLeast, Count, OutFolder, OwnSide
from .options import Load


@dataclass(frozen=True)
class Report:
    """Is my LoRA overfitted? One page: what it is, where it acts, what it copies, what it costs, its neighbours.

    Writes report.html and report.json. What needs no model comes first; the same command resumes.
    """

    files: Positional[Annotated[tuple[Path, ...], arg(metavar="FILE [FILE ...]")]]
    """LoRA files (.safetensors) of any spelling."""
    base: str = ""
    """Pipeline folder, hub id or .safetensors file of their base model; none: what needs no model."""
    pictures: Path | None = None
    """Folder with the training pictures; their captions are read from text files of the same name, as trainers do."""
    captions: Path | None = None
    """Captions that the LoRAs were trained with: a list of prompts, as in nemo check."""
    trigger: tuple[str, ...] = ()
    """Words that ask for what the LoRAs show; none: those that the file names."""
    ordinary: Path | None = None
    """Prompts that have nothing to do with the LoRAs; none: eight of dogs, streets and soup."""
    folder: Path | None = None
    """Folder of LoRAs to look for duplicates and merges in; none: the files of this report."""
    space: Path | None = None
    """A space (.w2w.safetensors) in which to find the LoRAs' neighbours."""
    clip: Path | None = None
    """Folder of a CLIP (transformers, both sides): agreement of pictures with their prompts."""
    budget: Annotated[float, AtLeast(0)] = 0.0
    """Minutes for samples; what does not fit is named, and the next call resumes. 0: no end."""
    out: OutFolder = Path("lora-report")
    """Folder of the report."""
    seeds: Annotated[int, AtLeast(2)] = 4
    """Samples of each prompt."""
    first_seed: int = 2000
    """Of these."""
    steps: Count = 4
    """Of sampling; four tell a copy."""
    guidance: float = 3.0
    """Of sampling."""
    prompts: Count = 4
    """Captions that are sampled, at most."""
    height: OwnSide = 0
    """In pixels; 0: the model's own."""
    width: OwnSide = 0
    """In pixels; 0: the model's own."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 on success, whatever the verdicts."""
        from ..pipelines.lora_report_samples import ReportConfig
        from ..pipelines.lora_reports import lora_report
        from ..runtime.progress import TqdmProgress

        config = ReportConfig(self.seeds, self.first_seed, self.steps, self.guidance, prompts=self.prompts)
        report = lora_report(
            self.files, self.out, self._model if self.base else None, self._material(), config, self.budget or None,
            TqdmProgress("samples"),
        )  # fmt: skip
        print(report.text())
        print(f"-> {report.page}, {report.folder / 'report.json'}")
        return 0

    def _model(self) -> Any:
        from ..pipelines.loading import load_pipeline
        from ..pipelines.lora_on_pipeline import PipelineModel

        pipe: Any = load_pipeline(self.base, None, self.load)
        pipe.set_progress_bar_config(disable=True)
        return PipelineModel(pipe, (self.height, self.width) if self.height and self.width else None)

    def _material(self) -> Any:
        from ..io.prompt_files import read_prompts
        from ..nemo.check import Pictures
        from ..pipelines.lora_reports import Material, captions_beside, pictures_of

        pictures = Pictures()
        captions: list[str] = []
        if self.pictures is not None:
            pictures, paths = pictures_of(self.pictures)
            captions = captions_beside(paths)
        if self.captions is not None:
            captions = read_prompts(self.captions)[0]
        extra: dict[str, Any] = {} if self.ordinary is None else {"ordinary": tuple(read_prompts(self.ordinary, 2)[0])}
        if self.clip is not None:
            from ...evidence.emd.clip_score import Clip

            extra["judge"] = Clip.load(str(self.clip))
        if self.ordinary is None and self.base == SHIPPED:
            from ..portraits import caption, sample_scenes

            extra["ordinary"] = tuple(caption(sample_scenes(range(8_400_000, 8_400_008))))
        return Material(pictures, tuple(captions), self.trigger, folder=self.folder, space=self.space, **extra)


COMMANDS: dict[str, type] = {"report": Report}
