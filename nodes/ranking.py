"""Which places to tap on the model at hand, and the choice as a file."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io, ui

from ..engine.activations.filter import FilterRule
from ..engine.activations.pictures import Pictures
from ..engine.activations.preset_files import FeaturePreset
from ..engine.activations.ranking import Ranking, RankingConfig, rank_places
from ..engine.errors import refuse
from .comfy import saved
from .comfy.conditioning import condition_of
from .comfy.model import backbone_of, denoiser_of, encode, fingerprint
from .comfy.progress import progress
from .comfy.saved import plain_name
from .sockets import FeaturePresetSocket

CATEGORY = "Vitrine/activations"
_FOLDER = "vitrine_presets"


class RankActivations(io.ComfyNode):
    """GDF's recipe on any model: filter the places, compare those that remain."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Model, pictures and perhaps masks in; a preset, a report and strips out."""
        return io.Schema(
            node_id="VitrineRankActivations",
            display_name="Rank Activations",
            category=CATEGORY,
            description="Scores every place of a model for diffusion noise, granularity and locality, drops the bad "
            "ones and, with masks, measures the rest and combines the best.",
            search_aliases=["choose features", "feature selection", "which layer", "GDF filter"],
            inputs=[
                io.Model.Input("model", tooltip="The model whose places are ranked."),
                io.Vae.Input("vae", tooltip="Its VAE."),
                io.Conditioning.Input("positive", tooltip="What the pictures show; empty works."),
                io.Image.Input("images", tooltip="Two pictures or more; sixteen give steady scores."),
                io.String.Input("places", default="*", tooltip="Addresses or globs, such as up-*; * ranks all."),
                io.Float.Input("timestep", default=50.0, min=0.0, max=1000.0, step=1.0, tooltip="GDF takes 50."),
                io.Float.Input("noise", default=0.8, min=0.0, max=10.0, step=0.05,
                               tooltip="Largest noise score, in medians over all places; 0 is no bound."),
                io.Float.Input("granularity", default=2.0, min=0.0, max=10.0, step=0.1,
                               tooltip="Finest detail allowed, in medians over all places; 0 is no bound."),
                io.Int.Input("budget", default=0, min=0, max=100000, tooltip="Most channels together; 0 is no bound."),
                io.Int.Input("most", default=4, min=1, max=16, tooltip="Most places together."),
                io.Mask.Input("masks", optional=True,
                              tooltip="One for each picture, four or more: half of them judge the places."),
            ],
            outputs=[
                FeaturePresetSocket.Output(display_name="PRESET", tooltip="What was chosen, for Save Feature Preset."),
                io.String.Output(display_name="addresses", tooltip="The chosen places, for Activation Tap and others."),
                io.String.Output(display_name="report", tooltip="Each place, its figures, why it was dropped."),
                io.Image.Output(display_name="kept", tooltip="A strip of colours for each kept place, best first."),
                io.Image.Output(display_name="dropped", tooltip="The same for the first dropped places."),
            ],
        )  # fmt: skip

    @classmethod
    def execute(
        cls, model: Any, vae: Any, positive: list, images: torch.Tensor, places: str, timestep: float, noise: float,
        granularity: float, budget: int, most: int, masks: torch.Tensor | None = None,
    ) -> io.NodeOutput:  # fmt: skip
        """The pictures are encoded once; interrupt works between two forwards."""
        if masks is not None and masks.shape != images.shape[:3]:
            shown = (tuple(masks.shape), tuple(images.shape))
            raise refuse("masks", shown, "one of its size for each picture", "batch them in the same order")
        latents = encode(model, vae, images[..., :3])
        cond = condition_of(model, positive, latents)
        labels = None if masks is None else (masks > 0.5).long().to(latents.device)
        rule = FilterRule(noise or None, granularity or None)
        config = RankingConfig(places, timestep, rule, budget or None, most, strips=True)
        ranking = rank_places(denoiser_of(model), Pictures.of(latents, cond, labels), config, progress=progress())
        preset = ranking.preset("ranked", backbone_of(model), timestep, fingerprint(model))
        kept, dropped = strips(ranking, ranking.kept[:24]), strips(ranking, list(ranking.dropped)[:24])
        text = ranking.summary()
        return io.NodeOutput(preset, "\n".join(ranking.chosen), text, kept, dropped, ui=ui.PreviewImage(kept, cls=cls))


def strips(ranking: Ranking, addresses: list[str]) -> torch.Tensor:
    """IMAGE (N, 64, width, 3), one strip a place."""
    if not addresses:
        return torch.zeros(1, 8, 8, 3)
    return torch.stack([ranking.strip(a, 64) for a in addresses]).permute(0, 2, 3, 1)


class SaveFeaturePreset(io.ComfyNode):
    """Write a preset to output/vitrine_presets."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """A preset and a name in."""
        return io.Schema(
            node_id="VitrineSaveFeaturePreset",
            display_name="Save Feature Preset",
            category=CATEGORY,
            description="Writes the chosen places with their figures and the model's fingerprint, for others to load.",
            search_aliases=["export preset", "save places"],
            is_output_node=True,
            inputs=[
                FeaturePresetSocket.Input("preset", tooltip="From Rank Activations."),
                io.String.Input("name", default="preset", tooltip="File name without folder or ending."),
            ],
            outputs=[io.String.Output(display_name="path", tooltip="The file written.")],
        )

    @classmethod
    def execute(cls, preset: FeaturePreset, name: str) -> io.NodeOutput:
        """An existing file of that name is replaced whole."""
        path = preset.save(saved.folder(_FOLDER) / f"{plain_name(name)}.json")
        return io.NodeOutput(str(path), ui=ui.PreviewText(f"{path}\n" + "\n".join(preset.preset.addresses)))


class LoadFeaturePreset(io.ComfyNode):
    """Read a preset and check that it belongs to this model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """A file and the model in; places and timestep out."""
        files = saved.listed(_FOLDER, ".json")
        return io.Schema(
            node_id="VitrineLoadFeaturePreset",
            display_name="Load Feature Preset",
            category=CATEGORY,
            description="Reads places from output/vitrine_presets; a preset of another model is refused.",
            search_aliases=["import preset", "load places"],
            inputs=[
                io.Combo.Input("file", options=files or ["none saved yet"], tooltip="A saved .json file."),
                io.Model.Input("model", tooltip="The model it will be used with."),
            ],
            outputs=[
                FeaturePresetSocket.Output(display_name="PRESET", tooltip="As it was saved."),
                io.String.Output(display_name="addresses", tooltip="Connect to addresses; select 'addresses below'."),
                io.Float.Output(display_name="timestep", tooltip="The timestep it was chosen at."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, file: str, **others: Any) -> float:
        """Runs again when the file has changed."""
        return saved.changed(_FOLDER, file)

    @classmethod
    def execute(cls, file: str, model: Any) -> io.NodeOutput:
        """Load and check."""
        loaded = FeaturePreset.load(saved.path_of(_FOLDER, file))
        loaded.check(backbone_of(model), fingerprint(model))
        return io.NodeOutput(loaded, "\n".join(loaded.preset.addresses), loaded.preset.timestep)


NODES = [RankActivations, SaveFeaturePreset, LoadFeaturePreset]
