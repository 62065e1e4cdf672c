"""Word Map: where in a picture the model looks for one word of the prompt."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io, ui

from ..engine.activations import TapConfig, text_maps, word_map
from ..engine.errors import refuse
from .activations import CATEGORY
from .captions import captioned
from .comfy.carried import foreign_keys
from .comfy.conditioning import prompts_at
from .comfy.model import backbone_of
from .comfy.patches import replaced_attention
from .comfy.pictures import as_pictures
from .comfy.progress import text_on
from .comfy.prompt_words import is_text_of, text_behind, words_at
from .config_inputs import input_of
from .sockets import under_advanced
from .tap_inputs import tap_images

SEEN = 0.45
"""How much of the picture is seen through its map."""
TEMPLATE = "<template>"


class WordMap(io.ComfyNode):
    """What the model sees for one word."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Model, picture, prompt and word in; the picture under a heat map out."""
        return io.Schema(
            node_id="VitrineWordMap",
            display_name="Word Map",
            category=CATEGORY,
            description="Shows where in a picture the model looks for one word of the prompt: its attention to that "
            "word, averaged over all layers.",
            is_output_node=True,
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
            inputs=under_advanced(("timestep", "prompt"), [
                io.Model.Input("model", tooltip="Any model with a prompt, LoRAs included."),
                io.Clip.Input("clip", tooltip="Its text encoder."),
                io.Vae.Input("vae", tooltip="Its VAE."),
                io.Image.Input("image", tooltip="One or more pictures; sides must be multiples of the VAE's factor."),
                io.Conditioning.Input("positive", tooltip="One plain prompt that contains the word."),
                io.String.Input("word", default="face", tooltip="A word of the prompt, or several next to each other."),
                io.Int.Input("seed", default=0, min=0, max=2**32, control_after_generate=True, tooltip="Of the noise."),
                input_of(
                    TapConfig, "timestep", default=300.0,
                    tooltip="The network's own timestep: high ones look for layout, low ones for detail.",
                ),
                io.String.Input("prompt", default="", multiline=True, optional=True,
                                tooltip="The prompt's text, only where it is not typed in a CLIP Text Encode."),
            ]),
            outputs=[
                io.Image.Output(display_name="IMAGE", tooltip="The pictures under their heat maps."),
                io.Mask.Output(display_name="MASK", tooltip="The maps: 1 where the model looks most."),
            ],
        )  # fmt: skip

    @classmethod
    def execute(
        cls,
        model: Any,
        clip: Any,
        vae: Any,
        image: torch.Tensor,
        positive: list,
        word: str,
        seed: int,
        timestep: float,
        prompt: str = "",
    ) -> io.NodeOutput:
        """One forward over all pictures; only the word's tokens are kept."""
        pictures, typed = as_pictures(image), prompt.strip()
        positive = prompts_at(model, positive, timestep)
        text = typed or text_behind(cls.hidden, "positive", clip, positive)
        if text is None:
            remedy = "type them into prompt, as they are encoded"
            raise refuse("prompt", "no text in the graph that gives this prompt", "the prompt's words", remedy)
        words = words_at(clip, text, positive[0][0].shape[1])
        positions = positions_of(word, words)
        config = TapConfig(
            text_maps(backbone_of(model)), timestep, (seed,), map_heads="mean", map_tokens=tuple(positions)
        )
        taps = tap_images(model, vae, pictures, positive, config)
        maps = word_map(taps, (pictures.shape[1], pictures.shape[2]))
        drawn = SEEN * pictures.cpu() + (1 - SEEN) * heat(maps)
        where = "tokens" if len(positions) > 1 else "token"
        said = f"{word.strip()!r}: {where} {', '.join(map(str, positions))} of the prompt"
        if typed and not is_text_of(clip, typed, positive):
            said += "\nas typed: this CLIP does not encode the typed text to the prompt that is connected"
        said = "\n".join(filter(None, (said, replaced_attention(model, taps), foreign_keys(positive))))
        colours = {"#0000ff": "least", "#ff0000": "more", "#ffff00": "most attention"}
        shown = ui.PreviewImage(captioned(drawn, [word.strip()] * len(drawn), colours), cls=cls).as_dict()
        return io.NodeOutput(drawn, maps, ui=shown | text_on(said).as_dict())


def positions_of(word: str, words: list[str]) -> list[int]:
    """Where a word, or several in a row, is among the words at a prompt's positions; all of its tokens.

    :data:`TEMPLATE` is every position that is not the prompt's own: start, end, padding, the encoder's template.
    """
    if word.strip() == TEMPLATE and (outside := [k for k, w in enumerate(words) if w.startswith("<")]):
        return outside
    wanted, said = word.casefold().split(), [w.casefold().strip(",.;:!?") for w in words]
    spans = [(k, w) for k, w in enumerate(said) if not w.startswith("<")]
    if wanted and set(wanted) <= {w for _, w in spans}:
        return [k for k, w in spans if w in wanted]
    known = list(dict.fromkeys(w for _, w in spans)) or "none: this text encoder's tokens cannot be told apart"
    raise refuse("word", word, known, "take a word of the prompt, spelled as there")


def heat(maps: torch.Tensor) -> torch.Tensor:
    """(B, H, W, 3) of maps (B, H, W) in 0..1: blue over red to yellow, as the page's own map of what is alike."""
    return torch.stack([maps, (2 * maps - 1).clamp_min(0), 1 - maps], -1)


NODES: list[type[io.ComfyNode]] = [WordMap]
