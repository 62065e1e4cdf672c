"""Which places to tap on the model at hand, and the choice as a file."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io, ui

from ..engine.activations.correspondence import parse_keypoints
from ..engine.activations.presets import FeaturePreset
from ..engine.activations.ranked_pictures import Pictures, known_pairs
from ..engine.activations.ranking import Ranking, RankingConfig, rank_sites
from ..engine.activations.segmentation import IGNORE
from ..engine.errors import refuse
from ..engine.io.file_names import safe_name
from ..engine.settings.ranking_options import FilterRule
from ..engine.tracing.addresses import resolve, sites_of
from .captions import captioned
from .comfy import choices, saved
from .comfy.carried import foreign_keys
from .comfy.conditioning import condition_of
from .comfy.model import backbone_of, denoiser_of, encode, fingerprint
from .comfy.panel_state import HIDDEN, marked
from .comfy.patches import refuse_other_tokens
from .comfy.pictures import as_masks, as_pictures
from .comfy.progress import progress, text_on
from .config_inputs import inputs_of, settings_from
from .sockets import FeaturePresetSocket, under_advanced

CATEGORY = "Vitrine/activations"
ADVANCED = ("timestep", "noise", "granularity", "budget", "most", "split", "folds", "classes", "memory")
_FOLDER = "vitrine_presets"


class RankActivations(io.ComfyNode):
    """GDF's recipe on any model: filter the places, compare those that remain."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Model, pictures and perhaps masks in; a preset, a report and strips out."""
        return io.Schema(
            node_id="VitrineRankActivations",
            display_name="Rank Layers",
            category=CATEGORY,
            is_output_node=True,  # what it shows can be all one wants
            description="Scores every layer of a model for diffusion noise, granularity and locality, drops the bad "
                        "ones and, with masks, measures the rest and combines the best.",
            hidden=HIDDEN,
            has_intermediate_output=True,
            inputs=under_advanced(ADVANCED, [
                io.Model.Input("model", tooltip="The model whose layers are ranked."),
                io.Vae.Input("vae", tooltip="Its VAE."),
                io.Conditioning.Input("positive", tooltip="What the pictures show; empty works."),
                io.Image.Input("images", tooltip="Two pictures or more; sixteen give steady scores."),
                *inputs_of(RankingConfig, "layers"),
                *inputs_of(RankingConfig, "timestep"),
                *inputs_of(FilterRule, "noise", "granularity"),
                *inputs_of(RankingConfig, "budget", "most"),
                io.Mask.Input("masks", optional=True,
                              tooltip="One for each picture, four or more: half of them judge the layers."),
                *inputs_of(RankingConfig, "split", "folds", optional=True),
                io.Int.Input("classes", default=2, min=2, max=255, optional=True,
                             tooltip="2: white against black; more: grey values 0, 1, 2 ... of 255 are classes, 255 "
                             "is unknown."),
                io.String.Input("keypoints", default="", multiline=True, optional=True,
                                tooltip="Instead of masks, a line for each picture: x y; x y; - (hidden), the same "
                                "points in the same order."),
                io.String.Input("memory", default="4GB", optional=True,
                                tooltip="Memory beyond the model; the rest waits on disk. Empty: no bound."),
            ]),
            outputs=[
                FeaturePresetSocket.Output(display_name="PRESET", tooltip="What was chosen, for Save Layer Preset."),
                io.String.Output(
                    display_name="layers", tooltip="The chosen layers, for Look Inside (Activation Tap) and others."
                ),
                io.String.Output(display_name="report", tooltip="Each layer, its figures, why it was dropped."),
                io.Image.Output(display_name="kept", tooltip="A strip of colours for each kept layer, best first."),
                io.Image.Output(display_name="dropped", tooltip="The same for the first dropped layers."),
            ],
        )  # fmt: skip

    @classmethod
    def execute(
        cls,
        model: Any,
        vae: Any,
        positive: list,
        images: torch.Tensor,
        layers: str,
        masks: torch.Tensor | None = None,
        classes: int = 2,
        keypoints: str = "",
        memory: str = "4GB",
        **options: Any,
    ) -> io.NodeOutput:
        """The pictures are encoded once; interrupt works between two forwards."""
        choices.remember(cls.hidden, sites_of(backbone_of(model)))
        images = as_pictures(images, "images")
        masks = None if masks is None else as_masks(masks, images, "masks")
        labels = None if masks is None else class_numbers(masks, classes)
        points = parse_keypoints(keypoints, len(images), (images.shape[2], images.shape[1])) if keypoints else None
        pairs = None if points is None else known_pairs(points, len(images))
        refuse_other_tokens(model, (site.address for site in resolve(backbone_of(model), layers)))
        rule = settings_from(FilterRule, options)
        config = settings_from(RankingConfig, options, layers=layers, rule=rule, strips=True)
        latents = encode(model, vae, images)
        pictures = Pictures.of(latents, condition_of(model, positive, latents, config.timestep), labels, pairs)
        ranking = rank_sites(denoiser_of(model), pictures, config, memory=memory or None, progress=progress())
        preset = ranking.preset("ranked", backbone_of(model), config.timestep, fingerprint(model))
        kept, dropped = strips(ranking, ranking.kept[:24]), strips(ranking, list(ranking.dropped)[:24])
        named = [f"{n + 1}. {place}" for n, place in enumerate(ranking.kept[:24])] or ["no place was kept"]
        text = "\n".join(filter(None, (ranking.summary(), foreign_keys(positive))))
        shown = ui.PreviewImage(captioned(kept, named), cls=cls)
        return io.NodeOutput(preset, "\n".join(ranking.chosen), text, kept, dropped, ui=marked(shown, cls.hidden))


