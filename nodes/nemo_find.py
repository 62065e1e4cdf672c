"""NEMO Find Neurons: the neurons that encode a memorized picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from comfy_api.latest import io, ui

from ..engine.errors import refuse
from ..engine.nemo import NeuronSet, ProbeConfig, SampleThreshold, SearchConfig, find_neurons, make_probe
from ..engine.nemo.heat_map import BRIGHT, DARK, heat_map
from ..engine.nemo.search_config import MODES, PROTOCOLS
from ..engine.nemo.sites import SCOPES
from .captions import banded
from .comfy.conditioning import condition_of
from .comfy.model import active_fingerprint, backbone_of, blank_latents, denoiser_of, fingerprint
from .comfy.progress import progress, text_on
from .comfy.prompt_words import text_behind, words_at
from .nemo import CATEGORY, INDEX, SEEDS, TAU, shape_of
from .nemo_samples import sampler_of
from .sockets import NeuronsSocket, NeuronStatisticsSocket, SampleThresholdSocket, under_advanced


class NEMOFindNeurons(io.ComfyNode):
    """The neurons that encode a memorized picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Model, conditioning and statistics in; neurons, report and heat map out."""
        return io.Schema(
            node_id="VitrineNEMOFindNeurons",
            display_name="NEMO Find Neurons",
            category=CATEGORY,
            description="Searches the few value neurons whose blocking changes what a memorized prompt predicts. With "
            "a sample threshold, samples before and after say what it did.",
            search_aliases=[
                "localize memorization", "find memorization neurons", "nemo", "memorized picture", "copied picture",
                "find neurons", "stop copying", "training picture",
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
            inputs=under_advanced(("mode", "scope", "protocol"), [
                io.Model.Input("model", tooltip="The model to search."),
                io.Conditioning.Input("positive", tooltip="The prompt to search."),
                io.Latent.Input("latent", tooltip="Gives the size: connect Empty Latent Image."),
                NeuronStatisticsSocket.Input("statistics", tooltip="From NEMO Statistics, same model."),
                TAU,
                io.Float.Input(
                    "effect_fraction", default=0.98, min=0.01, max=1.0, step=0.01,
                    tooltip="The search ends when blocking has this fraction of the effect of blocking everything. The "
                            "protocol nemo ends at the threshold instead.",
                ),
                io.Combo.Input("mode", options=list(MODES), default="chain",
                               tooltip="chain tests several neurons at once; parity one, measured as the authors do."),
                SEEDS,
                INDEX,
                io.Combo.Input("scope", options=list(SCOPES), tooltip="As in the statistics."),
                io.Combo.Input(
                    "protocol", options=list(PROTOCOLS), default=PROTOCOLS[0], optional=True,
                    tooltip="vitrine searches the prompt you give; nemo only one that scores above the threshold, as "
                    "published.",
                ),
                io.Conditioning.Input("negative", optional=True, tooltip="An empty prompt, for the samples."),
                SampleThresholdSocket.Input(
                    "threshold", optional=True,
                    tooltip="From NEMO Sample Threshold: samples before and after then judge the search.",
                ),
                io.Clip.Input(
                    "clip", optional=True,
                    tooltip="The prompt's text encoder: neurons are then listed with words instead of positions.",
                ),
            ]),
            outputs=[
                NeuronsSocket.Output(display_name="NEURONS", tooltip="For Neuron Blocker, Bake, Save Neurons."),
                io.String.Output(display_name="report", tooltip="Verdict, scores, neurons of each layer."),
                io.Image.Output(display_name="heat_map", tooltip="Layers by neurons; kept ones are bright."),
            ],
        )  # fmt: skip

    @classmethod
    def execute(
        cls, model: Any, positive: list, latent: dict, statistics: Any, tau: float, effect_fraction: float, mode: str,
        seeds: int, timestep_index: int, scope: str, protocol: str = PROTOCOLS[0], negative: list | None = None,
        threshold: SampleThreshold | None = None, clip: Any = None,
    ) -> io.NodeOutput:  # fmt: skip
        """Search, judge; interrupt works between two forwards."""
        model_id = fingerprint(model)
        statistics.check(backbone_of(model), active_fingerprint(model))
        blank = blank_latents(model, latent)[:1]
        config = SearchConfig(tau=tau or None, effect_fraction=effect_fraction, mode=mode, protocol=protocol)
        probe = make_probe(
            denoiser_of(model), scope, ProbeConfig(seeds=seeds, timestep_index=timestep_index), config.rows
        )
        cond = condition_of(model, positive, blank)
        shape = shape_of(blank)
        sampler = None
        if threshold is not None:
            if negative is None:
                raise refuse("negative", None, "a condition together with the threshold", "connect an empty prompt")
            sampler = sampler_of(model, negative, blank, threshold.config, threshold)
        prompt = text_behind(cls.hidden, "positive")
        (result,) = find_neurons(probe, [prompt or "prompt"], [cond], statistics, shape, config, progress(), sampler)
        if clip is not None and prompt is not None and cond.text is not None:
            result = result.with_words(words_at(clip, prompt, cond.text.shape[1]))
        neurons = result.neurons(model_id)
        widths = {s.address: len(statistics.means[s.address]) for s in probe.sites}
        text, picture = describe(neurons), heat_map(neurons, widths)
        shown = ui.PreviewImage(by_layer(neurons, widths), cls=cls).as_dict() | text_on(text).as_dict()
        return io.NodeOutput(neurons, text, picture[None], ui=shown)


def by_layer(neurons: NeuronSet, widths: Mapping[str, int]) -> torch.Tensor:
    """The heat map with each layer's name above it, and what the colours mean below."""
    kept = {a: neurons.neurons.get(a, ()) for a in widths}
    bands = {f"{a}: {len(kept[a])} of {w}": heat_map(NeuronSet({a: kept[a]}), {a: w}) for a, w in widths.items()}
    bright, dark = ("#{:02x}{:02x}{:02x}".format(*(round(255 * v) for v in c)) for c in (BRIGHT, DARK))
    return banded(bands, {bright: "holds the picture", dark: "does not"})


def describe(neurons: NeuronSet) -> str:
    """Verdict and neurons by layer, in words."""
    lines = [f"{neurons.info.get('verdict', 'imported')}: {len(neurons)} neurons"]
    if "score_after" in neurons.info:
        lines.append(
            f"seeds agree by {neurons.info['score_before']:.3f} before, {neurons.info['score_after']:.3f} after"
            f" ({neurons.info.get('metric', 'MS-SSIM')})"
        )
    if "samples_after" in neurons.info:
        before, after = (neurons.info[f"samples_{when}"] for when in ("before", "after"))
        lines.append(
            f"{after['samples']} samples differ by {before['distance']:.4f} before, {after['distance']:.4f} after"
            f" (memorized is below {after['threshold']:.4f}; {after['settings']['steps']} steps, guidance "
            f"{after['settings']['guidance']:g}, first seed {after['settings']['first_seed']})"
        )
    return "\n".join(lines + [f"{a}: {' '.join(map(str, n))}" for a, n in neurons.neurons.items()])


NODES = [NEMOFindNeurons]
