"""`vitrine nemo calibrate | detect | find | bake | check`: NEMO for lists of prompts."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from ..engine.errors import refuse
from ..engine.io.files import save_safetensors, write_text
from ..engine.io.prompt_files import read_prompts
from ..engine.io.tables import csv_text
from ..engine.pipelines.loading import LoadConfig
from ..engine.settings.nemo_options import FEW_STEPS, FewStepConfig, ProbeConfig, SearchConfig, check_method
from ..engine.settings.setting_checks import Count, OutFile, OutFolder
from ..engine.settings.verdicts import verdict_of
from .copies_commands import Check
from .options import Load, flags

SAMPLING = flags(FEW_STEPS, seeds="samples", steps="sampling_steps", guidance="sampling_guidance")
"""What detection samples, among a command's other options."""
SEARCH = flags(SearchConfig(), without=("tau",))


def _pipeline(model: str, load: LoadConfig) -> Any:
    from ..engine.pipelines import NEMOPipeline
    from ..engine.pipelines.loading import load_pipeline

    pipe = NEMOPipeline.from_pipe(load_pipeline(model, None, load))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _bar(label: str, workers: Any) -> Any:
    """A progress bar in the first process."""
    from ..engine.runtime.progress import TqdmProgress

    return TqdmProgress(label, not workers.index)


@dataclass(frozen=True)
class Calibrate:
    """Calibrate detection and search on ordinary captions. The same command resumes.

    Measures the statistics of neurons, how much few-step samples of one caption usually differ, and the threshold of
    the published score of one-step predictions. Under `torchrun` or `accelerate launch` processes divide the
    captions.
    """

    prompts: Positional[Annotated[Path, arg(metavar="PROMPTS")]]
    """Ordinary captions, 500 or more: text, one per line; or CSV, TSV, JSON, JSONL with a column prompt or caption."""
    model: str = "portraits"
    """Pipeline folder or hub id of an SD1.x or SD2.x model."""
    out: OutFile = Path("calibration.safetensors")
    """The file that detect, find and check read."""
    scope: str = "down+mid"
    """down+mid (published) or all."""
    probe: Annotated[ProbeConfig, flags(ProbeConfig(), "timestep_index", "guidance")] = ProbeConfig()
    scored: Count = 200
    """Number of captions scored and sampled for the thresholds."""
    few_steps: Annotated[FewStepConfig, SAMPLING] = FEW_STEPS
    memory: str = "4GB"
    """Memory in addition to the model."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 on success."""
        from ..engine.jobs.run import forget
        from ..engine.nemo import PARTS
        from ..engine.runtime.processes import launched

        texts, pipe, workers = read_prompts(self.prompts, 2)[0], _pipeline(self.model, self.load), launched()
        state = self.out.with_suffix(".state")
        calibration = pipe.calibrate(
            texts,
            scope=self.scope,
            probe=self.probe,
            few_steps=self.few_steps,
            scored=self.scored,
            progress=_bar("calibrating", workers),
            state=state,
            memory=self.memory,
            workers=workers,
        )
        if not workers.index:
            calibration.save(self.out)
            print(f"{calibration.text()}\n-> {self.out}")
        for part in PARTS:
            forget(workers.own_file(state / f"{part}.safetensors"))
        workers.meet()
        if not workers.index:
            with suppress(OSError):  # another run has files there
                state.rmdir()
        return 0


@dataclass(frozen=True)
class ImportStatistics:
    """Take the authors' published statistics and threshold for SD 1.4 instead of calibrate. Nothing is unpickled."""

    file: Positional[Annotated[Path, arg(metavar="FILE")]]
    """statistics_additional_laion_prompts_v1_4.pt of the official repository."""
    model: Positional[Annotated[str, arg(metavar="MODEL")]]
    """Pipeline folder or hub id of SD 1.4, or another model of SD 1.x's shape."""
    out: OutFile = Path("calibration.safetensors")
    """The file that detect --method "one step" and find --protocol nemo read."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 on success."""
        from ..engine.pipelines.nemo_jobs import import_statistics

        calibration = import_statistics(_pipeline(self.model, self.load), self.file)
        calibration.save(self.out)
        print(f"{calibration.text()}, as published\n-> {self.out}")
        return 0


