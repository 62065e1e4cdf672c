"""Graphs that people wire from core's nodes, each a function of a MODEL: what its samplers put out."""

from dataclasses import dataclass, field
from typing import Any

import torch
from vitrine_tests.comfy.carried_models import control_of
from vitrine_tests.comfy.guided_graphs import encoded, half


@dataclass
class Scene:
    """A ComfyUI with a shipped model.

    Attributes:
        conds: name -> CONDITIONING.
        channels: of the latents.
        made: what a test keeps.
    """

    comfy: Any
    model: Any
    clip: Any
    vae: Any
    conds: dict
    channels: int = 4
    made: dict = field(default_factory=dict)

    @classmethod
    def of(cls, comfy, name="portraits, 64 px", channels=4):
        comfy.loop.run_until_complete(comfy.nodes.init_builtin_extra_nodes())
        model, clip, vae = comfy.call("VitrineLoadPortraits", model=name)
        return cls(comfy, model, clip, vae, encoded(clip), channels)

    def core(self, name, *first, **inputs):
        """The outputs of one of core's nodes; its own defaults where nothing is given."""
        return core(self.comfy, name, *first, **inputs)

    def empty(self, batch=1, side=16):
        return {"samples": torch.zeros(batch, self.channels, side, side)}

    def drawn(self, batch=1, side=16):
        """Latents of some picture."""
        return {"samples": torch.randn(batch, self.channels, side, side, generator=torch.Generator().manual_seed(8))}

    def sample(self, model, latent, **settings):
        """KSampler, KSampler (Advanced) with an ``add_noise``."""
        told = {
            "positive": self.conds["positive"],
            "negative": self.conds["negative"],
            "seed": 3,
            "steps": 3,
            "cfg": 3.0,
            "sampler_name": "euler",
            "scheduler": "normal",
            "denoise": 1.0,
        } | settings
        name = "KSampler"
        if "add_noise" in settings:
            name, told["noise_seed"] = "KSamplerAdvanced", told.pop("seed")
            del told["denoise"]
        return self.core(name, model=model, latent_image=latent, **told)[0]

    def control_net(self):
        """A ControlNet of random weights for the portraits."""
        return control_of(self.model.model.model_config.unet_config)


def core(comfy, name, *first, **inputs):
    kind = comfy.nodes.NODE_CLASS_MAPPINGS[name]
    asked = kind.INPUT_TYPES().get("required", {})
    for key, (sort, *more) in asked.items():
        options = more[0] if more else {}
        choices = sort if isinstance(sort, list) else options.get("options", [None])
        inputs.setdefault(key, options.get("default", choices[0]))
    with torch.inference_mode():
        out = getattr(kind(), kind.FUNCTION)(*first, **inputs)
    return out.result if hasattr(out, "result") else out


# --- one picture after another ------------------------------------------------------------------------------------
def text_to_image(s, model):
    return [s.sample(model, s.empty())]


def hires_fix(s, model):
    first = s.sample(model, s.empty())
    larger = s.core("LatentUpscaleBy", samples=first, upscale_method="bislerp", scale_by=1.5)[0]
    return [first, s.sample(model, larger, denoise=0.5, seed=4)]


def two_samplers(s, model):
    other = s.sample(model, s.empty(), positive=s.conds["second"], seed=9, steps=4, cfg=1.0)
    return [s.sample(model, s.empty()), other]


def image_to_image(s, model):
    side = 16 * s.vae.spacial_compression_encode()
    picture = torch.rand(1, side, side, 3, generator=torch.Generator().manual_seed(1))
    latent = s.core("VAEEncode", pixels=picture, vae=s.vae)[0]
    return [s.sample(model, latent, denoise=0.5)]


# --- parts of a picture -------------------------------------------------------------------------------------------
def left(batch=1):
    return half("left")["mask"].repeat(batch, 1, 1)


def inpaint(s, model):
    latent = s.core("SetLatentNoiseMask", samples=s.drawn(), mask=left())[0]
    return [s.sample(model, latent)]


