"""An SDXL- and a PixArt-shaped random network, each as a pipeline and as a MODEL, and one run through both."""

from types import SimpleNamespace

import torch
from diffusers import EulerDiscreteScheduler, PixArtAlphaPipeline, StableDiffusionXLPipeline
from vitrine.engine.control import (
    GammaConfig,
    SizeCondition,
)
from vitrine.engine.pipelines import (
    ControlConditionedPipeline,
)
from vitrine_tests import models

FAR = {"width": 24, "height": 16, "crop_left": 4, "crop_top": 8}
TOLD = SizeCondition(original=(16, 24), crop=(8, 4))
CURVE = {
    "form": "power_cos",
    "alpha": 1.0,
    "clock": "native",
    "reference": "target",
    "reference_width": 48,
    "reference_height": 40,
}
NEVER = GammaConfig("step", step_at=0.0)
NESTED = {"cfg": 3.0, "size_guidance": 1.375, "nesting": "control_inner"}
RUN = {"seed": 3, "steps": 4, "sampler_name": "euler", "scheduler": "ddim_uniform", "denoise": 1.0, "flip": False}


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


TEXT, NO_TEXT = seeded(1, 7, 24, seed=1), seeded(1, 7, 24, seed=3)
POOLED, NO_POOLED = seeded(1, 20, seed=2), seeded(1, 20, seed=4)
POSITIVE, NEGATIVE = [[TEXT, {"pooled_output": POOLED}]], [[NO_TEXT, {"pooled_output": NO_POOLED}]]


def carried(source, key_map):
    """A diffusers state dict under ComfyUI's names, through ComfyUI's own map; merged weights are concatenated."""
    found = {}
    for name, value in source.state_dict().items():
        where = key_map.get(name)
        if where is not None:
            key, part, change = (where, None, None) if isinstance(where, str) else (*where, None)[:3]
            found.setdefault(key, {})[part[1] if part else 0] = change(value) if change else value
    return {k: torch.cat([v[i] for i in sorted(v)]) for k, v in found.items()}


def patcher(described, weights):
    from comfy import model_patcher

    described.set_inference_dtype(torch.float32, None)
    cpu = torch.device("cpu")
    model = described.get_model({}, "", device=cpu)
    missing, unexpected = model.diffusion_model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"y_embedder.y_embedding"}
    return model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)


def euler(**betas):
    """Its timesteps are those of ComfyUI's ddim_uniform."""
    return EulerDiscreteScheduler(timestep_spacing="leading", steps_offset=1, **betas)


def xl_twins():
    """One SDXL-shaped network as a pipeline and as a MODEL."""
    from comfy import supported_models, utils

    class Tiny(supported_models.SDXL):
        unet_extra_config = {"num_heads": -1, "num_head_channels": 16}

    unet = models.unet_xl(sample_size=8, block_out_channels=(32, 64), norm_num_groups=32, addition_time_embed_dim=256)
    with torch.no_grad():
        for p in unet.add_embedding.parameters():
            p.mul_(6)
    config = {
        "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 32, "channel_mult": (1, 2),
        "num_res_blocks": [1, 1], "use_spatial_transformer": True, "transformer_depth": [0, 1],
        "transformer_depth_output": [0, 0, 1, 1], "transformer_depth_middle": 1, "context_dim": 24, "legacy": False,
        "use_linear_in_transformer": True, "num_classes": "sequential", "adm_in_channels": 20 + 6 * 256,
    }  # fmt: skip
    model = patcher(Tiny(config), carried(unet, utils.unet_to_diffusers(config)))
    scheduler = euler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    parts = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    pipe = ControlConditionedPipeline.from_pipe(
        StableDiffusionXLPipeline(vae=models.vae(), unet=unet, scheduler=scheduler, **parts)
    )
    pipe.set_progress_bar_config(disable=True)
    return SimpleNamespace(model=model, pipe=pipe, scale=0.13025, side=8)


def pixart_twins():
    """One PixArt-shaped network in both layouts; ComfyUI's position embeddings are laid out for 64 x 64 cells."""
    from comfy import supported_models, utils

    net = models.pixart(sample_size=64, use_additional_conditions=True)
    with torch.no_grad():
        for p in net.adaln_single.emb.resolution_embedder.parameters():
            p.mul_(6)
    config = {"hidden_size": 24, "num_heads": 2, "depth": 2, "caption_channels": 24, "model_max_length": 7}
    weights = carried(net, utils.pixart_to_diffusers(config))
    model = patcher(supported_models.PixArtAlpha(config | {"in_channels": 4}), weights)
    scheduler = euler(beta_start=0.0001, beta_end=0.02)
    parts = {"tokenizer": None, "text_encoder": None, "vae": models.vae(), "transformer": net, "scheduler": scheduler}
    pipe = ControlConditionedPipeline.from_pipe(PixArtAlphaPipeline(**parts))
    pipe.set_progress_bar_config(disable=True)
    return SimpleNamespace(model=model, pipe=pipe, scale=0.18215, side=64)


def latent(side=8):
    return {"samples": torch.zeros(1, 4, side, side)}


def node(comfy, twins, model=None, positive=POSITIVE, **change):
    """Latents in the network's own scale, and the report."""
    told = FAR | CURVE | RUN | {"cfg": 3.0, "size_guidance": 1.0, "nesting": "control_inner"} | change
    made, drawn, report = comfy.call(
        "VitrineControlConditionedSampler",
        model=model or twins.model,
        positive=positive,
        negative=NEGATIVE,
        latent_image=latent(twins.side),
        **told,
    )
    assert drawn.shape == (1, 320, 560, 3) and 0 <= float(drawn.min()) < float(drawn.max()) <= 1
    return made["samples"].clone() * twins.scale, report


def pipeline(twins, gamma, guidance, size_condition=TOLD, **change):
    """The same run in diffusers: ComfyUI scales the noise by sigma alone below the highest level."""
    noise, scheduler = torch.randn(1, 4, twins.side, twins.side, generator=torch.manual_seed(3)), twins.pipe.scheduler
    scheduler.set_timesteps(4)
    noise = noise * scheduler.sigmas[0] / scheduler.init_noise_sigma
    embeds = {"prompt_embeds": TEXT, "negative_prompt_embeds": NO_TEXT}
    if hasattr(twins.pipe, "unet"):
        embeds |= {"pooled_prompt_embeds": POOLED, "negative_pooled_prompt_embeds": NO_POOLED}
    else:
        embeds |= {f"{n}prompt_attention_mask": torch.ones(1, 7) for n in ("", "negative_")}
    settings = {"num_inference_steps": 4, "output_type": "latent", "latents": noise} | embeds | change
    return twins.pipe(size_condition=size_condition, gamma=gamma, guidance=guidance, **settings)


def close(a, b):
    """1e-5 of the largest number."""
    return float((a - b).abs().max()) < 1e-5 * max(1.0, float(b.abs().max()))
