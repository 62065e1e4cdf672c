"""LoRA Report: what a LoRA is, where it acts, what it copies, what it costs, and what is near it."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io, ui

from ..engine.nemo.nearest import overlay
from ..engine.pipelines.lora_report_samples import ReportConfig
from ..engine.pipelines.lora_reports import LoraReport
from .captions import captioned
from .comfy.lora_report import Asked, ComfyModel, compared_stamp, page_entry, reported
from .comfy.pictures import as_pictures
from .comfy.progress import progress, show_on, text_on
from .comfy.saved import known_files, stamp_of
from .nemo import lines
from .sockets import under_advanced


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
            inputs=under_advanced(("ordinary", "first_seed", "prompts", "compare", "name"), [
                io.Model.Input("model", tooltip="The LoRA's base model, without the LoRA."),
                io.Clip.Input("clip", tooltip="Its text encoder."),
                io.Vae.Input("vae", tooltip="Its autoencoder."),
                io.Latent.Input("latent", tooltip="Gives the size of the samples."),
                io.Combo.Input("lora", options=known_files("loras"), tooltip="The LoRA file to look at."),
                io.String.Input("captions", multiline=True, default="",
                                tooltip="Captions that it was trained with, one a line. None: what the file says."),
                io.String.Input("trigger", default="", tooltip="Trigger words. None: what the file says."),
                io.String.Input("ordinary", multiline=True, default="",
                                tooltip="Prompts that have nothing to do with it, one a line. None: eight usual ones."),
                io.Int.Input("seeds", default=4, min=2, max=64, tooltip="Samples of each prompt."),
                io.Float.Input("minutes", default=0.0, min=0.0, max=10000.0, step=0.5,
                               tooltip="Budget; what it leaves out is named, and the next run resumes. 0: no limit."),
                io.Int.Input("first_seed", default=2000, min=0, max=2**31, tooltip="Of these samples."),
                io.Int.Input("steps", default=4, min=1, max=100, tooltip="Of sampling; four are enough to see a copy."),
                io.Float.Input("cfg", default=3.0, min=0.0, max=100.0, step=0.1, tooltip="Guidance of these samples."),
                io.Int.Input("prompts", default=4, min=1, max=64, tooltip="Captions that are sampled, at most."),
                io.Boolean.Input("compare", default=True,
                                 tooltip="Look for duplicates and merges in the LoRA's folder."),
                io.String.Input("name", default="report",
                                tooltip="Folder in output/vitrine_lora_report. It resumes there."),
                io.Image.Input("pictures", optional=True,
                               tooltip="Its training pictures. None: samples are compared with each other."),
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
        return compared_stamp(lora) if compare else stamp_of("loras", lora)

    @classmethod
    def execute(
        cls, model: Any, clip: Any, vae: Any, latent: dict, lora: str, captions: str, trigger: str, ordinary: str,
        seeds: int, minutes: float, first_seed: int, steps: int, cfg: float, prompts: int, compare: bool, name: str,
        pictures: torch.Tensor | None = None,
    ) -> io.NodeOutput:  # fmt: skip
        """Interrupt works between two prompts; the same inputs resume where it stopped."""
        config = ReportConfig(seeds, first_seed, steps, cfg, prompts=prompts)
        shown = None if pictures is None else as_pictures(pictures, "pictures")[..., :3].movedim(-1, 1).float().cpu()
        words = [part.strip() for part in trigger.split(",") if part.strip()]
        asked = Asked(lora, name, lines(captions, 0), words, lines(ordinary, 0), shown, minutes, compare)
        report = reported(ComfyModel(model, clip, vae, latent), asked, config, progress())
        text, rows, names = report.text(), *side_by_side(report)
        entries: dict[str, Any] = text_on(text).as_dict()
        if names:
            labelled = captioned(rows, names)
            show_on(cls.hidden, torch.cat(list(labelled))[None])
            entries = ui.PreviewImage(labelled, cls=cls).as_dict() | entries
        return io.NodeOutput(text, rows, str(report.folder), ui=entries | {"vitrine_page": [page_entry(report)]})


def side_by_side(report: LoraReport) -> tuple[torch.Tensor, list[str]]:
    """IMAGE (n, H, 2 W, 3): sample, and what of it agrees in colour; a name for each. Black where none was sampled."""
    (findings,) = report.loras
    if not findings.own:
        return torch.zeros(1, 64, 64, 3), []
    pairs = [torch.cat([p.shown, overlay(p.shown, p.where)], 2).movedim(0, -1) for p in findings.own]
    return torch.stack(pairs), [f"{p.kind}: {p.prompt}" for p in findings.own]


NODES = [LoraReportNode]
