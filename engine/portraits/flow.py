"""The second portraits model: Flux's double and single blocks, rotary positions, flow matching, 128 px.

Real FluxTransformer2DModel, AutoencoderKL (f = 8, 16 channels) and CLIPTextModel, in the layout of a ``FluxPipeline``
folder. The text encoder's states replace T5's. The pooled vector does not carry the prompt: the layer that
reads it is zero and stays zero, so that text enters only by joint attention, where neurons are searched.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from ..network.condition import Condition
from ..runtime.quiet import quiet_libraries
from .dataset import PORTRAITS, Dataset
from .models import WEIGHTS, Portraits, build_models, load_portraits, load_shared, text_states
from .render import render
from .scenes import Scenes

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
    from transformers import CLIPTextModel, CLIPTokenizer

FLOW_WEIGHTS = WEIGHTS / "flow"
"""The shipped model, a FluxPipeline folder with fp16 safetensors."""
SIDE = 128
LATENT_SHAPE = (16, 16, 16)
_DRAWN_AT_ONCE = 64  # larger canvases do not fit in the CPU cache

TRANSFORMER_CONFIG: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 2,
    "num_single_layers": 4,
    "attention_head_dim": 32,
    "num_attention_heads": 5,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 64,
    "guidance_embeds": False,
    "axes_dims_rope": (8, 12, 12),
}
VAE_CONFIG: dict[str, Any] = {
    "sample_size": SIDE,
    "latent_channels": 16,
    "block_out_channels": (16, 32, 32, 64),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "scaling_factor": 1.0,
    "shift_factor": 0.0,
}
SCHEDULER_CONFIG: dict[str, Any] = {"num_train_timesteps": 1000, "shift": 1.0}


@dataclass(frozen=True)
class FlowPortraits:
    """The five parts of the model, and their folder (None for a newly built model)."""

    transformer: FluxTransformer2DModel
    text_encoder: CLIPTextModel
    tokenizer: CLIPTokenizer
    vae: AutoencoderKL
    scheduler: FlowMatchEulerDiscreteScheduler
    folder: Path | None = None
    dataset: ClassVar[Dataset] = PORTRAITS
    side: ClassVar[int] = SIDE
    latent_shape: ClassVar[tuple[int, int, int]] = LATENT_SHAPE

    @property
    def backbone(self) -> FluxTransformer2DModel:
        """The denoising network."""
        return self.transformer

    def encode(self, prompts: list[str]) -> torch.Tensor:
        """(B, 24, 64) text states."""
        return text_states(self.tokenizer, self.text_encoder, prompts)

    def condition(self, text: torch.Tensor) -> Condition:
        """Text states (B, T, 64) as a Condition; the pooled vector has no effect."""
        return Condition(text, text.new_zeros(len(text), self.transformer.config.pooled_projection_dim))

    def draw(self, scenes: Scenes) -> torch.Tensor:
        """(B, 3, 128, 128) in [0, 1]: renders the scenes as in the training images."""
        rows = range(0, len(scenes), _DRAWN_AT_ONCE)
        return torch.cat([render(scenes[i : i + _DRAWN_AT_ONCE], SIDE, details=True).images for i in rows])

    @quiet_libraries()
    def pipeline(self) -> Any:
        """A stock ``FluxPipeline`` of these parts; call it with ``max_sequence_length=24``.

        ``guidance_scale`` has no effect (the model is not guidance-distilled): use ``true_cfg_scale`` and
        ``negative_prompt=""``.
        """
        from diffusers import FluxPipeline

        pipe = FluxPipeline(
            scheduler=self.scheduler,
            vae=self.vae,
            transformer=self.transformer,
            text_encoder=self.text_encoder,
            tokenizer=self.tokenizer,
            text_encoder_2=self.text_encoder,
            tokenizer_2=self.tokenizer,
        )
        pipe.default_sample_size = SIDE // pipe.vae_scale_factor  # FluxPipeline assumes 1024 px for every model
        return pipe


def build_flow_models(seed: int = 0, tokenizer_folder: str | Path | None = None) -> FlowPortraits:
    """The architecture, float32 on the CPU, with seeded weights except for the text encoder and coarse VAE levels.

    Those are copied from the 64 px model, which was trained on the same captions and images.
    """
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

    small = load_portraits()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer, vae = FluxTransformer2DModel(**TRANSFORMER_CONFIG), AutoencoderKL(**VAE_CONFIG)
        _initialise(transformer)
    take_coarse_levels(vae, small.vae)
    return FlowPortraits(
        transformer=transformer.eval(),
        text_encoder=copy.deepcopy(small.text_encoder).eval(),
        tokenizer=build_models(seed, tokenizer_folder).tokenizer if tokenizer_folder else small.tokenizer,
        vae=vae.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER_CONFIG),
    )


@torch.no_grad()
def _initialise(net: FluxTransformer2DModel) -> None:
    """Initialises as DiT (Peebles & Xie 2023, adaLN-Zero): every block is the identity, pooled text is unused."""
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear):
            modulation = name.endswith((".linear", "proj_out")) and ".proj_out" not in name
            (nn.init.zeros_ if modulation else nn.init.xavier_uniform_)(module.weight)
            nn.init.zeros_(module.bias)
    reader = net.time_text_embed.text_embedder
    for parameter in reader.parameters():
        parameter.zero_().requires_grad_(False)


@torch.no_grad()
def take_coarse_levels(vae: AutoencoderKL, small: AutoencoderKL) -> None:
    """Copies the 64 px autoencoder's weights of levels with the same resolution and shapes."""
    target = vae.state_dict()
    for key, value in small.state_dict().items():
        words = key.split(".")
        if words[:2] == ["encoder", "down_blocks"]:
            words[2] = str(int(words[2]) + 1)  # the new finest level precedes the old ones
        name = ".".join(words)
        if name in target and target[name].shape == value.shape:
            target[name].copy_(value)


