"""The embedded reference world inside ComfyUI: the portraits model, and pictures by its renderer."""

from __future__ import annotations

from comfy_api.latest import io, ui

from ..engine.portraits import PARTS, caption, render, sample_scenes
from ..engine.portraits.flow import FLOW_WEIGHTS
from ..engine.portraits.plants import MEMORIZED, plants
from ..engine.portraits.shipped import shipped_models, shipped_transformers, transformer_folder
from .comfy.flow import load_flow_model
from .comfy.portraits import WEIGHTS, load_clip, load_model, load_vae
from .comfy.transformer import load_transformer

CATEGORY = "Vitrine/try it (demo)"
BY_SEED = "(by seed)"


class LoadPortraits(io.ComfyNode):
    """MODEL, CLIP and VAE of the shipped portraits model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Which one in, where more than one ships."""
        names = list(shipped_models())
        choice = io.Combo.Input(
            "model",
            options=names,
            default=names[0],
            optional=True,
            tooltip="64 px: shaped like Stable Diffusion 1.5. 128 px: shaped like Flux.",
        )
        return io.Schema(
            node_id="VitrineLoadPortraits",
            display_name="Load Portraits Model",
            category=CATEGORY,
            description="Tiny text-to-image models of cartoon portraits that ship with Vitrine: seconds on a CPU, "
            "everything about them is known. Swap it for Load Checkpoint to work on your own model.",
            inputs=[choice] if len(names) > 1 else [],
            outputs=[
                io.Model.Output(
                    display_name="MODEL",
                    tooltip="64 px: an SD1.5-type UNet, latents 16 x 16. 128 px: a Flux-type transformer.",
                ),
                io.Clip.Output(display_name="CLIP", tooltip="Text encoder, 24 tokens; knows the captions' words."),
                io.Vae.Output(
                    display_name="VAE",
                    tooltip="Autoencoder: of factor 4 for 64 px, of factor 8 for 128 px; both decode 16 x 16 latents.",
                ),
            ],
        )

    @classmethod
    def execute(cls, model: str = "portraits, 64 px") -> io.NodeOutput:
        """Load all three from the pack's own files."""
        folder = shipped_models()[model]
        load = load_flow_model if folder == FLOW_WEIGHTS else load_model
        return io.NodeOutput(load(str(folder)), load_clip(str(folder)), load_vae(str(folder)))


class LoadPortraitsTransformer(io.ComfyNode):
    """MODEL, CLIP and VAE of a shipped portraits transformer."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Which one in."""
        names = shipped_transformers()
        return io.Schema(
            node_id="VitrineLoadPortraitsTransformer",
            display_name="Load Portraits Transformer",
            category=CATEGORY,
            description="A small PixArt-shaped model of cartoon portraits, trained with the size, crop and flip "
            "of its pictures as conditions. Load Size Checkpoint adds the part that reads them.",
            inputs=[
                io.Combo.Input(
                    "weight",
                    options=names,
                    default="power-cosine" if "power-cosine" in names else None,
                    tooltip="How the size was weighted over the noise level in training: power-cosine is the paper's "
                    "curve, constant is SDXL's way. With 128: fine-tuned for 128 px. With flips: follows the "
                    "flip that is set.",
                ),
            ],
            outputs=[
                io.Model.Output(display_name="MODEL", tooltip="PixArt-type transformer for 16 x 16 latents."),
                io.Clip.Output(display_name="CLIP", tooltip="Text encoder, 24 tokens; knows the captions' words."),
                io.Vae.Output(display_name="VAE", tooltip="Autoencoder with factor 4: 64 px <-> 16 x 16 latents."),
            ],
        )

    @classmethod
    def execute(cls, weight: str) -> io.NodeOutput:
        """Text encoder and VAE are the portraits model's."""
        model = load_transformer(str(transformer_folder(weight)))
        return io.NodeOutput(model, load_clip(str(WEIGHTS)), load_vae(str(WEIGHTS)))


class RenderPortrait(io.ComfyNode):
    """Portraits drawn exactly, with the captions that describe them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Seed and count in; pictures and captions out."""
        return io.Schema(
            node_id="VitrineRenderPortrait",
            display_name="Render Portrait",
            category=CATEGORY,
            is_output_node=True,  # what it shows can be all one wants
            description="Renders portraits from seeds, as the model's training pictures were made.",
            inputs=[
                io.Int.Input("seed", default=100_000, min=0, max=2**31, tooltip="First seed; below 32768: trained on."),
                io.Int.Input("count", default=4, min=1, max=64, tooltip="How many portraits, from consecutive seeds."),
                io.Int.Input("size", default=64, min=16, max=512, step=4, tooltip="Side in pixels (model: 64)."),
                io.Combo.Input(
                    "part",
                    options=["person", *PARTS[1:]],
                    default="person",
                    optional=True,
                    tooltip="What the mask shows, exactly as rendered.",
                ),
                io.Combo.Input(
                    "memorized",
                    options=[BY_SEED, *MEMORIZED],
                    default=BY_SEED,
                    optional=True,
                    tooltip="A picture that training repeated until the model memorized it, by the two words that "
                    "recall it. Seed and count are not used then.",
                ),
            ],
            outputs=[
                io.Image.Output(display_name="IMAGE", tooltip="The portraits."),
                io.String.Output(display_name="caption", tooltip="The caption of the first one."),
                io.Mask.Output(display_name="MASK", tooltip="One mask a portrait: the part asked for."),
            ],
        )

    @classmethod
    def execute(cls, seed: int, count: int, size: int, part: str = "person", memorized: str = BY_SEED) -> io.NodeOutput:
        """Render seeds seed .. seed + count - 1, or a memorized training picture."""
        if memorized == BY_SEED:
            scenes = sample_scenes(list(range(seed, seed + count)))
        else:
            scenes = next(p.scenes for p in plants() if p.name == memorized)
        drawn = render(scenes, size)
        images = drawn.images.permute(0, 2, 3, 1)
        mask = (drawn.parts > 0 if part == "person" else drawn.parts == PARTS.index(part)).float()
        return io.NodeOutput(images, caption(scenes)[0], mask, ui=ui.PreviewImage(images, cls=cls))


NODES = [LoadPortraits, LoadPortraitsTransformer, RenderPortrait]
