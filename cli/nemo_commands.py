"""`vitrine nemo calibrate | score | find | bake | check`: NEMO for lists of prompts."""

from __future__ import annotations

import csv
import hashlib
import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from ..engine.errors import refuse
from ..engine.io.files import save_safetensors, write_json, write_text
from ..engine.io.prompt_files import read_prompts
from ..engine.pipelines.loading import LoadConfig
from ..engine.settings.setting_checks import AtLeast, Count, OutFile, OutFolder
from .copies_commands import Check
from .options import Load


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

    Measures how much few-step samples of one caption usually differ, the statistics of neurons, and the threshold of
    the published score of one-step predictions. Under `torchrun` or `accelerate launch` processes divide the
    captions.
    """

    prompts: Positional[Annotated[Path, arg(metavar="PROMPTS")]]
    """Ordinary captions, 500 or more: text, one per line; or CSV, TSV, JSON, JSONL with a column prompt or caption."""
    model: str = "portraits"
    """Pipeline folder or hub id of an SD1.x or SD2.x model."""
    out: OutFolder = Path("nemo")
    """Folder for samples.safetensors, statistics.safetensors and threshold.json."""
    scope: str = "down+mid"
    """down+mid (published) or all."""
    timestep_index: int = 1
    """Timestep index (of 50) for the search and the published score."""
    guidance: float = 0.0
    """Guidance of the published score, at twice the cost; 0 is published. Also for `score --protocol nemo`."""
    scored: Count = 200
    """Number of captions scored and sampled for the thresholds."""
    samples: Annotated[int, AtLeast(2)] = 4
    """Samples per prompt that detection compares."""
    sampling_steps: Count = 4
    """Their sampling steps."""
    sampling_guidance: float = 3.0
    """Their guidance scale: use the one that you sample with."""
    memory: str = "4GB"
    """Memory in addition to the model."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 on success."""
        from ..engine.jobs.run import forget
        from ..engine.nemo import FewStepConfig, ProbeConfig, fingerprint_of, threshold
        from ..engine.nemo.sample_threshold import NAME
        from ..engine.runtime.processes import launched
        from ..engine.runtime.stages import Stages

        texts, pipe, workers = read_prompts(self.prompts, 2)[0], _pipeline(self.model, self.load), launched()
        probe = ProbeConfig(timestep_index=self.timestep_index, guidance=self.guidance)
        sums, kept = self.out / "sums.safetensors", self.out / "scores.safetensors"
        shared: dict[str, Any] = {"memory": self.memory, "workers": workers}
        chosen = texts[: self.scored]
        stages = Stages(self._batch_rows(len(chosen), probe.seeds), shown=not workers.index)
        statistics = pipe.statistics(texts, self.scope, stages.bar("statistics"), sums, **shared)
        scores = pipe.score(chosen, 1.0, probe, stages.bar("threshold"), kept, **shared)
        tau, mean, std = threshold([s.value for s in scores])
        facts = {"tau": tau, "mean": mean, "std": std, "captions": len(scores), "probe": probe.to_dict()}
        facts |= {"scope": self.scope, "fingerprint": fingerprint_of(pipe._network)}
        pictures = self.out / "usual.safetensors"
        made = FewStepConfig(self.samples, steps=self.sampling_steps, guidance=self.sampling_guidance)
        usual = pipe.calibrate_samples(chosen, made, stages.bar("samples"), pictures, workers)
        if not workers.index:
            usual.save(self.out / NAME)
            print(usual.text())
            statistics.save(self.out / "statistics.safetensors")
            write_json(self.out / "threshold.json", facts)
            print(f"tau {tau:.4f} (mean {mean:.4f} + std {std:.4f}); {len(texts)} captions -> {self.out}")
        for state in (sums, kept, pictures):
            forget(workers.own_file(state))
        return 0

    def _batch_rows(self, captions: int, seeds: int) -> dict[str, float]:
        """Batch rows of the network in each stage; the statistics have the text encoder and value projections only."""
        threshold = float(captions * seeds * (2 if self.guidance else 1))
        return {"statistics": 0.1 * threshold, "threshold": threshold,
                "samples": 2.0 * captions * self.samples * self.sampling_steps}  # fmt: skip