def inpaint_a_batch(s, model):
    masks = torch.cat([left(), 1 - left()])
    latent = s.core("SetLatentNoiseMask", samples=s.drawn(2), mask=masks)[0]
    return [s.sample(s.core("DifferentialDiffusion", model=model)[0], latent)]


def inpaint_with_vae(s, model):
    picture = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(1))
    mask = torch.nn.functional.interpolate(left()[None], scale_factor=4)[0]
    latent = s.core("VAEEncodeForInpaint", pixels=picture, vae=s.vae, mask=mask, grow_mask_by=2)[0]
    return [s.sample(model, latent)]


def regional(change):
    """A graph of the positive and the second prompt, each changed, combined."""

    def graph(s, model):
        parts = [change(s, s.conds[name], number) for number, name in enumerate(("positive", "second"))]
        both = s.core("ConditioningCombine", conditioning_1=parts[0], conditioning_2=parts[1])[0]
        return [s.sample(model, s.empty(), positive=both)]

    return graph


def masked(bounds):
    def change(s, prompt, number):
        mask = 1 - left() if number else left()
        told = {"conditioning": prompt, "mask": mask, "strength": 1.0, "set_cond_area": bounds}
        return s.core("ConditioningSetMask", **told)[0]

    return change


def area(s, prompt, number):
    return s.core("ConditioningSetArea", conditioning=prompt, width=32, height=64, x=32 * number, y=0, strength=1.0)[0]


def part_of_run(s, prompt, number):
    ends = {"start": 0.5 * number, "end": 0.5 + 0.5 * number}
    return s.core("ConditioningSetTimestepRange", conditioning=prompt, **ends)[0]


def default_prompt(s, model):
    prompt = masked("default")(s, s.conds["positive"], 0)
    both = s.core("ConditioningSetDefaultCombine", cond=prompt, cond_DEFAULT=s.conds["second"])[0]
    return [s.sample(model, s.empty(), positive=both)]


# --- what stands beside a prompt ----------------------------------------------------------------------------------
def control_net(**settings):
    told = {"strength": 0.1, "start_percent": 0.0, "end_percent": 1.0} | settings
    both = told.pop("both", True)

    def graph(s, model):
        hint = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(2))
        prompts = {"positive": s.conds["positive"], "negative": s.conds["negative"]}
        found = s.core("ControlNetApplyAdvanced", control_net=s.control_net(), image=hint, **prompts, **told)
        return [s.sample(model, s.empty(), positive=found[0], **({"negative": found[1]} if both else {}))]

    return graph


def lora_hooks(s, model):
    """A LoRA on one prompt, whose strength changes in the course of the run."""
    frames = s.core(
        "CreateHookKeyframesInterpolated",
        strength_start=1.0,
        strength_end=0.2,
        interpolation="linear",
        start_percent=0.0,
        end_percent=1.0,
        keyframes_count=3,
        print_keyframes=False,
    )[0]
    hooks = s.core("SetHookKeyframes", hooks=hook_lora(model), hook_kf=frames)[0]
    prompt = s.core(
        "ConditioningSetProperties", cond_NEW=s.conds["positive"], strength=1.0, set_cond_area="default", hooks=hooks
    )[0]
    return [s.sample(model, s.empty(), positive=prompt)]


def hook_lora(model):
    import comfy.hooks

    draw = torch.Generator().manual_seed(4)
    name = "diffusion_model.middle_block.1.transformer_blocks.0.attn1.to_q"
    width = len(model.model.diffusion_model.get_submodule(name.removeprefix("diffusion_model.")).weight)
    up, down = torch.randn(width, 2, generator=draw), torch.randn(2, width, generator=draw) * 0.1
    return comfy.hooks.create_hook_lora({f"{name}.lora_up.weight": up, f"{name}.lora_down.weight": down}, 1.0, 0.0)


