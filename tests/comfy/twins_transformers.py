"""Twins of the workflows that sample the portraits transformers: resolution and control."""

import torch
from vitrine.engine.pipelines import (
    ResolutionTransferPipeline,
)
from vitrine.engine.portraits import load_portraits
from vitrine.engine.resolution import ResolutionTransferConfig
from vitrine_tests.comfy.twin_tools import euler_sigmas


# --- resolution ----------------------------------------------------------------------------------------------------
def transformer_pipeline(name):
    """(diffusers' own PixArt pipeline over a portraits transformer, the model whose text encoder it reads)."""
    from diffusers import DDIMScheduler, EulerDiscreteScheduler, PixArtAlphaPipeline
    from vitrine.engine.portraits.shipped import load_transformer, transformer_folder

    base, folder = load_portraits(), transformer_folder(name)
    told = DDIMScheduler.from_pretrained(folder) if (folder / "scheduler_config.json").is_file() else base.scheduler
    scheduler = EulerDiscreteScheduler.from_config(told.config, timestep_spacing="linspace")
    pipe = PixArtAlphaPipeline(None, None, base.vae, load_transformer(name), scheduler)
    pipe.set_progress_bar_config(disable=True)
    return pipe, base


def sample_at_twice_the_size_transformer(graph, comfy):
    found = {}
    for shown, sampler, loader, transfer in ((12, 10, 1, 6), (15, 13, 1, 8), (18, 16, 1, 9), (21, 19, 4, None)):
        s, size = graph(sampler), graph(graph(sampler).latent_image[0])
        pipe, base = transformer_pipeline(graph(loader).weight)
        side = pipe.transformer.config.sample_size * 4
        how = {"schedule": "none", "pos_embed": "keep", "guidance": s.cfg}
        if transfer is not None:
            t = graph(transfer)
            how |= {"schedule": t.schedule, "pos_embed": t.pos_embed, "top": t.top}
            side = t.train_width
        config = ResolutionTransferConfig((size.width, size.height), (side, side), **how)
        wide = ResolutionTransferPipeline.from_pipe(pipe, config)
        first = highest(wide, s.steps)
        shape = (size.batch_size, 4, size.height // 4, size.width // 4)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(s.seed))
        rows = {}
        for name, link in (("", s.positive), ("negative_", s.negative)):
            with torch.no_grad():
                rows[f"{name}prompt_embeds"] = base.encode([graph.text(link)] * size.batch_size)
            rows[f"{name}prompt_attention_mask"] = torch.ones(size.batch_size, 24)
        found[shown] = wide(
            prompt=None,
            negative_prompt=None,
            latents=noise * (1 + first**2) ** 0.5 / first,
            output_type="pt",
            num_inference_steps=s.steps,
            guidance_scale=s.cfg,
            **rows,
        ).images
    return found


def highest(wide, steps):
    """The first noise level the transferred scheduler will take."""
    from vitrine.engine.resolution import apply

    with apply(wide, wide.transfer, None):
        wide.scheduler.set_timesteps(steps)
        return float(wide.scheduler.sigmas[0])


def sample_at_twice_the_size(graph, comfy):
    """Plain FluxPipeline for the model as it stands, and the two plans around it."""
    from vitrine.engine.portraits.flow import load_flow_portraits

    found, pipe = {}, load_flow_portraits().pipeline()
    pipe.set_progress_bar_config(disable=True)
    for shown, sampler, transfer in ((12, 10, None), (15, 13, 5), (18, 16, 6)):
        s, size = graph(sampler), graph(graph(sampler).latent_image[0])
        rows, sides = size.batch_size, (size.height // 8, size.width // 8)
        noise = torch.randn((rows, 16, *sides), generator=torch.Generator().manual_seed(s.seed))
        drawn = pipe
        if transfer is not None:
            t = graph(transfer)
            how = {"schedule": t.schedule, "pos_embed": t.pos_embed}
            drawn = ResolutionTransferPipeline.from_pipe(
                pipe, ResolutionTransferConfig((t.target_width, t.target_height), train_size=(128, 128), **how)
            )
        found[shown] = drawn(
            [graph.text(s.positive)] * rows,
            negative_prompt=[graph.text(s.negative)] * rows,
            true_cfg_scale=s.cfg,
            latents=pipe._pack_latents(noise, rows, 16, *sides),
            num_inference_steps=s.steps,
            height=size.height,
            width=size.width,
            max_sequence_length=24,
            output_type="pt",
        ).images
    return found


# --- control -------------------------------------------------------------------------------------------------------
def control_run(graph, loader, prompt, negative, size, seed, steps, cfg, told, control=1.0, schedule="normal"):
    """(B, 3, H, W) pictures of a portraits transformer told sizes; ``prompt`` may be text states."""
    from diffusers import EulerDiscreteScheduler, PixArtAlphaPipeline
    from vitrine.engine.control import GuidanceConfig, SizeCondition
    from vitrine.engine.pipelines import ControlConditionedPipeline
    from vitrine.engine.portraits.shipped import load_transformer, transformer_folder

    base = load_portraits()
    scheduler = EulerDiscreteScheduler.from_config(base.scheduler.config)
    parts = {"transformer": load_transformer(loader.weight), "vae": base.vae, "scheduler": scheduler}
    pipe = ControlConditionedPipeline.from_pipe(PixArtAlphaPipeline(tokenizer=None, text_encoder=None, **parts))
    pipe.set_progress_bar_config(disable=True)
    sigmas = euler_sigmas(scheduler, schedule, steps)
    scheduler.set_timesteps(sigmas=sigmas)
    noise = torch.randn(
        size.batch_size, 4, size.height // 4, size.width // 4, generator=torch.Generator().manual_seed(seed)
    )
    with torch.no_grad():
        text = base.encode([prompt]) if isinstance(prompt, str) else prompt
        empty = base.encode([negative])
    embeds = {"prompt_embeds": text, "negative_prompt_embeds": empty}
    embeds |= {f"{n}prompt_attention_mask": torch.ones(1, text.shape[1]) for n in ("", "negative_")}
    rows = {k: v.expand(size.batch_size, *v.shape[1:]) for k, v in embeds.items()}
    start = (1 + sigmas[0] ** 2) ** 0.5
    return pipe(
        checkpoint=pipe.load_control(transformer_folder(loader.weight) / "control.safetensors"),
        sigmas=sigmas,
        size_condition=SizeCondition(told, (0, 0), None, False),
        guidance=GuidanceConfig(cfg, control),
        output_type="pt",
        latents=noise * start / scheduler.init_noise_sigma,
        height=size.height,
        width=size.width,
        **rows,
    ).images


def say_how_large_a_picture_should_look(graph, comfy):
    found = {}
    for shown, sampler, values, loader in (
        (18, 12, 5, 10),
        (19, 13, 6, 10),
        (20, 14, 7, 10),
        (38, 32, None, 30),
        (39, 33, 6, 30),
        (40, 34, 7, 30),
    ):
        s = graph(sampler)
        told = s if values is None else graph(values)
        prompt = graph.text(s.positive if values is None else told.conditioning)
        found[shown] = control_run(
            graph,
            graph(loader),
            prompt,
            graph.text(s.negative),
            graph(s.latent_image[0]),
            s.seed,
            s.steps,
            s.cfg,
            (told.height, told.width),
            schedule=s.scheduler,
        )
    return found | {43: None}


def make_a_picture_look_small_or_large(graph, comfy):
    from vitrine.engine.control import PaddingConfig, pad_text

    found, loader, told = {}, graph(1), graph(6)
    sigmas, seed = graph(9), graph(7).noise_seed
    base, pad = load_portraits(), graph(39)
    tokens = len(base.tokenizer(pad.text).input_ids)
    with torch.no_grad():
        text = base.encode([graph.text(told.conditioning)])
    padded, _ = pad_text(text, [tokens], PaddingConfig(pad.mode, pad.beta_txt, pad.scope, pad.axis), pad.seed)
    for shown, guider in ((23, 20), (33, 30), (43, 40)):
        g = graph(guider)
        found[shown] = control_run(
            graph,
            loader,
            padded if guider == 40 else text,
            graph.text(g.negative),
            graph(4),
            seed,
            sigmas.steps,
            g.cfg,
            (told.height, told.width),
            g.control,
            sigmas.scheduler,
        )
    return found