@dataclass(frozen=True)
class ImportStatistics:
    """Take the authors' published statistics and threshold for SD 1.4 instead of calibrate. Nothing is unpickled."""

    file: Positional[Annotated[Path, arg(metavar="FILE")]]
    """statistics_additional_laion_prompts_v1_4.pt of the official repository."""
    model: Positional[Annotated[str, arg(metavar="MODEL")]]
    """Pipeline folder or hub id of SD 1.4, or another model of SD 1.x's shape."""
    out: OutFolder = Path("nemo")
    """Folder for statistics.safetensors and threshold.json, which score and find read with --protocol nemo."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 on success."""
        from ..engine.nemo import ProbeConfig
        from ..engine.nemo.calibrated_threshold import NAME, PUBLISHED

        pipe = _pipeline(self.model, self.load)
        statistics = pipe.import_statistics(self.file)
        statistics.save(self.out / "statistics.safetensors")
        write_json(self.out / NAME, PUBLISHED | {"probe": ProbeConfig().to_dict(), "scope": "down+mid"})
        neurons = sum(map(len, statistics.means.values()))
        print(f"{neurons} neurons in {len(statistics.means)} layers, tau {PUBLISHED['tau']} as published -> {self.out}")
        return 0


@dataclass(frozen=True)
class ScorePrompts:
    """Detect memorized prompts in a long list, without a search; the same command resumes.

    Under `torchrun` or `accelerate launch` processes divide the prompts.
    """

    prompts: Positional[Annotated[Path, arg(metavar="PROMPTS")]]
    """Text, one prompt per line; or CSV, TSV, JSON, JSONL with a column prompt, caption or text."""
    calibrated: Path = Path("nemo")
    """The folder that calibrate wrote."""
    model: str = "portraits"
    """The model it was calibrated on."""
    out: OutFile = Path("scores.csv")
    """A table, the most suspicious prompt first: distance of its samples, verdict, and their parts."""
    protocol: str = "vitrine"
    """vitrine compares samples of a few steps; nemo is the published score of one-step predictions."""
    two_stage: bool = False
    """Two samples first, the others only if these agree: about half the cost on ordinary prompts."""
    memory: str = "4GB"
    """Memory in addition to the model, for the published score."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 on success."""
        from ..engine.jobs.run import forget
        from ..engine.nemo import SampleThreshold, fingerprint_of
        from ..engine.nemo.calibrated_threshold import Calibrated
        from ..engine.nemo.search_config import check_protocol
        from ..engine.runtime.processes import launched

        published, texts = check_protocol(self.protocol), read_prompts(self.prompts)[0]
        calibrated: Any = (Calibrated if published else SampleThreshold).load(self.calibrated)
        pipe, workers = _pipeline(self.model, self.load), launched()
        calibrated.check(fingerprint_of(pipe._network))
        state = self.out.with_suffix(".safetensors")
        if published:
            shared = {"memory": self.memory, "workers": workers}
            scores = pipe.score(texts, calibrated.tau, calibrated.probe, _bar("scores", workers), state, **shared)
            head, rows = ("prompt", "score", "memorized"), _score_rows(texts, scores)
        else:
            config = replace(calibrated.config, two_stage=self.two_stage)
            scores = pipe.detect(texts, calibrated, config, _bar("samples", workers), state, workers)
            head, rows = ("prompt", *scores[0].columns()), _sample_rows(texts, scores)
        if not workers.index:
            table = io.StringIO()
            written = csv.writer(table, lineterminator="\n")
            written.writerow(head)
            written.writerows(rows)
            write_text(self.out, table.getvalue())
            level = calibrated.tau if published else calibrated.distance
            memorized = sum(s.memorized for s in scores)
            print(f"{memorized} of {len(scores)} {'above' if published else 'below'} {level:.4f} -> {self.out}")
        forget(workers.own_file(state))
        return 0