# --- parts of a run -----------------------------------------------------------------------------------------------
def custom(s, model, sigmas, latent, noise=True, positive="positive", cfg=3.0, **more):
    told = {
        "model": model,
        "add_noise": noise,
        "noise_seed": 3,
        "cfg": cfg,
        "positive": s.conds[positive],
        "negative": s.conds["negative"],
        "latent_image": latent,
        "sigmas": sigmas,
        "sampler": s.core("KSamplerSelect", sampler_name="euler")[0],
    }
    return s.core("SamplerCustom", **(told | more))[0]


def levels(s, model, steps=4, denoise=1.0):
    return s.core("BasicScheduler", model=model, scheduler="karras", steps=steps, denoise=denoise)[0]


def split(s, model):
    high, low = s.core("SplitSigmas", sigmas=levels(s, model), step=2)
    first = custom(s, model, high, s.empty())
    return [first, custom(s, model, low, first, noise=False)]


def split_by_denoise(s, model):
    high, low = s.core("SplitSigmasDenoise", sigmas=levels(s, model), denoise=0.5)
    first = custom(s, model, high, s.empty())
    return [first, custom(s, model, low, first, noise=False, positive="second")]


def leftover_noise(s, model):
    """A base and a refiner: one leaves the noise that the other goes on from."""
    told = {"steps": 4, "scheduler": "normal"}
    first = s.sample(
        model,
        s.empty(),
        add_noise="enable",
        start_at_step=0,
        end_at_step=2,
        return_with_leftover_noise="enable",
        **told,
    )
    return [first, s.sample(model, first, add_noise="disable", start_at_step=2, end_at_step=10000,
                            return_with_leftover_noise="disable", **told)]  # fmt: skip


def unsampled(s, model):
    """FlipSigmas: a picture's way back to noise, and forth again."""
    sigmas = s.core("SetFirstSigma", sigmas=levels(s, model, 3), sigma=10.0)[0]
    back = s.core("FlipSigmas", sigmas=sigmas)[0]
    noisy = custom(s, model, back, s.drawn(), noise=False, cfg=1.0)
    return [noisy, custom(s, model, sigmas, noisy, noise=False)]


# --- guiders ------------------------------------------------------------------------------------------------------
def guided(name, **prompts):
    """SamplerCustomAdvanced with one of core's guiders."""

    def graph(s, model):
        told = {key: s.conds[value] for key, value in prompts.items()}
        scales = {key: 2.5 for key in ("cfg", "cfg_conds", "cfg_cond2_negative")}
        kind = s.comfy.nodes.NODE_CLASS_MAPPINGS[name].INPUT_TYPES()["required"]
        told |= {key: value for key, value in scales.items() if key in kind}
        if "model_negative" in s.comfy.nodes.NODE_CLASS_MAPPINGS[name].INPUT_TYPES().get("optional", {}):
            told["model_negative"] = model
        guider = s.core(name, model=model, **told)[0]
        return [
            s.core(
                "SamplerCustomAdvanced",
                noise=s.core("RandomNoise", noise_seed=3)[0],
                guider=guider,
                sampler=s.core("KSamplerSelect", sampler_name="euler")[0],
                sigmas=levels(s, model, 3),
                latent_image=s.empty(),
            )[0]
        ]

    return graph


# --- batches ------------------------------------------------------------------------------------------------------
def picture_of_a_batch(s, model):
    one = s.core("LatentFromBatch", samples=s.drawn(3), batch_index=1, length=1)[0]
    return [s.sample(model, s.drawn(3), denoise=0.6), s.sample(model, one, denoise=0.6)]


def repeated(s, model):
    latent = s.core("RepeatLatentBatch", samples=s.drawn(), amount=3)[0]
    same = s.core("LatentBatchSeedBehavior", samples=latent, seed_behavior="fixed")[0]
    return [s.sample(model, same)]


def prompts_of_a_batch(s, model):
    """A prompt for each picture, as batch-prompt nodes make it: a text of two rows."""
    text = torch.cat([s.conds["positive"][0][0], s.conds["second"][0][0]])
    return [s.sample(model, s.empty(2), positive=[[text, dict(s.conds["positive"][0][1])]])]


