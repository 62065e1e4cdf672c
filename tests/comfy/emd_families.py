"""Tiny teachers of every family in both libraries, for the table of what EMD does with them."""

import copy
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.network.condition import Condition
from vitrine_tests import models
from vitrine_tests.families.twin import EqualEpsilon, comfyui_model, comfyui_twin, conditioning, inputs, network, twin

TWINS = {
    "SD3, SD3.5 medium": ("sd35", "StableDiffusion3Pipeline", "sd3"),
    "Z-Image": ("z_image", "ZImagePipeline", "z_image"),
    "Qwen-Image": ("qwen_image", "QwenImagePipeline", "qwen_image"),
    "Flux.2 Klein": ("klein", "Flux2KleinPipeline", "klein"),
    "Chroma": ("chroma", "ChromaPipeline", "chroma"),
    "Krea 2": ("krea2", "Krea2Pipeline", "krea2"),
    "Lumina 2": ("lumina2", "Lumina2Pipeline", "lumina2"),
    "Wan": ("wan", "WanPipeline", "wan"),
}
"""Family -> its twin, its pipeline in diffusers, and the tiny stock pipeline that is drawn with."""
SIZES = {
    "z_image": {"n_layers": 2, "dim": 256, "n_refiner_layers": 1},
    "klein": {"depth": 1, "depth_single_blocks": 2, "hidden_size": 64},
    "chroma": {"depth": 19, "depth_single_blocks": 38, "hidden_size": 32},
    "krea2": {"layers": 2},
    "lumina2": {"n_layers": 2, "dim": 96, "n_refiner_layers": 1},
}
"""What core's loader reads off a checkpoint, and its names of LoRA layers need."""
LEGACY = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


@dataclass
class Teacher:
    """One network in both libraries.

    Attributes:
        net: diffusers' network.
        scheduler: of its pipeline.
        pipeline: (network) -> a pipeline that loads LoRAs into it.
        model: ComfyUI's MODEL with the same weights.
        prompt: its conditioning there.
        cond: the same for diffusers' network.
        shape: of one picture's latents in diffusers.
        latents: the same in ComfyUI, where some have a frame axis.
        epsilon: a context in which both have one qk-norm.
    """

    net: Any
    scheduler: Any
    pipeline: Any
    model: Any
    prompt: list
    cond: Condition
    shape: tuple[int, ...]
    latents: tuple[int, ...]
    epsilon: Any

    @property
    def denoiser(self):
        return Denoiser.from_diffusers(self.net, self.scheduler)


def with_parts(kind, scheduler, part="transformer"):
    """(network) -> a pipeline of a class with nothing else in it."""
    import inspect

    def made(net):
        parts = inspect.signature(kind.__init__).parameters.values()
        empty = {p.name: None for p in parts if p.default is p.empty and p.name != "self"}
        return kind(**empty | {part: net, "scheduler": scheduler})

    return made


def of_twin(name, kind):
    net, scheduler = copy.deepcopy(network(name)), diffusers.FlowMatchEulerDiscreteScheduler()
    model = comfyui_model(name, comfyui_twin(name, net))
    model.model.model_config.unet_config |= SIZES.get(name, {})
    x, _, cond = inputs(name, 1)
    frames = model.get_model_object("latent_format").latent_dimensions == 3 and x.ndim == 4
    latents, prompt = x[:, :, None] if frames else x, conditioning(name, cond)
    if name == "klein":  # ComfyUI fills its prompts with zeros on the left, up to 512 tokens
        cond = Condition(_told(model, prompt, latents).text, cond.pooled, cond.extra)
    made = with_parts(getattr(diffusers, kind), scheduler)
    shapes = tuple(x.shape[1:]), tuple(latents.shape[1:])
    return Teacher(net, scheduler, made, model, prompt, cond, *shapes, lambda net: EqualEpsilon(name, net))


def _told(model, prompt, latents):
    from vitrine.nodes.comfy.conditioning import condition_of

    with torch.inference_mode():
        told = condition_of(model, prompt, latents)
    return Condition(told.text.clone(), None if told.pooled is None else told.pooled.clone())