def _score_rows(texts: list[str], scores: list[Any]) -> list[tuple[str, ...]]:
    """The published score, the highest first."""
    rows = sorted(zip(texts, scores, strict=True), key=lambda row: -row[1].value)
    return [(text, f"{s.value:.6f}", "yes" if s.memorized else "no") for text, s in rows]


def _sample_rows(texts: list[str], agreements: list[Any]) -> list[tuple[str, ...]]:
    """Results by samples, the nearest first."""
    rows = sorted(zip(texts, agreements, strict=True), key=lambda row: row[1].distance)
    return [(text, *agreement.columns().values()) for text, agreement in rows]


@dataclass(frozen=True)
class Find:
    """Search every prompt for the neurons that memorize it; one NEURONS file each. The same command resumes.

    Under `torchrun` or `accelerate launch` processes divide the prompts.
    """

    prompts: Positional[Annotated[Path, arg(metavar="PROMPTS")]]
    """Text, one prompt per line; or CSV, TSV, JSON, JSONL with a column prompt, caption or text."""
    calibrated: Path = Path("nemo")
    """The folder that calibrate wrote."""
    model: str = "portraits"
    """The model it was calibrated on."""
    out: OutFolder = Path("neurons")
    """Folder for the NEURONS files."""
    effect_fraction: float = 0.98
    """Stop at this fraction of the effect of blocking everything; the protocol nemo stops at tau."""
    mode: str = "chain"
    """parity, chain or fast."""
    protocol: str = "vitrine"
    """vitrine searches every prompt and verifies by samples; nemo searches only those above tau, as published."""
    together: Count = 16
    """Prompts searched in one batch."""
    seed: int = 0
    """Seed of the noise; 0: as calibrated."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 on success."""
        from ..engine.jobs.run import Run
        from ..engine.nemo import NeuronStatistics, SampleThreshold, SearchConfig, fingerprint_of
        from ..engine.nemo.calibrated_threshold import Calibrated
        from ..engine.nemo.find import settings_of
        from ..engine.runtime.processes import launched

        calibrated = Calibrated.load(self.calibrated)
        statistics = NeuronStatistics.load(self.calibrated / "statistics.safetensors")
        workers, probe = launched(), calibrated.probe
        probe = replace(probe, seed=self.seed or probe.seed)
        pipe = _pipeline(self.model, self.load)
        calibrated.check(fingerprint_of(pipe._network))
        config = SearchConfig(
            tau=calibrated.tau, effect_fraction=self.effect_fraction, mode=self.mode, protocol=self.protocol
        )
        sampler = None if config.published else pipe.sampler(threshold=SampleThreshold.load(self.calibrated))
        prompts, _ = read_prompts(self.prompts)
        paths = {p: self.out / f"{hashlib.sha256(p.encode()).hexdigest()[:12]}.json" for p in prompts}
        settings = settings_of(pipe.probe(calibrated.scope, probe), config)
        inputs = pipe.search_inputs(statistics) | {"settings": settings, "threshold": sampler and sampler.threshold}
        with Run(self.out, "NEMO find", inputs, ("*.json",), workers):
            own_prompts = list(paths)[workers.index :: workers.count]
            open_prompts = [p for p in own_prompts if not paths[p].is_file()]
            bar = _bar("prompts", workers)
            for i in range(0, len(open_prompts), self.together):
                group = open_prompts[i : i + self.together]

                def after(step: int, total: int, preview: Any = None, done: int = i, count: int = len(group)) -> None:
                    bar(done + count * step // max(1, total), len(open_prompts))

                for result in pipe.find(group, statistics, config, probe, calibrated.scope, after, sampler):
                    neurons = pipe.neurons(result)
                    neurons.save(paths[result.prompt])
                    print(f"{result.verdict:<14} {len(neurons):>5} neurons  {result.prompt[:70]}")
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
    factor: float = 0.0
    """0 prunes."""
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
    "calibrate": Calibrate, "import-statistics": ImportStatistics, "score": ScorePrompts, "find": Find, "bake": Bake,
    "check": Check,
}  # fmt: skip