def several_lengths(s, model):
    """The negative is three times as long: core repeats the prompt."""
    long = s.core("ConditioningConcat", conditioning_to=s.conds["negative"], conditioning_from=s.conds["middle"])[0]
    long = s.core("ConditioningConcat", conditioning_to=long, conditioning_from=s.conds["second"])[0]
    return [s.sample(model, s.empty(), negative=long)]


def with_node(name, **settings):
    """One of core's nodes that change a MODEL, behind ours."""
    return lambda s, model: [s.sample(s.core(name, model=model, **settings)[0], s.empty())]


def merged(s, model):
    """A merge with another clone of the same network: patches of ours stay on the first."""
    other = s.core("ModelMergeSimple", model1=model, model2=s.made["lora"], ratio=0.7)[0]
    return [s.sample(other, s.empty())]


def swapped_schedule(s, model):
    sampling = s.core("ModelSamplingDiscrete", model=model, sampling="lcm", zsnr=True)[0]
    return [s.sample(sampling, s.empty(), sampler_name="lcm", scheduler="sgm_uniform", cfg=1.0)]


PROMPTS = {"positive": "positive", "negative": "negative"}
GRAPHS = {
    "text to image": text_to_image,
    "hires fix": hires_fix,
    "two samplers on one model": two_samplers,
    "image to image": image_to_image,
    "inpaint, noise mask": inpaint,
    "inpaint, a batch of masks, Differential Diffusion": inpaint_a_batch,
    "inpaint, VAE Encode (for Inpainting)": inpaint_with_vae,
    "regional, masks": regional(masked("default")),
    "regional, masks as areas": regional(masked("mask bounds")),
    "regional, areas": regional(area),
    "regional, timestep ranges": regional(part_of_run),
    "regional, a default prompt": default_prompt,
    "ControlNet": control_net(),
    "ControlNet, on the prompt alone": control_net(both=False),
    "ControlNet, part of the run": control_net(end_percent=0.4),
    "LoRA hooks with keyframes": lora_hooks,
    "Split Sigmas": split,
    "Split Sigmas (Denoise)": split_by_denoise,
    "KSampler (Advanced), leftover noise": leftover_noise,
    "Flip Sigmas": unsampled,
    "SamplerCustomAdvanced, Basic Guider": guided("BasicGuider", conditioning="positive"),
    "SamplerCustomAdvanced, CFG Guider": guided("CFGGuider", **PROMPTS),
    "SamplerCustomAdvanced, Dual CFG Guider": guided(
        "DualCFGGuider", cond1="positive", cond2="middle", negative="negative"
    ),
    "SamplerCustomAdvanced, Dual Model Guider": guided("DualModelGuider", **PROMPTS),
    "SamplerCustomAdvanced, Perp-Neg Guider": guided("PerpNegGuider", **PROMPTS, empty_conditioning="middle"),
    "Latent From Batch": picture_of_a_batch,
    "Repeat Latent Batch, one seed": repeated,
    "a prompt for each picture": prompts_of_a_batch,
    "prompts of several lengths": several_lengths,
    "FreeU": with_node("FreeU_V2"),
    "Kohya Deep Shrink": with_node("PatchModelAddDownscale", block_number=1, end_percent=0.6),
    "HyperTile": with_node("HyperTile", tile_size=16, max_depth=1),
    "ToMe": with_node("TomePatchModel"),
    "RescaleCFG": with_node("RescaleCFG"),
    "VideoLinearCFGGuidance": with_node("VideoLinearCFGGuidance"),
    "Self-Attention Guidance": with_node("SelfAttentionGuidance"),
    "Perturbed-Attention Guidance": with_node("PerturbedAttentionGuidance"),
    "ModelSamplingDiscrete, LCM": swapped_schedule,
    "ModelMergeSimple": merged,
}
"""Name -> the LATENTs of a (scene, MODEL)."""
