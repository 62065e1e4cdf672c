"""What comes back as a copy: *Check for Copies (NEMO)* of prompts, and *LoRA Report* of a LoRA file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from comfy_api.latest import io, ui

from ..engine.copies import (
    CheckConfig,
    CopyCheck,
    LoraReport,
    Material,
    ReportConfig,
    check_copies,
    lora_report,
    write_check,
)
from ..engine.copies.lora_samples import USUAL
from ..engine.copies.nearest import overlay
from ..engine.copies.training_runs import checkpoints_beside
from ..engine.nemo import ProbeConfig, VerifyConfig
from .captions import captioned
from .comfy.copies import (
    CHECKS,
    REPORTS,
    ComfyModel,
    Models,
    Sampling,
    compared_stamp,
    instruments_of,
    lora_path,
    side_by_side,
    training_pictures,
    work_folder,
)
from .comfy.progress import progress, show_on, text_on
from .comfy.saved import lora_files, lora_stamp
from .comfy.schedule import SAMPLERS, SCHEDULERS
from .config_inputs import input_of, inputs_of, settings_from
from .nemo import CATEGORY, lines
from .sockets import under_advanced

SHOWN = 8
"""Prompts on the picture; the page in the folder has fifty."""


class NEMOCopyCheck(io.ComfyNode):
    """Prompts, or a LoRA and its training pictures, checked for copies."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Model, prompts and training pictures in; report and pictures out."""
        return io.Schema(
            node_id="VitrineNEMOCopyCheck",
            display_name="Check for Copies (NEMO)",
            category=CATEGORY,
            is_output_node=True,  # what it shows can be all one wants
            description="Samples each prompt with several seeds: how many samples are copies, where in the picture, "
            "and of which training picture. Writes a page and a table.",
            search_aliases=[
                "memorization", "does my LoRA copy", "overfitting", "training data replication", "nemo", "copyright",
                "duplicate", "plagiarism", "overtrained LoRA", "copied training pictures", "check lora",
                "duplicate pictures",
            ],
            hidden=[io.Hidden.unique_id],
            inputs=under_advanced(("first_seed", "tau", "timestep_index", "name"), [
                io.Model.Input("model", tooltip="The model to check, with its LoRA."),
                io.Clip.Input("clip", tooltip="Its text encoder."),
                io.Vae.Input("vae", tooltip="Its autoencoder."),
                io.Latent.Input("latent", tooltip="Gives the size, and by its batch how many are sampled at once."),
                io.String.Input("prompts", multiline=True, default="", placeholder="the prompts to check, one a line",
                                tooltip="Prompts to check, one a line."),
                io.String.Input(
                    "ordinary", multiline=True, default="", placeholder="a dog in the snow\na street at night",
                    tooltip="Captions that have nothing to do with the pictures, one a line: they say which distance "
                    "is usual. None: eight usual ones, or bare_model.",
                ),
                *inputs_of(CheckConfig, "seeds", "first_seed"),
                io.Int.Input("steps", default=20, min=1, max=1000, tooltip="Of sampling."),
                io.Float.Input("cfg", default=7.0, min=0.0, max=100.0, step=0.1, tooltip="Of sampling."),
                io.Combo.Input("sampler_name", options=SAMPLERS, default="euler", tooltip="As in KSampler."),
                io.Combo.Input("scheduler", options=SCHEDULERS, default="normal", tooltip="As in KSampler."),
                *inputs_of(VerifyConfig, "tau"),
                *inputs_of(ProbeConfig, "timestep_index"),
                io.String.Input(
                    "name", default="check", tooltip="Folder in output/vitrine_copy_check. It resumes there."
                ),
                io.Image.Input(
                    "pictures", optional=True, tooltip="Training pictures. None: samples are compared with each other."
                ),
                io.Model.Input("bare_model", optional=True, tooltip="The model without the LoRA: what is usual."),
            ]),
            outputs=[
                io.String.Output(display_name="report", tooltip="Which prompts are copied, in words."),
                io.Image.Output(display_name="side by side", tooltip="Sample, what of it is copied, training picture."),
                io.String.Output(display_name="folder", tooltip="Where copies.html and copies.csv are."),
            ],
        )  # fmt: skip

    @classmethod
    def execute(
        cls,
        model: Any,
        clip: Any,
        vae: Any,
        latent: dict,
        prompts: str,
        ordinary: str,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        tau: float,
        timestep_index: int,
        name: str,
        pictures: torch.Tensor | None = None,
        bare_model: Any = None,
        **options: Any,
    ) -> io.NodeOutput:
        """Interrupt works between two steps of sampling; the same inputs resume where it stopped."""
        usual = () if bare_model is not None else USUAL  # the model without the LoRA says what is usual
        config = settings_from(CheckConfig, options, ordinary=tuple(lines(ordinary, 0)) or usual)
        models, folder = Models(model, clip, vae, bare_model), work_folder(CHECKS, name)
        training = training_pictures(pictures)
        training = training if pictures is None else training.cropped(models.size(latent))
        sampling = Sampling(latent, steps, cfg, sampler_name, scheduler)
        instruments = instruments_of(models, sampling, ProbeConfig(timestep_index=timestep_index))
        check = check_copies(
            lines(prompts, 1),
            folder,
            instruments,
            training,
            config,
            tau=tau or None,
            progress=progress(hidden=cls.hidden),
        )
        write_check(folder, check, training)
        text, rows = check.text(), side_by_side(check, pictures, SHOWN)
        named = captioned(captioned(rows, columns(check)), [p.prompt for p in check.ranked[:SHOWN]])
        show_on(cls.hidden, torch.cat(list(named))[None])  # instead of the last sample, which would stay
        shown = ui.PreviewImage(named, cls=cls).as_dict() | text_on(text).as_dict()
        return io.NodeOutput(text, rows, str(folder), ui=shown)