@torch.no_grad()
def standardise(vae: AutoencoderKL, mean: torch.Tensor, deviation: torch.Tensor) -> None:
    """Folds (16,) channel means and deviations of the latents into the adjacent 1 x 1 convolutions, exactly.

    Latents then have mean 0 and deviation 1 in every channel, without constants in loaders.
    """
    channels = len(mean)
    before, after = vae.quant_conv, vae.post_quant_conv
    scale = torch.cat([1 / deviation, torch.ones_like(deviation)])
    shift = torch.cat([-mean / deviation, -2 * deviation.log()])  # of the log variance
    before.weight.mul_(scale.view(-1, 1, 1, 1))
    before.bias.mul_(scale).add_(shift)
    after.bias.add_(after.weight.view(channels, channels) @ mean)
    after.weight.mul_(deviation.view(1, -1, 1, 1))


def load_flow_portraits(folder: str | Path | None = None) -> FlowPortraits:
    """Loads the shipped model, or another folder of the same layout, in float32 on the CPU."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

    root = Path(folder) if folder else FLOW_WEIGHTS
    shared = load_shared(root, "python -m vitrine.evidence.recipes flow")
    transformer = FluxTransformer2DModel.from_pretrained(root / "transformer", torch_dtype=torch.float32).eval()
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(root / "scheduler")
    return FlowPortraits(transformer=transformer, scheduler=scheduler, **shared)


def load_either(folder: str | Path | None = None) -> Portraits | FlowPortraits:
    """Loads a model by the pipeline class in its model_index.json; None is the shipped 64 px model."""
    index = Path(folder or WEIGHTS) / "model_index.json"
    flow = index.is_file() and json.loads(index.read_text())["_class_name"] == "FluxPipeline"
    return load_flow_portraits(folder) if flow else load_portraits(folder)
