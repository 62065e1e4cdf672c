"""The portraits model: real CLIPTextModel, UNet2DConditionModel and AutoencoderKL, small, in diffusers' own layout.

Group normalisation uses 8 groups: with ComfyUI's fixed 32 groups, 32 channels would mean instance normalisation, which
discards the colour of a flat background. Vitrine's ComfyUI loader sets the number on the modules instead
(``nodes/comfy/portraits.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..errors import refuse
from ..io.files import save_safetensors, write_folder
from ..network.condition import Condition
from ..runtime.quiet import no_bars, quiet_libraries
from .captions import MAX_TOKENS, write_tokenizer_files
from .dataset import PORTRAITS, Dataset
from .scenes import Scenes

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTokenizer

WEIGHTS = Path(__file__).parent / "weights"
"""The shipped model: a StableDiffusionPipeline folder, fp16 safetensors."""

UNET_CONFIG: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (32, 96),
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
    "cross_attention_dim": 64,
    "attention_head_dim": 4,
    "norm_num_groups": 8,
}
VAE_CONFIG: dict[str, Any] = {
    "sample_size": 64,
    "latent_channels": 4,
    "block_out_channels": (32, 32, 64),
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "layers_per_block": 1,
    "norm_num_groups": 8,
}
TEXT_CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": 64,
    "max_position_embeddings": MAX_TOKENS,
    "hidden_act": "quick_gelu",
}
SCHEDULER_CONFIG: dict[str, Any] = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "epsilon",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
}


def text_states(tokenizer: CLIPTokenizer, encoder: CLIPTextModel, prompts: list[str]) -> torch.Tensor:
    """(B, 24, 64) last hidden states of a shipped model's text encoder."""
    ids = tokenizer(
        prompts, padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt"
    ).input_ids
    return encoder(ids.to(encoder.device)).last_hidden_state


@dataclass(frozen=True)
class Portraits:
    """The five parts of the model, their folder (None for a newly built model), and the dataset it was trained on."""

    unet: UNet2DConditionModel
    text_encoder: CLIPTextModel
    tokenizer: CLIPTokenizer
    vae: AutoencoderKL
    scheduler: DDIMScheduler
    folder: Path | None = None
    dataset: Dataset = PORTRAITS
    side: ClassVar[int] = 64
    latent_shape: ClassVar[tuple[int, int, int]] = (4, 16, 16)

    @property
    def backbone(self) -> UNet2DConditionModel:
        """The denoising network."""
        return self.unet

    def encode(self, prompts: list[str]) -> torch.Tensor:
        """(B, 24, 64) text states."""
        return text_states(self.tokenizer, self.text_encoder, prompts)

    def condition(self, text: torch.Tensor) -> Condition:
        """Text states (B, T, 64) as a Condition."""
        return Condition(text)

    def draw(self, scenes: Scenes) -> torch.Tensor:
        """(B, 3, 64, 64) in [0, 1]: renders the scenes as in the training images."""
        return self.dataset.render(scenes).images

    @quiet_libraries()
    def pipeline(self) -> Any:
        """A stock ``StableDiffusionPipeline`` of these parts."""
        from diffusers import StableDiffusionPipeline

        return StableDiffusionPipeline(
            vae=self.vae,
            text_encoder=self.text_encoder,
            tokenizer=self.tokenizer,
            unet=self.unet,
            scheduler=self.scheduler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )


def build_models(seed: int = 0, tokenizer_folder: str | Path | None = None, dataset: Dataset = PORTRAITS) -> Portraits:
    """The architecture with seeded random weights, float32 on the CPU.

    ``tokenizer_folder`` receives vocab.json and merges.txt; the default is the shipped one.
    """
    import tempfile

    from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    folder = Path(tokenizer_folder) if tokenizer_folder else WEIGHTS / "tokenizer"
    if not (folder / "vocab.json").is_file():
        folder = Path(tokenizer_folder or tempfile.mkdtemp(prefix="portraits-tokenizer-"))
        write_tokenizer_files(folder, dataset.vocabulary)
    tokenizer = CLIPTokenizer.from_pretrained(str(folder), model_max_length=MAX_TOKENS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        text = CLIPTextConfig(**TEXT_CONFIG, **ids, pad_token_id=tokenizer.pad_token_id, vocab_size=len(tokenizer))
        return Portraits(
            unet=UNet2DConditionModel(**UNET_CONFIG).eval(),
            text_encoder=CLIPTextModel(text).eval(),
            tokenizer=tokenizer,
            vae=AutoencoderKL(**VAE_CONFIG).eval(),
            scheduler=DDIMScheduler(**SCHEDULER_CONFIG),
            dataset=dataset,
        )


def load_portraits(folder: str | Path | None = None) -> Portraits:
    """Loads the shipped model, or another folder of the same layout, in float32 on the CPU."""
    from diffusers import DDIMScheduler, UNet2DConditionModel

    root = Path(folder) if folder else WEIGHTS
    if not (root / "unet").is_dir():
        remedy = "this needs the 64 px model; `python -m vitrine.evidence.recipes portraits` makes such a folder"
        raise refuse("portraits folder", str(root), "a folder with model_index.json and a unet", remedy)
    shared = load_shared(root, "python -m vitrine.evidence.recipes portraits")
    unet = UNet2DConditionModel.from_pretrained(root / "unet", torch_dtype=torch.float32).eval()
    return Portraits(unet=unet, scheduler=DDIMScheduler.from_pretrained(root / "scheduler"), **shared)


def load_shared(root: Path, command: str) -> dict[str, Any]:
    """Loads the parts of every portraits model: text encoder, tokenizer and VAE, float32 on the CPU; and the folder.

    Args:
        command: that makes such a folder, for the error.
    """
    from diffusers import AutoencoderKL
    from transformers import CLIPTextModel, CLIPTokenizer

    if not (root / "model_index.json").is_file():
        raise refuse("portraits folder", str(root), "a folder with model_index.json", f"run `{command}`")
    with no_bars():
        text_encoder = CLIPTextModel.from_pretrained(root / "text_encoder", dtype=torch.float32).eval()
    return {
        "text_encoder": text_encoder,
        "tokenizer": CLIPTokenizer.from_pretrained(str(root / "tokenizer")),
        "vae": AutoencoderKL.from_pretrained(root / "vae", torch_dtype=torch.float32).eval(),
        "folder": root,
    }


def save_portraits(model: Any, folder: str | Path) -> None:
    """Writes all parts of a portraits model in fp16, in diffusers' layout, atomically."""

    def write(fresh: Path) -> None:
        pipe = model.pipeline()
        pipe.to(torch.float16)
        pipe.save_pretrained(str(fresh), safe_serialization=True)
        pipe.to(torch.float32)
        for part in fresh.glob("tokenizer*"):
            write_tokenizer_files(part, model.dataset.vocabulary)
        for part in fresh.glob("text_encoder*"):
            name_as_every_transformers(part / "model.safetensors")

    write_folder(folder, write)


def name_as_every_transformers(file: Path) -> None:
    """Adds ``text_model.`` to the names: without it, as transformers 5 saves, transformers 4 loads random weights."""
    from safetensors.torch import load_file

    tensors = load_file(file)
    named = {k if k.startswith("text_model.") else f"text_model.{k}": v for k, v in tensors.items()}
    save_safetensors(file, named)