def of_portraits(comfy, name):
    """The trained worlds: Stable Diffusion's shape, and Flux's."""
    from contextlib import nullcontext

    from vitrine.engine.portraits import load_portraits
    from vitrine.engine.portraits.flow import load_flow_portraits

    flow = name.startswith("flow")
    stock = (load_flow_portraits() if flow else load_portraits()).pipeline()
    model, clip, _ = comfy.call("VitrineLoadPortraits", model=name)
    with torch.inference_mode():
        prompt = clip.encode_from_tokens_scheduled(clip.tokenize("a smiling pale face"))
    shape = (16, 16, 16) if flow else (4, 16, 16)
    told = _told(model, prompt, torch.zeros(1, *shape))
    cond = Condition(told.text, prompt[0][1]["pooled_output"].clone() if flow else None)
    part, net = ("transformer", stock.transformer) if flow else ("unet", stock.unet)
    made = with_parts(type(stock), stock.scheduler, part)
    if not flow:
        kind = type(stock)
        made = lambda net: kind(None, None, None, net, stock.scheduler, None, None, requires_safety_checker=False)  # noqa: E731
    return Teacher(net, stock.scheduler, made, model, prompt, cond, shape, shape, lambda net: nullcontext())


def of_sdxl():
    from contextlib import nullcontext

    from vitrine_tests.comfy.controlled import POOLED, POSITIVE, TEXT, xl_twins

    twins = xl_twins()
    unet, scheduler = twins.pipe.unet, diffusers.DDIMScheduler(**LEGACY)
    cond = Condition(TEXT, POOLED, {"time_ids": torch.tensor([[64.0, 64, 0, 0, 64, 64]])})

    def made(net):
        return diffusers.StableDiffusionXLPipeline(*[None] * 5, net, scheduler, add_watermarker=False)

    shape = (4, 8, 8)
    return Teacher(unet, scheduler, made, twins.model, POSITIVE, cond, shape, shape, lambda net: nullcontext())


def of_sd2_v():
    """Stable Diffusion 2's shape, which predicts v."""
    from contextlib import nullcontext

    from comfy import model_base, supported_models, utils
    from vitrine_tests.comfy.controlled import TEXT, carried, patcher

    class Tiny(supported_models.SD20):
        unet_extra_config = {"num_heads": -1, "num_head_channels": 16}

        def model_type(self, state_dict, prefix=""):
            return model_base.ModelType.V_PREDICTION

    unet = models.unet_v(sample_size=8, block_out_channels=(32, 64), norm_num_groups=32)
    config = {
        "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 32, "channel_mult": (1, 2),
        "num_res_blocks": [1, 1], "use_spatial_transformer": True, "transformer_depth": [1, 0],
        "transformer_depth_output": [1, 1, 0, 0], "transformer_depth_middle": 1, "context_dim": 24, "legacy": False,
        "use_linear_in_transformer": True, "adm_in_channels": None,
    }  # fmt: skip
    model = patcher(Tiny(config), carried(unet, utils.unet_to_diffusers(config)))
    scheduler = diffusers.DDIMScheduler(prediction_type="v_prediction", **LEGACY)

    def made(net):
        return diffusers.StableDiffusionPipeline(
            None, None, None, net, scheduler, None, None, requires_safety_checker=False
        )

    shape = (4, 8, 8)
    return Teacher(unet, scheduler, made, model, [[TEXT, {}]], Condition(TEXT), shape, shape, lambda net: nullcontext())


def teacher(comfy, family):
    """A family's teacher by its name in the table."""
    if family in TWINS:
        assert twin(TWINS[family][0]).MODEL
        return of_twin(*TWINS[family][:2])
    portraits = {"SD1 (portraits)": "portraits, 64 px", "Flux (flow portraits)": "flow portraits, 128 px"}
    if family in portraits:
        return of_portraits(comfy, portraits[family])
    return of_sdxl() if family == "SDXL" else of_sd2_v()
