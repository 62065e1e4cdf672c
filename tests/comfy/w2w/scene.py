"""What the W2W node tests share: one stock sampling run, one bare call of a patched network, sliders by name."""

import torch

PROMPT = "a smiling face with cap left navy shirt on blue"
STEPS, SEED = 6, 3


def sliders(**given):
    table = {f"label_{i}": "" for i in range(1, 5)} | {f"strength_{i}": 0.0 for i in range(1, 5)}
    for i, (label, strength) in enumerate(given.items(), 1):
        table |= {f"label_{i}": label, f"strength_{i}": strength}
    return table | {"protect": ""}


def ddim(model, positive):
    """Stock sampling: KSampler's ddim, cfg 1, so that the diffusers side needs no negative prompt."""
    import comfy.sample

    noise = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(SEED))
    with torch.inference_mode():
        return comfy.sample.sample(
            model,
            noise,
            STEPS,
            1.0,
            "euler",
            "normal",
            positive,
            positive,
            torch.zeros(1, 4, 16, 16),
            seed=SEED,
            disable_pbar=True,
        )


def network(model, positive, t):
    """One bare call of the patched network, and the same latent for the diffusers side."""
    x = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(SEED))
    import comfy.model_management

    comfy.model_management.load_models_gpu([model])
    sampling = model.model.model_sampling
    sigma = sampling.sigma(torch.tensor([float(t)]))
    with torch.inference_mode():
        x0 = model.model.apply_model(
            x * (1 + sigma**2) ** 0.5, sigma, c_crossattn=positive[0][0], transformer_options=options(model, sigma)
        )
    return x, (x * (1 + sigma**2) ** 0.5 - x0) / sigma


def options(model, sigma):
    import comfy.patcher_extension

    made = dict(model.model_options.get("transformer_options", {}))
    made["wrappers"] = comfy.patcher_extension.copy_nested_dicts(model.wrappers)
    return made | {"sample_sigmas": sigma, "sigmas": sigma}


def pipelines_output(pipe, space, person, t, **how):
    """What the pipeline's network gives for the same latent."""
    from vitrine.engine.w2w import BatchedLora, edit

    rows = person.coefficients if not how else edit(space, person.coefficients, **how)
    x = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(SEED))
    text = pipe.encode_prompt([PROMPT], "cpu", 1, False)[0]
    with torch.no_grad(), BatchedLora(pipe.unet, space.manifest, space.decode(rows)):
        return pipe.unet(x, torch.tensor([t]), text).sample
