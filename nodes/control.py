"""Control conditioning nodes: size conditions, their weight over the noise level, padding, consistency."""

from __future__ import annotations

import math
import re
from typing import Any

from comfy_api.latest import io

from ..engine.control import DRAWN, GammaConfig, PaddingConfig, SizeCondition, pad_text
from ..engine.errors import refuse
from ..engine.io.tables import lines_of
from .comfy.conditioning import readers_of, token_count, with_sizes
from .comfy.control import checkpoint_stamp, checkpoints, read_checkpoint, reads_sizes, weighted, with_checkpoint
from .comfy.progress import text_on
from .config_inputs import inputs_of, settings_from
from .control_inputs import CATEGORY, GAMMA, pixels, reference_of
from .control_sampler import SAMPLING
from .sockets import under_advanced


def extra_values(text: str) -> dict[str, float]:
    """``name = number`` lines."""
    values = {}
    for line in lines_of(text):
        match = re.fullmatch(r"(\w+)\s*[=:]\s*(-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)", line)
        if match is None or not math.isfinite(float(match[2])):
            raise refuse("extra", line, "name = number, a finite one", "one a line")
        values[match[1]] = float(match[2])
    return values


class ControlValues(io.ComfyNode):
    """Tell a prompt where its picture comes from."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Sizes, crop and flip in."""
        return io.Schema(
            node_id="VitrineControlValues",
            display_name="Size and Crop Values",
            category=CATEGORY,
            description="Adds size, crop, target size and flip to a prompt: for SDXL, PixArt and models with a size "
                        "checkpoint.",
            hidden=[io.Hidden.unique_id],
            inputs=under_advanced(("flip", "extra"), [
                io.Conditioning.Input("conditioning", tooltip="The prompt; usually the positive one only."),
                pixels("width", 1024, 8, "Width the picture is said to have had before training resized it."),
                pixels("height", 1024, 8, "Height the picture is said to have had. Small values bring blur."),
                pixels("crop_left", 0, 0, "Pixels cropped at the left: above 0 the subject moves out at the left."),
                pixels("crop_top", 0, 0, "Pixels cropped at the top: above 0 heads are cut."),
                pixels("target_width", 1024, 8, "Width of the picture you make; with the height it tells the aspect."),
                pixels("target_height", 1024, 8, "Height of the picture you make."),
                io.Boolean.Input("flip", default=False, tooltip="Condition on a mirrored picture; only size "
                                                                "checkpoints read it."),
                io.String.Input(
                    "extra", default="", multiline=True,
                    tooltip="Further conditions of a checkpoint, 'name = number', one a line.",
                ),
                io.Model.Input(
                    "model", optional=True,
                    tooltip="The model that will sample: refused here if it would ignore the values.",
                ),
            ]),
            outputs=[io.Conditioning.Output(display_name="CONDITIONING", tooltip="The prompt with its values.")],
        )  # fmt: skip

    @classmethod
    def execute(
        cls,
        conditioning: list,
        width: int,
        height: int,
        crop_left: int,
        crop_top: int,
        target_width: int,
        target_height: int,
        flip: bool = False,
        extra: str = "",
        model: Any = None,
    ) -> io.NodeOutput:
        """The conditioning that comes in stays as it is."""
        if model is not None:
            reads_sizes(model)
        target = (target_height, target_width)
        sizes = SizeCondition((height, width), (crop_top, crop_left), target, flip, extra_values(extra))
        return io.NodeOutput(with_sizes(conditioning, sizes), ui=text_on(readers_of(conditioning)))


