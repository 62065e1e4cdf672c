"""Core's guiders and model patches on the portraits model, and what the tests of rows and passes ask of each."""

import torch
from vitrine.engine.nemo import NeuronSet, block
from vitrine.engine.tracing.addresses import resolve

TEXTS = {
    "positive": "a smiling dark face with curly blond hair on pink",
    "negative": "a pale face",
    "middle": "a bald head on gray",
    "second": "a face with glasses and navy shirt",
}
VALUES = "down-level1-repeat0-vit-block0-cross-v"
MIDDLE = "mid-vit-out"
NEURONS = NeuronSet({VALUES: tuple(range(40))})


def encoded(clip):
    """Name -> CONDITIONING of each of the texts."""
    with torch.inference_mode():
        return {k: clip.encode_from_tokens_scheduled(clip.tokenize(text)) for k, text in TEXTS.items()}


def told(conditioning, **values):
    return [[text, settings | values] for text, settings in conditioning]


def half(side):
    """MASK of one half of the picture."""
    mask = torch.zeros(1, 16, 16)
    mask[:, :, :8] = 1
    return {"mask": mask if side == "left" else 1 - mask, "mask_strength": 1.0, "set_area_to_bounds": False}


def cfg(model, conds, scale=3.0):
    import comfy.samplers

    guider = comfy.samplers.CFGGuider(model)
    guider.set_conds(conds["positive"], conds["negative"])
    guider.set_cfg(scale)
    return guider


def with_positive(change):
    """CFG with another positive made of the conditionings."""
    return lambda model, conds: cfg(model, conds | {"positive": change(conds)})


def dual(nested):
    def make(model, conds):
        from comfy_extras.nodes_custom_sampler import Guider_DualCFG

        guider = Guider_DualCFG(model)
        guider.set_conds(conds["positive"], conds["middle"], conds["negative"])
        guider.set_cfg(2.0, 3.0, nested)
        return guider

    return make


def dual_model(model, conds, other=None):
    from comfy_extras.nodes_custom_sampler import Guider_DualModel

    guider = Guider_DualModel(model, model if other is None else other)
    guider.set_conds(conds["positive"], conds["negative"])
    guider.set_cfg(3.0)
    return guider


def perp_neg(model, conds):
    from comfy_extras.nodes_perpneg import Guider_PerpNeg

    guider = Guider_PerpNeg(model)
    guider.set_conds(conds["positive"], conds["negative"], conds["middle"])
    guider.set_cfg(3.0, 1.0)
    return guider


def basic(model, conds):
    from comfy_extras.nodes_custom_sampler import Guider_Basic

    guider = Guider_Basic(model)
    guider.set_conds(conds["positive"])
    return guider


def hooked(model, conds, strength=0.5):
    """The positive with a LoRA of its own."""
    import comfy.hooks

    name = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_v"
    width = model.model.diffusion_model.get_submodule(_values(model).path).weight.shape
    draw = torch.Generator().manual_seed(4)
    lora = {
        f"{name}.lora_up.weight": torch.randn(width[0], 2, generator=draw) * 0.1,
        f"{name}.lora_down.weight": torch.randn(2, width[1], generator=draw) * 0.1,
    }
    hooks = comfy.hooks.create_hook_lora(lora, strength, 0.0)
    return cfg(model, conds | {"positive": told(conds["positive"], hooks=hooks)})