def class_numbers(masks: torch.Tensor, classes: int) -> torch.Tensor:
    """MASK (B, H, W) -> int64 classes: two, or as many grey values of a picture of 8 bits; 255 is unknown."""
    if classes == 2:
        return (masks > 0.5).long()
    numbers = (masks * 255).round().long()
    strange = sorted(set(numbers.unique().tolist()) - {*range(classes), IGNORE})
    if strange:
        accepted = f"0 .. {classes - 1}, or {IGNORE} for unknown"
        raise refuse("masks", f"grey values {strange[:5]}", accepted, "save class numbers, or set classes")
    return numbers


def strips(ranking: Ranking, addresses: list[str]) -> torch.Tensor:
    """IMAGE (N, 64, width, 3), one strip a place."""
    if not addresses:
        return torch.zeros(1, 8, 8, 3)
    return torch.stack([ranking.strip(a, 64) for a in addresses]).permute(0, 2, 3, 1)


class SaveFeaturePreset(io.ComfyNode):
    """Write a preset to models/vitrine_presets."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """A preset and a name in."""
        return io.Schema(
            node_id="VitrineSaveFeaturePreset",
            display_name="Save Layer Preset",
            category=CATEGORY,
            description="Writes the chosen layers with their figures and the model's fingerprint, for others to load.",
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
            inputs=[
                FeaturePresetSocket.Input("preset", tooltip="From Rank Layers."),
                io.String.Input("name", default="preset", tooltip="File name without folder or ending."),
            ],
            outputs=[io.String.Output(display_name="path", tooltip="The file written.")],
        )

    @classmethod
    def execute(cls, preset: FeaturePreset, name: str) -> io.NodeOutput:
        """An existing file of that name is replaced whole."""
        path = preset.save(saved.folder(_FOLDER) / f"{safe_name(name)}.json")
        text = "\n".join([saved.shown(path), *preset.preset.addresses])
        return io.NodeOutput(str(path), ui=text_on(text))


class LoadFeaturePreset(io.ComfyNode):
    """Read a preset and check that it belongs to this model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """A file and the model in; places and timestep out."""
        files = saved.listed(_FOLDER, ".json")
        return io.Schema(
            node_id="VitrineLoadFeaturePreset",
            display_name="Load Layer Preset",
            category=CATEGORY,
            description="Reads layers from models/vitrine_presets; a preset of another model is refused.",
            inputs=[
                io.Combo.Input("file", options=files or ["none saved yet"], tooltip="A saved .json file."),
                io.Model.Input("model", tooltip="The model it will be used with."),
            ],
            outputs=[
                FeaturePresetSocket.Output(display_name="PRESET", tooltip="As it was saved."),
                io.String.Output(display_name="layers", tooltip="Connect to layers, and select 'layers below'."),
                io.Float.Output(display_name="timestep", tooltip="The network timestep of the choice."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, file: str, **others: Any) -> str:
        """Runs again when the file has changed."""
        return saved.changed(_FOLDER, file)

    @classmethod
    def execute(cls, file: str, model: Any) -> io.NodeOutput:
        """Load and check."""
        loaded = FeaturePreset.load(saved.path_of(_FOLDER, file))
        loaded.check(backbone_of(model), fingerprint(model))
        return io.NodeOutput(loaded, "\n".join(loaded.preset.addresses), loaded.preset.timestep)


NODES = [RankActivations, SaveFeaturePreset, LoadFeaturePreset]
