"""NEMO Copy Check: which prompts come back as copies, how often, where in the picture, and of which picture."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io, ui

from ..engine.nemo import ProbeConfig
from ..engine.nemo.check import CheckConfig, CopyCheck
from .captions import captioned
from .comfy.copy_check import Models, Sampling, checked, side_by_side
from .comfy.pictures import as_pictures
from .comfy.progress import progress, show_on, text_on
from .comfy.schedule import SAMPLERS, SCHEDULERS
from .nemo import CAPTIONS, CATEGORY, INDEX, TAU, lines
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
            display_name="NEMO Copy Check",
            category=CATEGORY,
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
                io.String.Input("prompts", multiline=True, default="a smiling face with navy shirt on blue",
                                tooltip="Prompts to check, one a line."),
                io.String.Input(
                    "ordinary", multiline=True, default=CAPTIONS,
                    tooltip="Captions that have nothing to do with the pictures, one a line: they say which distance "
                    "is usual. Not needed with bare_model.",
                ),
                io.Int.Input("seeds", default=8, min=2, max=256, tooltip="Samples of each prompt."),
                io.Int.Input("first_seed", default=2000, min=0, max=2**31, tooltip="Of these samples."),
                io.Int.Input("steps", default=20, min=1, max=1000, tooltip="Of sampling."),
                io.Float.Input("cfg", default=7.0, min=0.0, max=100.0, step=0.1, tooltip="Of sampling."),
                io.Combo.Input("sampler_name", options=SAMPLERS, default="euler", tooltip="As in KSampler."),
                io.Combo.Input("scheduler", options=SCHEDULERS, default="normal", tooltip="As in KSampler."),
                TAU,
                INDEX,
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
        cls, model: Any, clip: Any, vae: Any, latent: dict, prompts: str, ordinary: str, seeds: int, first_seed: int,
        steps: int, cfg: float, sampler_name: str, scheduler: str, tau: float, timestep_index: int, name: str,
        pictures: torch.Tensor | None = None, bare_model: Any = None,
    ) -> io.NodeOutput:  # fmt: skip
        """Interrupt works between two steps of sampling; the same inputs resume where it stopped."""
        pictures = None if pictures is None else as_pictures(pictures, "pictures")
        config = CheckConfig(seeds, first_seed, ordinary=tuple(lines(ordinary, 0)))
        check, folder = checked(
            Models(model, clip, vae, bare_model), lines(prompts, 1), name,
            Sampling(latent, steps, cfg, sampler_name, scheduler), pictures, config,
            (ProbeConfig(timestep_index=timestep_index), tau or None), progress(),
        )  # fmt: skip
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


NODES = [NEMOCopyCheck]