def columns(check: CopyCheck) -> list[str]:
    """What is in each row, from left to right."""
    names = [f" | {check.names[int(p.numbers[p.closest])]}" if check.names else "" for p in check.ranked[:SHOWN]]
    counts = [f"{p.copies} of {len(p.ratios)} copied" for p in check.ranked[:SHOWN]]
    return [f"sample ({count}) | copied, in colour{name}" for count, name in zip(counts, names, strict=True)]


class LoraReportNode(io.ComfyNode):
    """One LoRA file, looked at from five sides."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Model, LoRA and what is known of it in; report, pictures and the page's folder out."""
        return io.Schema(
            node_id="VitrineLoRAReport",
            display_name="LoRA Report",
            category="Vitrine",
            description="Is a LoRA overfitted? Says what it is, where it acts, what it copies, what it costs and what "
            "is near it, with a verdict each, and writes a page.",
            search_aliases=["is my lora overfitted", "overtrained lora", "lora info", "inspect lora", "lora metadata",
                            "trigger words", "does my lora copy", "lora strength", "duplicate lora"],
            hidden=[io.Hidden.unique_id],
            inputs=under_advanced(("ordinary", "whole_run", "compare", "name"), [
                io.Model.Input("model", tooltip="The LoRA's base model, without the LoRA."),
                io.Clip.Input("clip", tooltip="Its text encoder."),
                io.Vae.Input("vae", tooltip="Its autoencoder."),
                io.Latent.Input("latent", tooltip="Gives the size of the samples."),
                io.Combo.Input("lora", options=lora_files(), tooltip="The LoRA file to look at."),
                io.String.Input("captions", multiline=True, default="",
                                tooltip="Captions that it was trained with, one a line. None: what the file says."),
                io.String.Input("trigger", default="", tooltip="Trigger words. None: what the file says."),
                io.String.Input("ordinary", multiline=True, default="",
                                tooltip="Prompts that have nothing to do with it, one a line. None: eight usual ones."),
                *inputs_of(ReportConfig, "seeds"),
                io.Float.Input("minutes", default=0.0, min=0.0, max=10000.0, step=0.5,
                               tooltip="Budget; what it leaves out is named, and the next run resumes. 0: no limit."),
                *inputs_of(ReportConfig, "first_seed", "steps"),
                input_of(ReportConfig, "guidance", "cfg"),
                *inputs_of(ReportConfig, "prompts"),
                io.Boolean.Input("compare", default=True,
                                 tooltip="Look for duplicates and merges in the LoRA's folder."),
                io.String.Input("name", default="report",
                                tooltip="Folder in output/vitrine_lora_report. It resumes there."),
                io.Image.Input("pictures", optional=True,
                               tooltip="Its training pictures. None: samples are compared with each other."),
                io.Boolean.Input("whole_run", default=False, optional=True,
                                 tooltip="Sample the other checkpoints of its training run, too: the first that "
                                 "copies. They are found by their names, which differ by a step."),
            ]),
            outputs=[
                io.String.Output(display_name="report", tooltip="The five sentences, with verdicts and advice."),
                io.Image.Output(display_name="side by side", tooltip="Of each prompt the nearest sample, and where."),
                io.String.Output(display_name="folder", tooltip="Where report.html and report.json are."),
            ],
            is_output_node=True,
        )  # fmt: skip

    @classmethod
    def fingerprint_inputs(cls, lora: str = "", compare: bool = True, **inputs: Any) -> str:
        """Runs again once the file, or one that it is compared with, has changed."""
        return compared_stamp(lora) if compare else lora_stamp(lora)

    @classmethod
    def execute(
        cls,
        model: Any,
        clip: Any,
        vae: Any,
        latent: dict,
        lora: str,
        captions: str,
        trigger: str,
        ordinary: str,
        minutes: float,
        cfg: float,
        compare: bool,
        name: str,
        pictures: torch.Tensor | None = None,
        whole_run: bool = False,
        **options: Any,
    ) -> io.NodeOutput:
        """Interrupt works between two prompts; the same inputs resume where it stopped."""
        config = settings_from(ReportConfig, options, guidance=cfg)
        path = lora_path(lora)
        words = tuple(part.strip() for part in trigger.split(",") if part.strip())
        material = Material(
            training_pictures(pictures),
            tuple(lines(captions, 0)),
            words,
            tuple(lines(ordinary, 0)) or USUAL,
            path.parent if compare else None,
        )
        holder = ComfyModel(model, clip, vae, latent)
        files = checkpoints_beside(path) if whole_run else [path]
        report = lora_report(
            files,
            work_folder(REPORTS, name),
            lambda: holder,
            material,
            config,
            minutes or None,
            progress(hidden=cls.hidden),
        )
        text, rows, names = report.text(), *agreeing(report, path)
        entries: dict[str, Any] = text_on(text).as_dict()
        if names:
            labelled = captioned(rows, names)
            show_on(cls.hidden, torch.cat(list(labelled))[None])
            entries = ui.PreviewImage(labelled, cls=cls).as_dict() | entries
        return io.NodeOutput(
            text, rows, str(report.folder), ui=entries | {"vitrine_verdicts": verdicts_of(report, path)}
        )


def verdicts_of(report: LoraReport, path: Path) -> list[dict[str, str]]:
    """The five sentences of a file, as the node's chips show them (``web/report.js``)."""
    (findings,) = [lora for lora in report.loras if lora.facts.path == path]
    return [{"topic": s.topic, "verdict": s.verdict, "text": s.text, "advice": s.advice} for s in findings.summary]


def agreeing(report: LoraReport, path: Path) -> tuple[torch.Tensor, list[str]]:
    """IMAGE (n, H, 2 W, 3): sample, and what of it agrees in colour; a name for each. Black where none was sampled."""
    (findings,) = [lora for lora in report.loras if lora.facts.path == path]
    if not findings.own:
        return torch.zeros(1, 64, 64, 3), []
    pairs = [torch.cat([p.shown, overlay(p.shown, p.where)], 2).movedim(0, -1) for p in findings.own]
    return torch.stack(pairs), [f"{p.kind}: {p.prompt}" for p in findings.own]


NODES = [NEMOCopyCheck, LoraReportNode]
