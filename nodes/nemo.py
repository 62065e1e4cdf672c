"""NEMO nodes: is a prompt memorized, and by which neurons."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io

from ..engine.errors import refuse
from ..engine.io.tables import lines_of
from ..engine.nemo import (
    ProbeConfig,
    gather,
    make_probe,
    score_prompts,
    threshold,
    value_activations,
    value_sites,
)
from ..engine.nemo.neuron_statistics import NeuronStatistics, published_statistics
from ..engine.nemo.sites import SCOPES
from .comfy import saved
from .comfy.conditioning import condition_of, prompt_conditions
from .comfy.model import active_fingerprint, blank_latents, denoiser_of
from .comfy.nemo import previews
from .comfy.progress import progress, text_on
from .sockets import NeuronStatisticsSocket

CATEGORY = "Vitrine/memorization"
STATISTICS, MEASURED = "vitrine_statistics", "none: measure captions"
"""Folder of published files, and the entry that takes none."""
SEEDS = io.Int.Input("seeds", default=10, min=2, max=64, tooltip="Noises compared with each other; the paper: 10.")
INDEX = io.Int.Input(
    "timestep_index", default=1, min=0, max=49,
    tooltip="Which of a run's 50 DDIM steps is looked at, from 0: 1 (timestep 961) is published; small models may need "
    "4 to 15.",
)  # fmt: skip
TAU = io.Float.Input(
    "tau", default=0.0, min=0.0, max=1.0, step=0.001,
    tooltip="Threshold of memorization, from NEMO Threshold: 0.428 is SD1.4's at 512 px. 0: a score without a verdict.",
)  # fmt: skip
CAPTIONS = """a smiling face
a pale face with long blond hair
a dark face with curly hair on pink
a face with glasses and a cap
a bald head with a beard
a face with a navy shirt on gray
an old face with white hair
a face with red hair on blue"""
PROMPTS = io.String.Input(
    "prompts", multiline=True, default=CAPTIONS,
    tooltip="Ordinary captions, one a line: the more the better, 500 or more. These eight only show how.",
)  # fmt: skip


def lines(prompts: str, least: int) -> list[str]:
    """Prompts, one a line."""
    texts = lines_of(prompts)
    if len(texts) < least:
        raise refuse("prompts", f"{len(texts)} lines", f"{least} or more, one a line", "paste ordinary captions")
    return texts


def shape_of(latents: torch.Tensor) -> tuple[int, int, int]:
    """(C, h, w) of one picture's latent, with or without a frame axis."""
    channels, *frames, height, width = latents.shape[1:]
    if frames not in ([], [1]):
        remedy = "connect Empty Latent Image, or a length of 1"
        raise refuse("latent", f"a video of {frames[0]} latent frames", "a still picture", remedy)
    return channels, height, width


