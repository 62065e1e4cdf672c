"""Twins of the workflows that sample the portraits transformers, told sizes."""

import torch
from vitrine.engine.portraits import load_portraits
from vitrine_tests.comfy.twin_tools import euler_sigmas


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
            g.size_guidance,
            sigmas.scheduler,
        )
    return found
