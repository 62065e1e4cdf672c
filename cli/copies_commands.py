"""What reproduces training pictures: `vitrine nemo check` for prompts, `vitrine lora report` for LoRA files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from ..engine.errors import refuse
from ..engine.io.folders import files_in
from ..engine.io.prompt_files import read_prompts
from ..engine.pipelines.loading import SHIPPED, LoadConfig
from ..engine.settings.copies_options import CheckConfig, ReportConfig
from ..engine.settings.option import Option
from ..engine.settings.setting_checks import Count, OutFolder, OwnSide
from .options import Load, flags


@dataclass(frozen=True)
class Check:
    """Find prompts that reproduce a training picture: how often, where in the picture, and which one.

    Writes copies.html, copies.csv and the nearest sample of each prompt. The same command resumes.
    """

    prompts: Path
    """CSV, TSV, JSON or JSONL with a column prompt (caption, text) and optionally label; or text, one per line."""
    model: str = "portraits"
    """Pipeline folder, hub id or .safetensors file of any text-to-image model."""
    pictures: Path | None = None
    """Folder with the training pictures; none: samples of a prompt are compared with each other."""
    lora: Path | None = None
    """A LoRA (.safetensors) to check; the model without it gives the usual distance."""
    ordinary: Path | None = None
    """A list of captions unrelated to the pictures; required without a LoRA."""
    out: OutFolder = Path("copy-check")
    """Folder for the results."""
    check: Annotated[CheckConfig, flags(CheckConfig(), "seeds", "first_seed")] = CheckConfig()
    steps: Count = 30
    """Sampling steps."""
    guidance: float = 7.5
    """Guidance scale."""
    height: OwnSide = 0
    """In pixels; 0: the model's default."""
    width: OwnSide = 0
    """In pixels; 0: the model's default."""
    calibration: Path | None = None
    """The file that calibrate wrote for this model: its threshold turns NeMo's score into a verdict."""
    memory: str = "2GB"
    """Memory in addition to the model."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 on success."""
        from ..engine.diffusion.denoiser import Denoiser
        from ..engine.nemo import Calibration, ProbeConfig, fingerprint_of
        from ..engine.pipelines.copies import copy_check
        from ..engine.pipelines.loading import load_pipeline
        from ..engine.runtime.progress import TqdmProgress

        prompts, labels = read_prompts(self.prompts)
        ordinary = () if self.ordinary is None else tuple(read_prompts(self.ordinary)[0])
        score = None if self.calibration is None else Calibration.load(self.calibration).known("score")
        pipe: Any = load_pipeline(self.model, None, self.load)
        probe, tau = ProbeConfig(), None
        if score is not None:  # the LoRA is loaded later: the threshold belongs to the base model
            score.check(fingerprint_of(Denoiser.from_diffusers(pipe).backbone))
            probe, tau = score.probe, score.tau
        pipe.set_progress_bar_config(disable=True)
        size: dict[str, Any] = {k: v for k, v in (("height", self.height), ("width", self.width)) if v}
        check = copy_check(
            pipe, prompts, self.out, pictures=self.pictures, lora=self.lora,
            config=replace(self.check, ordinary=ordinary), probe=probe, tau=tau, labels=labels,
            memory=self.memory, progress=TqdmProgress("samples"), num_inference_steps=self.steps,
            guidance_scale=self.guidance, **size,
        )  # fmt: skip
        print(check.text())
        print(f"-> {self.out / 'copies.html'}, {self.out / 'copies.csv'}")
        return 0


def _lora_files(paths: tuple[Path, ...]) -> list[Path]:
    """The files, and those of folders."""
    files: list[Path] = []
    for path in paths:
        inside = files_in(path, ".safetensors", deep=True) if path.is_dir() else [path]
        if not inside:
            raise refuse("folder", path, "one with .safetensors files", "check the path")
        files += inside
    return files


@dataclass(frozen=True)
class Report:
    """Is my LoRA overfitted? One page: contents, affected layers, copying, cost, neighbours.

    Writes report.html and report.json. Parts that need no model come first; the same command resumes.
    """

    files: Positional[Annotated[tuple[Path, ...], arg(metavar="FILE [FILE ...]")]]
    """LoRA files (.safetensors) of any key format, or folders of them."""
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
    budget: Annotated[float, Option(ge=0)] = 0.0
    """Minutes for sampling; unfinished parts are listed, and the next call resumes. 0: no limit."""
    out: OutFolder = Path("lora-report")
    """Folder of the report."""
    sampled: Annotated[ReportConfig, flags(ReportConfig(), without=("strengths",))] = ReportConfig()
    height: OwnSide = 0
    """In pixels; 0: the model's default."""
    width: OwnSide = 0
    """In pixels; 0: the model's default."""
    fail_on: Literal["look", "bad", "never"] = "bad"
    """Verdict from which the exit status is 1. It is 2 if a file could not be read."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 if all files were read and none is as bad as ``fail_on``, else 1; 2 if one could not be read."""
        from ..engine.copies import lora_report
        from ..engine.runtime.progress import TqdmProgress

        report = lora_report(
            _lora_files(self.files),
            self.out,
            self._model if self.base else None,
            self._material(),
            self.sampled,
            self.budget or None,
            TqdmProgress("samples"),
        )
        print(report.text())
        print(f"-> {report.page}, {report.folder / 'report.json'}")
        if report.unread:
            return 2
        failing: dict[str, tuple[str, ...]] = {"look": ("look", "bad", "not measured"), "bad": ("bad",), "never": ()}
        return int(any(lora.worst in failing[self.fail_on] for lora in report.loras))

    def _model(self) -> Any:
        from ..engine.pipelines import PipelineModel
        from ..engine.pipelines.loading import load_pipeline

        pipe: Any = load_pipeline(self.base, None, self.load)
        pipe.set_progress_bar_config(disable=True)
        return PipelineModel(pipe, (self.height, self.width) if self.height and self.width else None)

    def _material(self) -> Any:
        from ..engine.copies import Material, Pictures, pictures_of
        from ..engine.copies.nearest import captions_beside

        pictures = Pictures()
        captions: list[str] = []
        if self.pictures is not None:
            pictures, paths = pictures_of(self.pictures)
            captions = captions_beside(paths)
        if self.captions is not None:
            captions = read_prompts(self.captions)[0]
        extra: dict[str, Any] = {} if self.ordinary is None else {"ordinary": tuple(read_prompts(self.ordinary, 2)[0])}
        if self.ordinary is None and self.base == SHIPPED:
            from ..engine.portraits import caption, sample_scenes

            extra["ordinary"] = tuple(caption(sample_scenes(range(8_400_000, 8_400_008))))
        return Material(pictures, tuple(captions), self.trigger, folder=self.folder, **extra)


COMMANDS: dict[str, type] = {"report": Report}