class ApplyGammaSchedule(io.ComfyNode):
    """Weigh a model's size condition by the noise level."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """A curve in."""
        return io.Schema(
            node_id="VitrineApplyGammaSchedule",
            display_name="Size Weight Schedule",
            category=CATEGORY,
            description="Lets size conditioning act late, when details form: it then changes sharpness, not content.",
            inputs=[
                io.Model.Input("model", tooltip="SDXL, or a PixArt with size conditioning."),
                *GAMMA,
                *inputs_of(GammaConfig, "points", optional=True),
            ],
            outputs=[io.Model.Output(display_name="MODEL", tooltip="For any sampler.")],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        form: str,
        alpha: float,
        clock: str,
        reference: str,
        reference_width: int,
        reference_height: int,
        points: str = "",
    ) -> io.NodeOutput:
        """``weighted``; constant leaves the model untouched."""
        neutral = reference_of(reference, reference_width, reference_height)
        drawn = points.strip()
        gamma = GammaConfig(DRAWN, clock=clock, points=drawn) if drawn else GammaConfig(form, alpha, clock=clock)
        return io.NodeOutput(weighted(model, gamma, neutral))


class LoadControl(io.ComfyNode):
    """Give a model a control checkpoint."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The list is read anew whenever the page refreshes."""
        return io.Schema(
            node_id="VitrineLoadControl",
            display_name="Load Size Checkpoint",
            category=CATEGORY,
            description="Adds conditions trained for this model (size, crop, flip), with the file's own curve.",
            inputs=[
                io.Model.Input("model", tooltip="The model the checkpoint was trained for."),
                io.Combo.Input(
                    "file",
                    options=checkpoints() or ["none found"],
                    tooltip="A .safetensors of models/vitrine_control, or one that ships with a portraits transformer.",
                ),
            ],
            outputs=[
                io.Model.Output(display_name="MODEL", tooltip="Takes the values of Size and Crop Values."),
                io.String.Output(display_name="report", tooltip="Conditions, curve, padding, base model."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, file: str, **others: Any) -> str:
        """Runs again when the file has changed."""
        return checkpoint_stamp(file)

    @classmethod
    def execute(cls, model: Any, file: str) -> io.NodeOutput:
        """Refuses a checkpoint of another model."""
        checkpoint = read_checkpoint(file)
        facts = checkpoint.metadata
        text = (
            f"controls {', '.join(facts.spec.names)}\ncurve {facts.gamma.form}, alpha {facts.gamma.alpha:g}\n"
            f"padding {facts.padding.mode if facts.padding else 'as the text encoder makes it'}\n"
            f"base {facts.base_model or 'not named'}, {facts.steps} steps, licence {facts.licence or 'not named'}"
        )
        return io.NodeOutput(with_checkpoint(model, checkpoint), text)


class NoisyReplicatePadding(io.ComfyNode):
    """Fill the positions after a prompt with its own tokens."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """A prompt and its length in."""
        return io.Schema(
            node_id="VitrineNoisyReplicatePadding",
            display_name="Pad Short Prompts",
            category=CATEGORY,
            description="Fills the empty positions after a short prompt with copies of its tokens, with noise.",
            is_experimental=True,
            inputs=under_advanced(("axis", "tokens"), [
                io.Conditioning.Input("conditioning", tooltip="The prompt."),
                *inputs_of(PaddingConfig),
                io.Int.Input("seed", default=0, min=0, max=2**32 - 1, tooltip="Of the noise: one prompt, one result."),
                io.Int.Input(
                    "tokens", default=0, min=0, max=4096,
                    tooltip="Tokens of the prompt with its start and end. 0: counted with clip and text, or the mask.",
                ),
                io.Clip.Input("clip", optional=True, tooltip="Counts the tokens of text."),
                io.String.Input("text", optional=True, default="", multiline=True, tooltip="The same prompt again."),
            ]),
            outputs=[io.Conditioning.Output(display_name="CONDITIONING", tooltip="The padded prompt.")],
        )  # fmt: skip

    @classmethod
    def execute(
        cls, conditioning: list, seed: int, tokens: int = 0, clip: Any = None, text: str = "", **options: Any
    ) -> io.NodeOutput:
        """The conditioning that comes in stays as it is."""
        config, padded_parts = settings_from(PaddingConfig, options), []
        if len(conditioning) > 1 and (tokens or clip is not None):
            shown, remedy = f"{len(conditioning)} prompts, and the tokens of one", "pad each before they are combined"
            raise refuse("conditioning", shown, "one prompt", remedy)
        for embeds, settings in conditioning:
            mask, count = settings.get("attention_mask"), tokens
            if not tokens and clip is not None:
                count = token_count(clip, text, embeds.shape[1])
            if not count and mask is None:
                raise refuse("tokens", 0, "a number, or clip and text", "connect the CLIP and repeat the prompt")
            lengths = [count] * len(embeds) if count else mask.reshape(len(embeds), -1).sum(1)
            padded, ones = pad_text(embeds, lengths, config, seed)
            padded_parts.append([padded, settings | ({} if mask is None else {"attention_mask": ones.to(mask)})])
        return io.NodeOutput(padded_parts)


NODES = [ControlValues, ApplyGammaSchedule, LoadControl, *SAMPLING, NoisyReplicatePadding]