AREA = {"area": (16, 8, 0, 0), "strength": 1.0, "set_area_to_bounds": False}
OTHER_AREA = {"area": (16, 8, 0, 8), "strength": 1.0, "set_area_to_bounds": False}
GUIDERS = {
    "CFGGuider": (cfg, {"cond": "positive", "uncond": "negative"}),
    "CFGGuider, cfg 1": (lambda m, c: cfg(m, c, 1.0), {"cond": "positive"}),
    "BasicGuider": (basic, {"cond": "positive"}),
    "DualCFGGuider": (dual(False), {"cond": "positive", "middle": "middle", "uncond": "negative"}),
    "DualCFGGuider, nested": (dual(True), {"cond": "positive", "middle": "middle", "uncond": "negative"}),
    "DualModelGuider, one model": (dual_model, {"cond": "positive", "uncond": "negative"}),
    "PerpNegGuider": (perp_neg, {"cond": "positive", "uncond": "negative", "empty_negative_prompt": "middle"}),
    "masks": (
        with_positive(lambda c: told(c["positive"], **half("left")) + told(c["second"], **half("right"))),
        {"cond 1": "positive", "cond 2": "second", "uncond": "negative"},
    ),
    "areas": (
        with_positive(lambda c: told(c["positive"], **AREA) + told(c["second"], **OTHER_AREA)),
        {
            "cond 1": "positive",
            "cond 2": "second",
            "uncond 1": "negative",
            "uncond 2": "negative",
            "uncond 3": "negative",
        },
    ),
    "timestep ranges": (
        with_positive(
            lambda c: (
                told(c["positive"], start_percent=0.0, end_percent=1.0)
                + told(c["second"], start_percent=0.9, end_percent=1.0)
            )
        ),
        {"cond 1": "positive", "uncond": "negative"},
    ),
    "hooks": (hooked, {"cond": "positive", "uncond": "negative"}),
}
"""Name -> (guider of a MODEL and conditionings, what a recording of its first step has: half -> text)."""


def patched(comfy, name, model, **more):
    """A core node's MODEL; the node's own defaults, but for a strength that shows."""
    kind = comfy.nodes.NODE_CLASS_MAPPINGS[name]
    inputs = {"model": model} | more
    for key, (sort, *options) in kind.INPUT_TYPES()["required"].items():
        default = options[0].get("default") if options else None
        inputs.setdefault(key, sort[0] if isinstance(sort, list) else default)
    with torch.inference_mode():
        out = getattr(kind(), kind.FUNCTION)(**inputs)
    return (out.result if hasattr(out, "result") else out)[0]


PATCHES = (
    "PerturbedAttentionGuidance",
    "SelfAttentionGuidance",
    "NAGuidance",
    "APG",
    "TCFG",
    "SkipLayerGuidanceDiT",
    "SkipLayerGuidanceDiTSimple",
    "RescaleCFG",
    "EasyCache",
    "LazyCache",
)


def sampled(guider, steps=2, sampler="euler", scheduler="ddim_uniform", seed=3, latent=None, options=None):
    """(B, 4, 16, 16) latents of a run from the top."""
    import comfy.sample
    import comfy.samplers

    start = torch.zeros(1, 4, 16, 16) if latent is None else latent
    sigmas = comfy.samplers.KSampler(guider.model_patcher, steps, "cpu", sampler, scheduler).sigmas
    chosen = comfy.samplers.sampler_object(sampler)
    chosen.extra_options = dict(options or {})
    with torch.inference_mode():
        noise = comfy.sample.prepare_noise(start, seed)
        return guider.sample(noise, start, chosen, sigmas, seed=seed, disable_pbar=True).clone()


def _values(model):
    return resolve(model.model.diffusion_model, VALUES)[0]


def values_of(model, text):
    """(1, N, width) what the tapped layer gives for a text."""
    with torch.inference_mode():
        return model.model.diffusion_model.get_submodule(_values(model).path)(text)


def blocked_by_text(model, text, neurons=NEURONS):
    """A clone that blocks neurons in the rows whose text is this one, found by looking at the text itself."""
    import comfy.patcher_extension

    def apply(executor, x, t, c_concat=None, c_crossattn=None, control=None, options=None, **conditions):
        length = text.shape[1]
        rows = torch.tensor([torch.equal(row[:length], text[0]) for row in c_crossattn])
        with block(executor.class_obj.diffusion_model, neurons, rows=rows):
            return executor(x, t, c_concat, c_crossattn, control, options, **conditions)

    clone = model.clone()
    clone.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.APPLY_MODEL, "test", apply)
    return clone