class NEMOStatistics(io.ComfyNode):
    """Mean and deviation of every value neuron over ordinary captions."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Model, text encoder and captions in; statistics out."""
        return io.Schema(
            node_id="VitrineNEMOStatistics",
            display_name="NEMO Statistics",
            category=CATEGORY,
            description="How active each cross-attention value neuron is for ordinary captions, once for a model.",
            search_aliases=["memorization", "neuron statistics", "calibrate nemo"],
            inputs=[
                io.Model.Input("model", tooltip="The model whose neurons are measured."),
                io.Clip.Input("clip", tooltip="Its text encoder."),
                PROMPTS,
                io.Combo.Input("scope", options=list(SCOPES), tooltip="down+mid: as published; all: up stage too."),
                io.Combo.Input(
                    "published",
                    options=[MEASURED, *saved.listed(STATISTICS, ".pt")],
                    default=MEASURED,
                    optional=True,
                    advanced=True,
                    tooltip="The authors' statistics of SD 1.4, a .pt file in models/vitrine_statistics, "
                    "instead of captions. The threshold is then 0.428.",
                ),
            ],
            outputs=[
                NeuronStatisticsSocket.Output(display_name="STATISTICS", tooltip="For NEMO Find Neurons."),
                io.String.Output(display_name="report", tooltip="Layers, neurons, captions."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, published: str = MEASURED, **_: Any) -> str:
        """Runs again when the published file has changed."""
        return "" if published == MEASURED else saved.changed(STATISTICS, published)

    @classmethod
    def execute(cls, model: Any, clip: Any, prompts: str, scope: str, published: str = MEASURED) -> io.NodeOutput:
        """One text encoding a caption; no denoising at all where the values depend on the text alone."""
        denoiser = denoiser_of(model)
        if published != MEASURED:
            statistics = published_statistics(saved.path_of(STATISTICS, published), denoiser.backbone)
            return io.NodeOutput(statistics, f"{_size(statistics)}, as published")
        texts = lines(prompts, 2)
        sites = value_sites(denoiser.backbone, scope)
        channels = model.get_model_object("latent_format").latent_channels
        blank = torch.randn(1, channels, 16, 16, generator=torch.Generator().manual_seed(1)).to(model.load_device)

        def batches() -> Any:
            for text in texts:
                (cond,) = prompt_conditions(model, clip, [text], blank)
                yield value_activations(denoiser, cond, sites, blank)

        addresses = [s.address for s in sites]
        statistics = gather(batches(), addresses, active_fingerprint(model), len(texts), progress())
        return io.NodeOutput(statistics, f"{_size(statistics)}, {statistics.count} captions")


def _size(statistics: NeuronStatistics) -> str:
    return f"{len(statistics.means)} layers, {sum(map(len, statistics.means.values()))} neurons"


class NEMOThreshold(io.ComfyNode):
    """The threshold of memorization for this model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Captions in, tau out."""
        return io.Schema(
            node_id="VitrineNEMOThreshold",
            display_name="NEMO Threshold",
            category=CATEGORY,
            description="Mean plus one deviation of the scores of ordinary captions, under the settings you will use.",
            search_aliases=["calibrate threshold", "tau", "memorization threshold"],
            inputs=[
                io.Model.Input("model", tooltip="The model to calibrate for."),
                io.Clip.Input("clip", tooltip="Its text encoder."),
                io.Latent.Input("latent", tooltip="Gives the size: connect Empty Latent Image."),
                PROMPTS,
                SEEDS,
                INDEX,
            ],
            outputs=[
                io.Float.Output(display_name="tau", tooltip="For NEMO Score and NEMO Find Neurons."),
                io.String.Output(display_name="report", tooltip="Mean, deviation, number of captions."),
            ],
        )

    @classmethod
    def execute(
        cls, model: Any, clip: Any, latent: dict, prompts: str, seeds: int, timestep_index: int
    ) -> io.NodeOutput:
        """Score every caption: ``seeds`` network rows each."""
        texts, blank = lines(prompts, 2), blank_latents(model, latent)[:1]
        conds = prompt_conditions(model, clip, texts, blank)
        probe = make_probe(denoiser_of(model), config=ProbeConfig(seeds=seeds, timestep_index=timestep_index))
        scores, _ = score_prompts(probe, conds, shape_of(blank), 1.0, progress())
        tau, mean, std = threshold([s.value for s in scores])
        return io.NodeOutput(tau, f"tau {tau:.4f} = mean {mean:.4f} + std {std:.4f} of {len(texts)} captions")


class NEMOScore(io.ComfyNode):
    """Is a prompt memorized."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Model and conditioning in; score, verdict and previews out."""
        return io.Schema(
            node_id="VitrineNEMOScore",
            display_name="NEMO Score",
            category=CATEGORY,
            description="Compares one-step predictions from several noises: a memorized prompt predicts one picture.",
            search_aliases=[
                "memorization score",
                "is this prompt memorized",
                "training data replication",
                "plagiarism",
                "copyright",
                "duplicate",
                "is it copied",
            ],
            hidden=[io.Hidden.unique_id],
            inputs=[
                io.Model.Input("model", tooltip="The model to check."),
                io.Conditioning.Input("positive", tooltip="The prompt."),
                io.Latent.Input("latent", tooltip="Gives the size: connect Empty Latent Image."),
                TAU,
                SEEDS,
                INDEX,
                io.Vae.Input("vae", optional=True, tooltip="Connect it to see the predictions as pictures."),
            ],
            outputs=[
                io.Float.Output(display_name="score", tooltip="Largest similarity of two seeds, 0..1."),
                io.Boolean.Output(display_name="memorized", tooltip="True if the score is above the threshold."),
                io.Image.Output(display_name="previews", tooltip="One-step prediction of each seed (with a VAE)."),
            ],
        )

    @classmethod
    def execute(
        cls, model: Any, positive: list, latent: dict, tau: float, seeds: int, timestep_index: int,
        vae: Any = None,
    ) -> io.NodeOutput:  # fmt: skip
        """One forward of ``seeds`` rows, and one more for the previews."""
        blank = blank_latents(model, latent)[:1]
        probe = make_probe(denoiser_of(model), config=ProbeConfig(seeds=seeds, timestep_index=timestep_index))
        cond = condition_of(model, positive, blank, probe.t)
        shape = shape_of(blank)
        ((score,), _) = score_prompts(probe, [cond], shape, tau or None, progress())
        pictures = previews(model, vae, probe, cond, shape) if vae else torch.zeros(1, 8, 8, 3)
        memorized = score.tau is not None and score.memorized
        verdict = (
            "no verdict: connect NEMO Threshold" if score.tau is None else "memorized" if memorized else "not memorized"
        )
        made = f"{seeds} seeds of one generator, seed {probe.config.seed}, timestep index {timestep_index} of 50"
        text = f"{verdict}: score {score.value:.3f}, tau {tau:.3f}\n{made}; {score.metric}"
        return io.NodeOutput(score.value, memorized, pictures, ui=text_on(text))


NODES = [NEMOStatistics, NEMOThreshold, NEMOScore]
