"""Control conditioning as a diffusers pipeline: size, crop and flip with a weight that follows the noise level.

Either training-free, on models with size inputs (SDXL, PixArt), or with a control checkpoint trained for the model.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import PixArtAlphaPipeline, PixArtSigmaPipeline, StableDiffusionPipeline, StableDiffusionXLPipeline
from diffusers.utils import BaseOutput

from ..control import (
    ControlCheckpoint,
    ControlStep,
    GammaConfig,
    GuidanceConfig,
    PaddingConfig,
    ReferenceBlend,
    SizeCondition,
    load_control,
    needed_evaluations,
    pad_text,
    trained_settings,
)
from ..control.control_sampling import ControlledSampling
from ..control.reference_blend import Reference
from ..diffusion.guidance import scale_for_size
from ..diffusion.noise import seeds_of
from ..diffusion.schedule import convention_of
from ..errors import expect, refuse
from ..network.condition import Condition
from ..settings.sizes import check_sides
from ..tracing.fingerprint import fingerprint_of
from .adapter import reads_sizes
from .conventions import Generators, StepEnd, noise_sources, refuse_arguments, revision
from .joined import TaskPipeline

Sizes = SizeCondition | Sequence[SizeCondition]
_SAMPLED = (StableDiffusionPipeline, StableDiffusionXLPipeline, PixArtAlphaPipeline, PixArtSigmaPipeline)
"""Pipelines whose prompts, noise and schedulers are used as these classes define them."""

MEANINGLESS = {
    "cross_attention_kwargs": "set the strength of an adapter with set_adapters()",
    "guidance_rescale": "sample with the stock pipeline",
    "timesteps": "pass sigmas, or num_inference_steps",
    "clip_skip": "pass prompt_embeds",
    "ip_adapter_image": "sample with the stock pipeline",
    "ip_adapter_image_embeds": "sample with the stock pipeline",
    "use_resolution_binning": "pictures are made at the size asked for",
    "clean_caption": "clean the prompt before the call",
    "callback": "use callback_on_step_end",
    "callback_on_step_end_tensor_inputs": "the callback gets latents alone",
    "original_size": "use size_condition",
    "target_size": "use size_condition",
    "crops_coords_top_left": "use size_condition",
    "negative_original_size": "use size_condition",
    "negative_target_size": "use size_condition",
    "negative_crops_coords_top_left": "use size_condition",
    "denoising_end": "sample with the stock pipeline",
}
"""What the stock pipelines take and these do not, and what to do instead."""


@dataclass
class ControlConditionedPipelineOutput(BaseOutput):
    """``images``: PIL pictures or a tensor. ``log``: one :class:`ControlStep` for each step."""

    images: Any
    log: tuple[ControlStep, ...]


class ControlConditionedPipeline(TaskPipeline):
    """Stable Diffusion, SDXL or PixArt told how large a picture should look, with a weight over the noise level.

    SDXL and the 1024 px models of PixArt have size inputs, which work training-free; the others take a control
    checkpoint. Pictures are made at the size asked for, PixArt's too: no resolution binning.

    Without control a picture's condition is its own size and no crop. So is that of the unconditional half, for which
    SDXL's stock pipeline repeats the positive's sizes unless ``negative_original_size`` and the like are passed; so
    does this one under ``GuidanceConfig(negative="positive")``.

    Example:
        >>> pipe = ControlConditionedPipeline.from_pipe(StableDiffusionXLPipeline.from_pretrained("path/to/sdxl"))
        >>> size = SizeCondition(original=(512, 512))
        >>> images = pipe("a red car", size_condition=size, gamma=GammaConfig(alpha=1.0)).images
        >>> pipe = ControlConditionedPipeline.from_pipe(StableDiffusionPipeline.from_pretrained("path/to/base"))
        >>> out = pipe("a red car", checkpoint=pipe.load_control("control.safetensors"), size_condition=size)
        >>> out.images, [step.gamma for step in out.log]
    """

    _samples_as_stock = False

    @classmethod
    def _check(cls, pipeline: Any, components: dict[str, Any]) -> None:
        """Only pipelines of texts alone: their loops are run here."""
        if not isinstance(pipeline, _SAMPLED):
            accepted = [kind.__name__ for kind in _SAMPLED]
            remedy = f"{cls.__name__} is for another model family"
            raise refuse("pipeline", type(pipeline).__name__, accepted, remedy)
        super()._check(pipeline, components)

    def load_control(self, path: str | Path) -> ControlCheckpoint:
        """Read a checkpoint, to be passed to calls. Its ``base.*`` and ``lora.*`` weights go into this model."""
        checkpoint, net = load_control(path), self._network
        checkpoint.metadata.check(net, fingerprint_of(net) if checkpoint.metadata.base_hash else "")
        weights = {k.split(".", 1)[1]: v for k, v in checkpoint.extra.items()}
        unknown = sorted(set(weights) - set(net.state_dict()))
        if unknown:
            raise refuse("weights", unknown[:3], "names this model has", "for lora.*, call add_adapter() first")
        net.load_state_dict(weights, strict=False)
        return checkpoint

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        *,
        size_condition: Sizes | None = None,
        gamma: GammaConfig | None = None,
        guidance: GuidanceConfig | None = None,
        reference: Reference = "target",
        checkpoint: ControlCheckpoint | None = None,
        padding: PaddingConfig | None = None,
        upscale: float = 1.0,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        sigmas: list[float] | None = None,
        seeds: int | Sequence[int] | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: torch.Tensor | None = None,
        eta: float = 0.0,
        guidance_scale: float | None = None,
        num_images_per_prompt: int = 1,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: StepEnd | None = None,
        **embeds: torch.Tensor,
    ) -> ControlConditionedPipelineOutput:
        """Sample with time-weighted control (Berrada et al. 2024, Eq. 1) and two-way guidance (Eq. 2).

        Args:
            prompt, negative_prompt: one for all pictures, or one for each (for each ``num_images_per_prompt``).
            size_condition: size, crop and flip; one for all or one for each.
            gamma: the curve. With a checkpoint its own is used, and a contradiction warned of.
            guidance: scale, control strength, nesting; by default scale 5 and no control guidance.
            reference: the neutral size of the training-free blend, see :class:`ReferenceBlend`.
            checkpoint: from :meth:`load_control`; None blends training-free.
            padding: how positions after the prompt are filled; None leaves them as the text encoder made them.
            upscale: s of Eq. 4: how many times larger than the size ``guidance.scale`` was chosen for.
            height, width: of the pictures, in pixels.
            sigmas: the scheduler's noise levels, where it takes them, instead of ``num_inference_steps``.
            seeds: one for each picture; results do not depend on the batch.
            generator: instead of seeds: one generator for all pictures, or one for each.
            latents: (B, C, h, w) noise of unit variance, instead of seeds.
            guidance_scale: diffusers' name for ``GuidanceConfig(scale=...)``.
            output_type: ``"pil"``, ``"pt"``, ``"np"`` or ``"latent"``.
            return_dict: False returns the tuple (images, log).
            callback_on_step_end: called as callback(pipe, step, t, {"latents": x}) after each step; "latents" of the
                dict it returns replace the run's.
            embeds: encoded prompts by the stock pipeline's names (``prompt_embeds``, ...), instead of ``prompt``.
        """
        embeds_taken = self._embeds()
        unknown = {k: v for k, v in embeds.items() if k not in embeds_taken}
        refuse_arguments([ControlConditionedPipeline.__call__], unknown, MEANINGLESS, embeds_taken)
        with self._in_use():
            convention_of(self.scheduler, self._network)
            if not hasattr(self.scheduler, "scale_model_input"):
                remedy = "use UniPC or DPM++ with use_flow_sigmas"
                raise refuse("scheduler", type(self.scheduler).__name__, "one that scales a UNet's input", remedy)
            size = self._size(height, width)
            seeds = None if seeds is None else seeds_of(seeds)
            settings = _guidance_of(guidance, guidance_scale)
            settings = replace(settings, scale=scale_for_size(settings.scale, upscale))
            gamma, padding = self._settings(checkpoint, gamma, padding)
            texts = self._texts(prompt, negative_prompt, settings, padding, embeds)
            texts = {semantics: _repeated(cond, num_images_per_prompt) for semantics, cond in texts.items()}
            count = max([_rows_of(texts[True]), *(len(n) for n in (seeds, latents) if n is not None)])
            sizes = _one_each(size_condition or SizeCondition(), count)
            sampling = self._sampling(texts, sizes, size, gamma, settings, checkpoint, reference)
            grid = {"num_inference_steps": num_inference_steps} if sigmas is None else {"sigmas": sigmas}
            self.scheduler.set_timesteps(**grid, device=self._adapter.device)  # the noise's scale depends on it
            noise, extra = self._noise(count, size, noise_sources(seeds, generator, latents, count), latents, eta)
            revise = revision(self, callback_on_step_end)
            with self.progress_bar(total=len(self.scheduler.timesteps)) as bar:
                images, log = sampling.run(
                    noise, self.scheduler, progress=lambda *_: bar.update(), revise=revise, **extra
                )
            if output_type != "latent":
                images = self._pictures(images, output_type)
        output: Any = ControlConditionedPipelineOutput(images, tuple(log))
        return output if return_dict else output.to_tuple()

    def _embeds(self) -> list[str]:
        """Names of encoded prompts that this model's ``encode_prompt`` takes."""
        names = inspect.signature(self.encode_prompt).parameters
        return [name for name in names if name.endswith(("_embeds", "_attention_mask"))]

    # --- before the loop ----------------------------------------------------------------------------------------
    def _settings(
        self, checkpoint: ControlCheckpoint | None, gamma: GammaConfig | None, padding: PaddingConfig | None
    ) -> tuple[GammaConfig, PaddingConfig | None]:
        if checkpoint is None:
            ReferenceBlend(self._network, GammaConfig())  # refuses a model without size inputs before any work
            return gamma or GammaConfig(), padding
        expect(checkpoint, ControlCheckpoint, "checkpoint", "pipe.load_control(path) reads one")
        checkpoint.metadata.check(self._network)
        return trained_settings(checkpoint.metadata, gamma, padding)

    def _size(self, height: int | None, width: int | None) -> tuple[int, int]:
        side = self._network.config.sample_size
        sides = (side, side) if isinstance(side, int) else tuple(side)
        factor = self.vae_scale_factor
        check_sides("height, width", height, width)
        size = (height or sides[0] * factor, width or sides[1] * factor)
        if any(s % factor for s in size):
            raise refuse("height, width", size, f"multiples of {factor}", "round them")
        return size

    def _texts(
        self, prompt: Any, negative: Any, guidance: GuidanceConfig, padding: PaddingConfig | None, embeds: dict
    ) -> dict[bool, Condition]:
        """With semantics (True) or without (False) -> condition without sizes."""
        if (prompt is None) == ("prompt_embeds" not in embeds):
            raise refuse("prompt", "both or none", "a prompt, or prompt_embeds=", "give one of them")
        if padding is not None and prompt is None:
            raise refuse("padding", "encoded prompts", "prompts as text", "call pad_text on the embeddings yourself")
        prompts = [prompt] if isinstance(prompt, str) else prompt
        if prompts is not None and isinstance(negative, str):
            negative = [negative] * len(prompts)
        both = any(not semantics for _, semantics in needed_evaluations(guidance))
        conditions = self._encode(prompts, negative, both, embeds)
        if padding is not None:
            texts = {True: prompts, False: negative or [""] * len(prompts)}
            conditions = {k: self._padded(c, texts[k], padding) for k, c in conditions.items()}
        return conditions

    def _padded(self, cond: Condition, prompts: list[str], padding: PaddingConfig) -> Condition:
        assert cond.text is not None
        text, mask = pad_text(cond.text, self._lengths(cond, prompts), padding)
        masked = {"encoder_attention_mask": mask} if "encoder_attention_mask" in cond.extra else {}
        return replace(cond, text=text, extra=cond.extra | masked)

    def _lengths(self, cond: Condition, prompts: list[str]) -> torch.Tensor:
        if "encoder_attention_mask" in cond.extra:
            return cond.extra["encoder_attention_mask"].sum(1).long()
        length = self.tokenizer.model_max_length
        how = {"padding": "max_length", "max_length": length, "truncation": True, "return_tensors": "pt"}
        return self.tokenizer(prompts, **how).attention_mask.sum(1)

    def _sampling(
        self,
        texts: dict[bool, Condition],
        sizes: list[SizeCondition],
        size: tuple[int, int],
        gamma: GammaConfig,
        guidance: GuidanceConfig,
        checkpoint: ControlCheckpoint | None,
        reference: Reference,
    ) -> ControlledSampling:
        count, device = len(sizes), self._adapter.device
        embedder, values = None, None
        if checkpoint is not None:
            embedder, spec = checkpoint.embedder.to(device), checkpoint.embedder.spec
            values = torch.cat([spec.rows(s.controls(size, spec)) for s in sizes])
            high_is_null = embedder.h is None
        else:
            high_is_null = all(s.high_is_null(size) for s in sizes)
        texts = {k: c.take(torch.zeros(count, dtype=torch.long)) if _rows_of(c) == 1 else c for k, c in texts.items()}
        if any(_rows_of(c) != count for c in texts.values()):
            raise refuse("prompts", [_rows_of(c) for c in texts.values()], f"1 or {count}", "one for each picture")
        # Sizes stay float32: half precision would round them.
        inputs = {True: self._sizes(sizes, size), False: self._sizes([SizeCondition()] * count, size)}
        placed = {k: c.to(device, self._network.dtype) for k, c in texts.items()}
        inputs = {control: {k: v.to(device) for k, v in tensors.items()} for control, tensors in inputs.items()}
        conditions = {
            (control, semantics): replace(cond, extra=cond.extra | tensors)
            for semantics, cond in placed.items()
            for control, tensors in inputs.items()
        }
        return ControlledSampling(
            self._network,
            gamma,
            guidance,
            conditions,
            count,
            high_is_null,
            embedder,
            values,
            reference,
            self.vae_scale_factor,
        )

    def _noise(
        self, count: int, size: tuple[int, int], rows: Generators | None, latents: torch.Tensor | None, eta: float
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Scaled noise, and what the scheduler's steps take; some sample more from the same generators."""
        shape = (count, self._network.config.in_channels, *size)
        noise = self.prepare_latents(*shape, self._network.dtype, self._adapter.device, rows, latents)
        return noise, self.prepare_extra_step_kwargs(rows, eta)

    # --- after it -----------------------------------------------------------------------------------------------
    def _pictures(self, latents: torch.Tensor, output_type: str) -> Any:
        decoded = self._adapter.decode(latents)
        if hasattr(self, "run_safety_checker"):
            decoded = self.run_safety_checker(decoded, self._adapter.device, decoded.dtype)[0]
        return self.image_processor.postprocess(decoded, output_type=output_type)

    # --- what the models differ in ------------------------------------------------------------------------------------
    def _encode(self, prompts: Any, negative: Any, both: bool, embeds: dict) -> dict[bool, Condition]:
        device = self._adapter.device
        if not self._adapter.is_unet:
            text, mask, empty, empty_mask = self.encode_prompt(
                prompts, both, "" if negative is None else negative, 1, device, **embeds
            )
            encoded = {True: (text, mask)} | ({False: (empty, empty_mask)} if both else {})
            return {k: Condition(t, None, {"encoder_attention_mask": m.to(t)}) for k, (t, m) in encoded.items()}
        if not isinstance(self, StableDiffusionXLPipeline):
            text, empty = self.encode_prompt(prompts, device, 1, both, negative, **embeds)
            return {True: Condition(text)} | ({False: Condition(empty)} if both else {})
        text, empty, pooled, empty_pooled = self.encode_prompt(
            prompts, device=device, do_classifier_free_guidance=both, negative_prompt=negative, **embeds
        )
        return {True: Condition(text, pooled)} | ({False: Condition(empty, empty_pooled)} if both else {})

    def _sizes(self, conditions: list[SizeCondition], size: tuple[int, int]) -> dict[str, torch.Tensor]:
        if reads_sizes(self._network):
            return {"time_ids": torch.tensor([c.time_ids(size) for c in conditions], dtype=torch.float32)}
        if not self._network.config.get("use_additional_conditions"):
            return {}
        ratios = torch.tensor([[c.aspect(size)] for c in conditions], dtype=torch.float32)
        return {"resolution": torch.tensor([c.original or size for c in conditions]).float(), "aspect_ratio": ratios}


# --- the arguments of a call, made what sampling takes -----------------------------------------------------------
def _one_each(sizes: Sizes, count: int) -> list[SizeCondition]:
    """One size condition for each picture."""
    conditions = [sizes] * count if isinstance(sizes, SizeCondition) else list(sizes)
    if len(conditions) != count:
        raise refuse("size_condition", len(conditions), f"1 or {count}", "one for each picture")
    return conditions


def _guidance_of(guidance: GuidanceConfig | None, scale: float | None) -> GuidanceConfig:
    """The guidance of a call; ``guidance_scale`` is diffusers' name for its scale, 5 by default."""
    if guidance is not None and scale is not None:
        raise refuse("guidance, guidance_scale", "both", "one of them", "the scale is a part of GuidanceConfig")
    chosen = GuidanceConfig(scale=5.0 if scale is None else scale) if guidance is None else guidance
    expect(chosen, GuidanceConfig, "guidance", "e.g. GuidanceConfig(scale=5.0); a number is guidance_scale")
    return chosen


def _rows_of(cond: Condition) -> int:
    """Rows of a condition's text, 0 where it has none."""
    return 0 if cond.text is None else len(cond.text)


def _repeated(cond: Condition, each: int) -> Condition:
    """Every row ``each`` times, the pictures of one prompt after each other, as diffusers orders them."""
    return cond.take(torch.arange(_rows_of(cond)).repeat_interleave(each)) if each > 1 else cond
