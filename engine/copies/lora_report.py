"""The LoRA report: what LoRA files are, where they act, what they copy, what they cost, and what is near them.

Nothing here knows a library: ComfyUI and diffusers pass a model that LoRAs can be put on. What needs no model comes
first and is written at once; samples are kept in the report's folder, so that the same call resumes where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import VitrineError, refuse
from ..io.files import write_json
from ..runtime.progress import Progress, silent
from ..settings.one_line import one_line
from ..settings.verdicts import COPIES_BAD
from ..w2w.loras.base_models import shaped_base
from ..w2w.loras.base_weights import BaseWeights
from ..w2w.loras.lora_facts import LoraFacts, facts_of
from ..w2w.loras.lora_files import read_header
from .lora_contents import MOST_FILES, files_to_compare, names_of, neighbours_in, readable_health
from .lora_findings import LOST_BAD, CopyReader, Findings, Samples, cost_of
from .lora_samples import (
    CAPTION,
    NATURAL,
    ORDINARY,
    TRIGGER,
    USUAL,
    AskedPrompt,
    Bench,
    Budget,
    ReportConfig,
    ReportModel,
    prompts_of,
)
from .nearest import Pictures
from .pages import write_page
from .training_runs import CopiesAtStep, TrainingRun, runs_among, with_copies

PAGE, TABLE = "report.html", "report.json"
SCHEMA = 1
"""Version of report.json; the tutorial *Is my LoRA overfitted?* has its fields."""
_FORWARDS = 2
"""Prompts of each kind that are compared forward by forward."""


@dataclass(frozen=True)
class Material:
    """What is known of the LoRAs besides their files.

    Attributes:
        pictures: their training pictures, see :class:`~.nearest.Pictures`.
        captions: of these.
        triggers: words that ask for what the LoRAs show; none: those that a file's header names.
        ordinary: prompts that have nothing to do with them.
        folder: of LoRAs to compare with; None: the report's own files.
    """

    pictures: Pictures = field(default_factory=Pictures)
    captions: tuple[str, ...] = ()
    triggers: tuple[str, ...] = ()
    ordinary: tuple[str, ...] = USUAL
    folder: Path | None = None


@one_line
@dataclass(frozen=True)
class LoraReport:
    """The outcome.

    Attributes:
        loras: of each file.
        folder: of the page, the table and the samples.
        budget: what was spent, and what was left out.
        config: as it was run; None without a model.
        runs: training runs that the files are checkpoints of.
    """

    loras: Sequence[Findings]
    folder: Path
    budget: Budget
    config: ReportConfig | None = None
    runs: Sequence[TrainingRun] = ()

    @property
    def page(self) -> Path:
        """One HTML file that needs no other file."""
        return self.folder / PAGE

    @property
    def unread(self) -> list[str]:
        """Names of the LoRAs whose files could not be read."""
        return [lora.name for lora in self.loras if lora.facts.file is None]

    def text(self) -> str:
        """The summaries in lines."""
        lines = [line for run in self.runs for line in run.lines()]
        for lora in self.loras:
            lines.append(f"{lora.name}: {lora.verdict}")
            for sentence in lora.summary:
                advice = f" {sentence.advice}" if sentence.advice else ""
                lines.append(f"  {sentence.topic} [{sentence.verdict}]: {sentence.text}{advice}")
            lines += [f"  left out for the budget: {part}" for part in lora.skipped]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        seconds = {part: round(value, 2) for part, value in self.budget.seconds.items()}
        settings = None if self.config is None else self.config.to_dict()
        rows = {"network_rows": self.budget.rows, "network_rows_of": dict(self.budget.rows_of)}
        spent = {"seconds": seconds, **rows, "minutes_allowed": self.budget.minutes}
        return {
            "schema": SCHEMA,
            "runs": [run.to_dict() for run in self.runs],
            "loras": [lora.to_dict() for lora in self.loras],
            "settings": settings,
            "spent": spent,
        }


def lora_report(
    files: str | Path | Sequence[str | Path],
    folder: str | Path,
    model: Callable[[], ReportModel] | None = None,
    material: Material | None = None,
    config: ReportConfig | None = None,
    minutes: float | None = None,
    progress: Progress = silent,
) -> LoraReport:
    """Report on LoRA files; the folder gets ``report.html``, ``report.json`` and the samples.

    Args:
        files: one or more, of any spelling; those that cannot be read are reported as such.
        model: makes the model once what needs none is written; None leaves out what needs it.
        minutes: budget of samples; what it does not allow is named, and the same call resumes with the next.
    """
    material, config, folder = material or Material(), config or ReportConfig(), Path(folder)
    if not isinstance(files, (str, Path, Sequence)):
        remedy = "lora_report(files, folder, lambda: PipelineModel(pipe))"
        raise refuse("files", type(files).__name__, "LoRA files", remedy)
    paths = [Path(files)] if isinstance(files, (str, Path)) else [Path(file) for file in files]
    if not paths:
        raise refuse("files", "none", "LoRA files", "give one or more")
    budget, names = Budget(minutes), names_of(paths)
    with budget.timed("without a model"):
        runs = _runs(paths, material)
        looked = [_look(path, name, material, paths, runs) for path, name in zip(paths, names, strict=True)]
        report = LoraReport(looked, folder, budget, runs=runs)
        if model is None or not (folder / TABLE).is_file():  # a whole report stays until there is a better one
            _write(report, material)
    if model is None:
        return report
    with budget.timed("loading the model"):
        bench = Bench(folder, model(), config, budget, progress)
    for number, findings in enumerate(looked):
        looked[number] = _measured(findings, bench, material)
        measured = [_run_with_copies(run, looked) for run in runs]
        report = LoraReport(looked, folder, budget, config, measured)
        _write(report, material)
    return report


def _runs(paths: Sequence[Path], material: Material) -> list[TrainingRun]:
    """Training runs that the files are checkpoints of, with those of their folder of comparison."""
    files = []
    for path in paths:
        with suppress(VitrineError):
            files.append(read_header(path))
    return runs_among(files, files_to_compare(paths, material.folder)[:MOST_FILES])


def _run_with_copies(run: TrainingRun, loras: Sequence[Findings]) -> TrainingRun:
    by_path = {lora.facts.path: lora for lora in loras}
    rows: list[CopiesAtStep | None] = []
    for path in run.paths:
        lora = by_path.get(path)
        own = [] if lora is None else lora.own
        if lora is None or not own:
            rows.append(None)
            continue
        worst = max(own, key=lambda p: ((p.copies or 0) / p.samples, p.lost))
        agreement = max(0.0, *(p.lost for p in own if p.lost == p.lost), 0.0)
        copied = lora.copy_score() >= (COPIES_BAD if lora.pictures else LOST_BAD)
        rows.append(CopiesAtStep(worst.copies if lora.pictures else None, worst.samples, agreement, copied))
    return with_copies(run, rows)


def _write(report: LoraReport, material: Material) -> None:
    write_json(report.folder / TABLE, report.to_dict())
    write_page(report.page, report.loras, report.to_dict(), material.pictures, report.runs)


def _look(path: Path, name: str, material: Material, paths: Sequence[Path], runs: Sequence[TrainingRun]) -> Findings:
    """What needs no model."""
    try:
        facts = facts_of(path)
    except VitrineError as error:  # an error of one file does not end the others
        return Findings(name, LoraFacts(path, 0, None, str(error), "not known"))
    if facts.file is None:
        return Findings(name, facts)
    health, problem = readable_health(facts.file)
    if health is None or health.broken("NaN or infinite"):
        return Findings(name, facts, health, problem)
    # checkpoints of one run are near each other, which is no finding
    of_the_runs = {other.resolve() for run in runs if path in run.paths for other in run.paths}
    others = [other for other in files_to_compare(paths, material.folder) if other.resolve() not in of_the_runs]
    try:
        near = neighbours_in(facts.file, others)
    except VitrineError:  # its numbers are finite, yet no weights
        near = None
    return Findings(name, facts, health, problem, neighbours=near)


def _measured(findings: Findings, bench: Bench, material: Material) -> Findings:
    """The same with everything that needs the model: samples, most telling first, and what is made of them."""
    facts, model, config, budget = findings.facts, bench.model, bench.config, bench.budget
    weights = getattr(model, "facts", None)
    if facts.file is None and "DoRA" in facts.problem and weights is not None:  # its change depends on the base weights
        facts = weights(facts.path)
        if facts.file is not None:
            health, problem = readable_health(facts.file)
            findings = replace(findings, health=health, health_problem=problem)
        findings = replace(findings, facts=facts)
    if facts.file is None or findings.health is None or findings.health.broken("NaN or infinite"):
        return findings
    asked = prompts_of(facts, material.captions, material.triggers, material.ordinary, config.prompts, model.pieces)
    ordinary, own = ([p.text for p in asked if (p.kind == ORDINARY) == plain] for plain in (True, False))
    captions = [p.text for p in asked if p.kind in (CAPTION, TRIGGER)][: config.prompts]
    kinds = (CAPTION, TRIGGER, NATURAL, ORDINARY)
    chosen = [text for kind in kinds for text in [p.text for p in asked if p.kind == kind][:_FORWARDS]]
    with ExitStack() as stack:
        try:
            loading = stack.enter_context(model.lora(facts))
        except VitrineError as error:
            return replace(findings, health_problem=_wrong_base(facts, model, error), health=None)
        stack.enter_context(bench.of(findings.name, facts))
        bench.total = 2 * len(asked) + len(config.strengths) * len(captions)
        left_out = len(budget.skipped)
        bare = bench.samples(ordinary, 0.0, "without the LoRA") | bench.samples(own, 0.0, "without the LoRA")
        full = bench.samples(own, 1.0, "own prompts")
        full |= bench.samples(ordinary, 1.0, "ordinary prompts")
        changes = bench.changes(chosen, "one forward at each timestep") if full else {}
        at = {s: bench.samples(captions, s, f"strength {s:g}") for s in config.strengths}
        findings = replace(
            findings,
            loadings=(loading,),
            pictures=tuple(material.pictures.names),
            changes=changes,
            kinds={p.text: p.kind for p in asked},
            cost=cost_of(asked, bare, full),
            skipped=tuple(budget.skipped[left_out:]),
            asked={p.text: p.kind for p in asked},
            asked_strengths=tuple(config.strengths) if captions else (),
            asked_changes=tuple(chosen),
        )
        if len(bare) < 2 or not full:
            return findings
        with CopyReader(bare, own, material.pictures, bench.folder) as reader:
            copies = [reader.of_prompt(p, full[p.text]) for p in asked if p.text in full]
            at[1.0] = {p: full[p] for p in captions if p in full}
            strengths = {s: _at_strength(reader, samples) for s, samples in sorted(at.items()) if samples}
        return replace(findings, copies=tuple(copies), strengths=strengths)


_LONGEST_REASON = 300


def _wrong_base(facts: LoraFacts, model: ReportModel, error: VitrineError) -> str:
    """One line that names the LoRA's base model and the model, or else begins with the library's reason."""
    assert facts.file is not None
    backbone = getattr(model, "backbone", None)
    weights = None if backbone is None else BaseWeights.of_module(backbone)
    shapes = {} if weights is None else {path: weights.shape(path) for path in weights}
    own = shaped_base({path: shape for path, shape in shapes.items() if len(shape) > 1})
    known = facts.file.base_model
    if own and known != own:
        return f"it cannot be put on this model: it is for {known}, the model is {own}"
    reason = " ".join(str(error).split())
    return f"it cannot be put on this model: {reason[:_LONGEST_REASON]}{'...' if len(reason) > _LONGEST_REASON else ''}"


def _at_strength(reader: CopyReader, samples: Samples) -> dict[str, float]:
    """Distance between samples, the largest share of it that is lost, and the share of copies, at one strength."""
    rows = [reader.of_prompt(AskedPrompt(text, CAPTION), pictures) for text, pictures in samples.items()]
    table = {"distance": sum(p.distance for p in rows) / len(rows), "lost": max(p.lost for p in rows)}
    if reader.by_pictures:
        table["copies"] = max((p.copies or 0) / p.samples for p in rows)
    return {name: round(value, 4) for name, value in table.items()}