@dataclass(frozen=True)
class Detect:
    """Detect memorized prompts in a long list, without a search; the same command resumes.

    Under `torchrun` or `accelerate launch` processes divide the prompts.
    """

    prompts: Positional[Annotated[Path, arg(metavar="PROMPTS")]]
    """Text, one prompt per line; or CSV, TSV, JSON, JSONL with a column prompt, caption or text."""
    calibration: Path = Path("calibration.safetensors")
    """The file that calibrate wrote."""
    model: str = "portraits"
    """The model it was calibrated on."""
    out: OutFile = Path("detected.csv")
    """A table, the most suspicious prompt first: distance of its samples, verdict, and their parts."""
    method: str = "samples"
    """samples compares samples of a few steps; "one step" is the published score of one-step predictions."""
    few_steps: Annotated[FewStepConfig, flags(FEW_STEPS, "two_stage")] = FEW_STEPS
    memory: str = "4GB"
    """Memory in addition to the model, for the published score."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 on success."""
        from ..engine.jobs.run import forget
        from ..engine.nemo import Calibration, fingerprint_of
        from ..engine.runtime.processes import launched

        published, texts = check_method(self.method), read_prompts(self.prompts)[0]
        calibration = Calibration.load(self.calibration)
        known = calibration.known("score" if published else "samples")
        pipe, workers = _pipeline(self.model, self.load), launched()
        calibration.check(fingerprint_of(pipe._network))
        state, config = self.out.with_suffix(".safetensors"), None
        if not published:
            config = replace(known.config, two_stage=self.few_steps.two_stage)
        results = pipe.detect(
            texts, calibration, self.method, config, _bar("prompts", workers), state, self.memory, workers
        )
        if published:
            ranked = sorted(zip(texts, results, strict=True), key=lambda row: -row[1].value)
            head: tuple[str, ...] = ("prompt", "score", "memorized")
            rows = [(text, f"{s.value:.6f}", "yes" if s.memorized else "no") for text, s in ranked]
            level = f"above {known.tau:.4f}"
        else:
            ranked = sorted(zip(texts, results, strict=True), key=lambda row: row[1].distance)
            head = ("prompt", *results[0].columns())
            rows = [(text, *agreement.columns().values()) for text, agreement in ranked]
            level = f"below {known.distance:.4f}"
        if not workers.index:
            write_text(self.out, csv_text([head, *rows]))
            verdict = verdict_of([result.rated for result in results], "prompts")
            print(f"{verdict}, {sum(r.memorized for r in results)} of {len(results)} {level} -> {self.out}")
            if self.few_steps.two_stage and not published:
                short = sum(agreement.count < agreement.config.seeds for agreement in results)
                print(f"{short} of {len(results)} by their first two samples alone")
        forget(workers.own_file(state))
        return 0


@dataclass(frozen=True)
class Find:
    """Search every prompt for the neurons that memorize it; one NEURONS file each. The same command resumes.

    Under `torchrun` or `accelerate launch` processes divide the prompts.
    """

    prompts: Positional[Annotated[Path, arg(metavar="PROMPTS")]]
    """Text, one prompt per line; or CSV, TSV, JSON, JSONL with a column prompt, caption or text."""
    calibration: Path = Path("calibration.safetensors")
    """The file that calibrate wrote."""
    model: str = "portraits"
    """The model it was calibrated on."""
    out: OutFolder = Path("neurons")
    """Folder for the NEURONS files."""
    search: Annotated[SearchConfig, SEARCH] = SearchConfig()
    together: Count = 16
    """Prompts searched in one batch."""
    seed: int = 0
    """Seed of the noise; 0: as calibrated."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 on success."""
        from ..engine.jobs.run import Run
        from ..engine.nemo import Calibration, fingerprint_of
        from ..engine.nemo.find import settings_of
        from ..engine.pipelines.nemo_jobs import probe_of, search_inputs
        from ..engine.runtime.processes import launched

        calibration, workers = Calibration.load(self.calibration), launched()
        scope, score = calibration.scope, calibration.score
        probe = ProbeConfig() if score is None else score.probe
        probe = replace(probe, seed=self.seed or probe.seed)
        pipe = _pipeline(self.model, self.load)
        calibration.check(fingerprint_of(pipe._network))
        config = replace(self.search, tau=None if score is None else score.tau)
        prompts, _ = read_prompts(self.prompts)
        paths = {p: self.out / f"{hashlib.sha256(p.encode()).hexdigest()[:12]}.json" for p in prompts}
        settings = settings_of(probe_of(pipe, scope, probe), config)
        inputs = search_inputs(pipe, calibration) | {"settings": settings}
        with Run(self.out, "NEMO find", inputs, ("*.json",), workers):
            own_prompts = list(paths)[workers.index :: workers.count]
            open_prompts = [p for p in own_prompts if not paths[p].is_file()]
            bar = _bar("prompts", workers)
            for i in range(0, len(open_prompts), self.together):
                group = open_prompts[i : i + self.together]

                def after(step: int, total: int, preview: Any = None, done: int = i, count: int = len(group)) -> None:
                    bar(done + count * step // max(1, total), len(open_prompts))

                for result in pipe.find(group, calibration, config, probe, scope, after):
                    neurons = pipe.neurons(result)
                    neurons.save(paths[result.prompt])
                    judged = "" if result.curve is None else f"  {result.curve.agreeing}"
                    print(f"{result.verdict:<14} {len(neurons):>5} neurons{judged}  {result.prompt[:70]}")
                after(1, 1)
            workers.meet()
        return 0


@dataclass(frozen=True)
class Bake:
    """Write the union of NEURONS files into a model's weights; saves only the changed tensors."""

    neurons: Positional[Annotated[tuple[Path, ...], arg(metavar="NEURONS ...")]]
    """NEURONS files of one model."""
    model: str = "portraits"
    """The model."""
    out: OutFile = Path("nemo-patch.safetensors")
    """Changed parameters under diffusers' names: load_state_dict(..., strict=False)."""
    factor: float | None = None
    """0 prunes; by default the files' own, which find chose."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 on success."""
        from ..engine.nemo import NeuronSet, bake

        if not self.neurons:
            raise refuse("NEURONS files", 0, "one or more", "vitrine nemo find writes them")
        sets = [NeuronSet.load(p) for p in self.neurons]
        union = sets[0].merged(*sets[1:])
        changed = bake(_pipeline(self.model, self.load)._network, union, self.factor)
        save_safetensors(self.out, changed)
        print(f"{len(union)} neurons in {len(changed)} tensors -> {self.out}")
        return 0


COMMANDS: dict[str, type] = {
    "calibrate": Calibrate,
    "import-statistics": ImportStatistics,
    "detect": Detect,
    "find": Find,
    "bake": Bake,
    "check": Check,
}
