"""Control conditioning as diffusers pipelines: size, crop and flip with a weight that follows the noise level.

Either training-free, on models that are told sizes (SDXL, PixArt), or with a control checkpoint trained for the model.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, PixArtAlphaPipeline, StableDiffusionPipeline, StableDiffusionXLPipeline
from diffusers.utils import BaseOutput

from ..condition import Condition
from ..control import (
    ControlCheckpoint,
    ControlStep,
    GammaConfig,
    GuidanceConfig,
    Injection,
    PaddingConfig,
    ReferenceBlend,
    Told,
    guide,
    load_control,
    needed,
    pad_text,
    settle,
)
from ..control.reference_blend import Reference
from ..control.sampling import Key
from ..errors import refuse
from ..families import call_of
from ..fingerprint import fingerprint_of
from ..guidance import scale_for_size
from ..progress import Progress, silent
from ..schedule import NoiseSchedule


@dataclass
class ControlConditionedPipelineOutput(BaseOutput):
    """``images``: PIL pictures or a tensor. ``log``: one :class:`ControlStep` for each step."""

    images: Any
    log: tuple[ControlStep, ...]


@dataclass(frozen=True)
class _Plan:
    """One run's settings, after checks: what the loop reads."""

    gamma: GammaConfig
    guidance: GuidanceConfig
    conditions: dict[Key, Condition]
    high_is_null: bool
    count: int
    checkpoint: ControlCheckpoint | None
    values: torch.Tensor | None
    reference: Reference
    device: torch.device


class _Controlled(DiffusionPipeline):
    """What the pipelines share; they differ in how prompts and sizes become conditions."""

    _backbone_name = "unet"

    @property
    def _net(self) -> Any:
        return getattr(self, self._backbone_name)

    def load_control(self, path: str | Path) -> ControlCheckpoint:
        """Read a checkpoint, to be passed to calls. Its ``base.*`` and ``lora.*`` weights go into this model.

        Raises:
            VitrineError: of another family or width, or with weights this model has no place for.
        """
        checkpoint, net = load_control(path), self._net
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
        told: Told | Sequence[Told] | None = None,
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
        seeds: Sequence[int] | None = None,
        latents: torch.Tensor | None = None,
        eta: float = 0.0,
        output_type: str = "pil",
        progress: Progress = silent,
        **embeds: torch.Tensor,
    ) -> ControlConditionedPipelineOutput:
        """Sample with time-weighted control (Berrada et al. 2024, Eq. 1) and two-way guidance (Eq. 2).

        Args:
            prompt, negative_prompt: one for all pictures, or one for each.
            told: size, crop and flip that the pictures are told; one for all or one for each.
            gamma: the curve. With a checkpoint its own is used, and a contradiction warned of.
            guidance: scale, control strength, nesting; by default scale 5 and no control guidance.
            reference: the neutral size of the training-free blend, see :class:`ReferenceBlend`.
            checkpoint: from :meth:`load_control`; None blends training-free.
            padding: how positions after the prompt are filled; None leaves them as the text encoder made them.
            upscale: s of Eq. 4: how many times larger than the size ``guidance.scale`` was chosen for.
            height, width: of the pictures, in pixels.
            sigmas: the scheduler's noise levels, where it takes them, instead of ``num_inference_steps``.
            seeds: one for each picture; results do not depend on the batch.
            latents: (B, C, h, w) noise of unit variance, instead of seeds.
            output_type: ``"pil"``, ``"pt"``, ``"np"`` or ``"latent"``.
            embeds: encoded prompts by the stock pipeline's names (``prompt_embeds``, ...), instead of ``prompt``.

        Raises:
            VitrineError: a model without size inputs and no checkpoint, another model's checkpoint, counts that do not
                match, padding of prompts that are encoded already.
        """
        try:
            size = self._size(height, width)
            settings = guidance or GuidanceConfig(scale=5.0)
            settings = replace(settings, scale=scale_for_size(settings.scale, upscale))
            gamma, padding = self._settled(checkpoint, gamma, padding)
            texts = self._texts(prompt, negative_prompt, settings, padding, embeds)
            given = [n for n in (seeds, latents) if n is not None]
            count = max([_length(texts[True]), *(len(n) for n in given)])
            plan = self._plan(texts, _each(told or Told(), count), size, count, gamma, settings, checkpoint, reference)
            grid = {"num_inference_steps": num_inference_steps} if sigmas is None else {"sigmas": sigmas}
            self.scheduler.set_timesteps(**grid, device=plan.device)  # the noise's scale depends on it
            noise, generators = self._noise(plan, size, seeds, latents)
            extra = self.prepare_extra_step_kwargs(generators, eta)
            images, log = self._run(plan, noise, extra, progress)
            if output_type != "latent":
                images = self._pictures(images, output_type)
            return ControlConditionedPipelineOutput(images, tuple(log))
        finally:  # offloaded models go back also after an interruption
            self.maybe_free_model_hooks()

    # --- before the loop ----------------------------------------------------------------------------------------
    def _settled(
        self, checkpoint: ControlCheckpoint | None, gamma: GammaConfig | None, padding: PaddingConfig | None
    ) -> tuple[GammaConfig, PaddingConfig | None]:
        if checkpoint is None:
            ReferenceBlend(self._net, GammaConfig())  # refuses a model without sizes before any work
            return gamma or GammaConfig(), padding
        checkpoint.metadata.check(self._net)
        return settle(checkpoint.metadata, gamma, padding)

    def _size(self, height: int | None, width: int | None) -> tuple[int, int]:
        side = self._net.config.sample_size
        sides = (side, side) if isinstance(side, int) else tuple(side)
        factor = self.vae_scale_factor
        size = (height or sides[0] * factor, width or sides[1] * factor)
        if any(s % factor for s in size):
            raise refuse("height, width", size, f"multiples of {factor}", "round them")
        return size

    def _texts(
        self, prompt: Any, negative: Any, guidance: GuidanceConfig, padding: PaddingConfig | None, embeds: dict
    ) -> dict[bool, Condition]:
        """Semantics or none -> condition without sizes."""
        if (prompt is None) == ("prompt_embeds" not in embeds):
            raise refuse("prompt", "both or none", "a prompt, or prompt_embeds=", "give one of them")
        if padding is not None and prompt is None:
            raise refuse("padding", "encoded prompts", "prompts as text", "call pad_text on the embeddings yourself")
        prompts = [prompt] if isinstance(prompt, str) else prompt
        if prompts is not None and isinstance(negative, str):
            negative = [negative] * len(prompts)
        both = any(not semantics for _, semantics in needed(guidance))
        found = self._encode(prompts, negative, both, embeds)
        if padding is not None:
            told = {True: prompts, False: negative or [""] * len(prompts)}
            found = {k: self._padded(c, told[k], padding) for k, c in found.items()}
        return found

    def _padded(self, cond: Condition, prompts: list[str], padding: PaddingConfig) -> Condition:
        assert cond.text is not None
        text, mask = pad_text(cond.text, self._lengths(cond, prompts), padding)
        masked = {"encoder_attention_mask": mask} if "encoder_attention_mask" in cond.extra else {}
        return replace(cond, text=text, extra=cond.extra | masked)

    def _lengths(self, cond: Condition, prompts: list[str]) -> torch.Tensor:
        length = self.tokenizer.model_max_length
        how = {"padding": "max_length", "max_length": length, "truncation": True, "return_tensors": "pt"}
        return self.tokenizer(prompts, **how).attention_mask.sum(1)

    def _plan(
        self, texts: dict[bool, Condition], told: list[Told], size: tuple[int, int], count: int, gamma: GammaConfig,
        guidance: GuidanceConfig, checkpoint: ControlCheckpoint | None, reference: Reference,
    ) -> _Plan:  # fmt: skip
        values = None
        if checkpoint is not None:
            spec = checkpoint.embedder.spec
            values = torch.cat([spec.rows(t.controls(size, spec)) for t in told])
            high_is_null = checkpoint.embedder.h is None
        else:
            high_is_null = all(t.high_is_null(size) for t in told)
        texts = {k: c.take(torch.zeros(count, dtype=torch.long)) if _length(c) == 1 else c for k, c in texts.items()}
        if any(_length(c) != count for c in texts.values()):
            raise refuse("prompts", [_length(c) for c in texts.values()], f"1 or {count}", "one for each picture")
        device, dtype = self._execution_device, self._net.dtype
        # Sizes stay float32: half precision would round them.
        sizes = {True: self._sizes(told, size), False: self._sizes([Told()] * count, size)}
        placed = {k: c.to(device, dtype) for k, c in texts.items()}
        conditions = {
            (c, s): replace(cond, extra=cond.extra | {k: v.to(device) for k, v in sizes[c].items()})
            for s, cond in placed.items() for c in (True, False)
        }  # fmt: skip
        return _Plan(gamma, guidance, conditions, high_is_null, count, checkpoint, values, reference, device)

    def _noise(self, plan: _Plan, size: tuple[int, int], seeds: Any, latents: torch.Tensor | None) -> Any:
        """Scaled noise, and the generators it came from, for schedulers that draw more."""
        if seeds is not None and latents is not None:
            raise refuse("seeds, latents", "both", "one of them", "latents are the noise itself")
        given = latents if latents is not None else (seeds := list(range(plan.count)) if seeds is None else seeds)
        if len(given) != plan.count:
            raise refuse("seeds", len(given), f"{plan.count}, one for each picture", "repeat or remove some")
        generators = None if latents is not None else [torch.Generator().manual_seed(s) for s in seeds]
        channels, device = self._net.config.in_channels, plan.device
        noise = self.prepare_latents(plan.count, channels, *size, self._net.dtype, device, generators, latents)
        return noise, generators

    # --- the loop -----------------------------------------------------------------------------------------------
    def _run(
        self, plan: _Plan, x: torch.Tensor, extra: dict[str, Any], progress: Progress
    ) -> tuple[torch.Tensor, list[ControlStep]]:
        timesteps, levels = self.scheduler.timesteps, self._levels()
        batches: dict[tuple[Key, ...], tuple[AbstractContextManager, Condition]] = {}
        call, log = call_of(self._net), []
        with self.progress_bar(total=len(timesteps)) as bar:
            for i, t in enumerate(timesteps):
                weight = float(plan.gamma.at(t))
                keys = needed(plan.guidance, weight, plan.high_is_null)
                if keys not in batches:
                    batches[keys] = self._batch(plan, keys)
                block, cond = batches[keys]
                rows = self.scheduler.scale_model_input(torch.cat([x] * len(keys)), t)
                with block:
                    out = call(rows, t.expand(len(rows)), cond)
                found = dict(zip(keys, out.chunk(len(keys)), strict=True))
                guided = guide(partial(_look_up, found), plan.guidance, weight, plan.high_is_null)
                x = self.scheduler.step(guided.prediction, t, x, **extra).prev_sample
                log.append(ControlStep(float(t), levels[i], weight, guided.evaluations))
                bar.update()
                progress(i + 1, len(timesteps), None)
        return x, log

    def _batch(self, plan: _Plan, keys: tuple[Key, ...]) -> tuple[AbstractContextManager, Condition]:
        """The block that weighs control, and the condition, for one set of evaluations."""
        cond = Condition.batch([plan.conditions[k] for k in keys])
        drop = torch.tensor([not control for control, _ in keys]).repeat_interleave(plan.count)
        if plan.checkpoint is None or plan.values is None:
            return ReferenceBlend(self._net, plan.gamma, plan.reference, self.vae_scale_factor, drop), cond
        embedder = plan.checkpoint.embedder.to(plan.device)
        return Injection(self._net, embedder, plan.values.repeat(len(keys), 1), plan.gamma, drop), cond

    def _levels(self) -> list[float]:
        """sigma of each step: the scheduler's own where it has them."""
        count, own = len(self.scheduler.timesteps), getattr(self.scheduler, "sigmas", None)
        if own is not None and len(own) == count + 1:
            return [float(s) for s in own[:count]]
        return NoiseSchedule.from_diffusers(self.scheduler).sigma(self.scheduler.timesteps.cpu()).tolist()

    def _pictures(self, latents: torch.Tensor, output_type: str) -> Any:
        config, vae = self.vae.config, self.vae
        mean, std = (getattr(config, n, None) for n in ("latents_mean", "latents_std"))
        if mean is not None and std is not None:
            mean, std = (torch.tensor(v).view(1, -1, 1, 1).to(latents) for v in (mean, std))
            latents = latents * std / config.scaling_factor + mean
        else:
            latents = latents / config.scaling_factor
        dtype = vae.dtype
        try:
            if dtype == torch.float16 and getattr(config, "force_upcast", False):
                vae.to(torch.float32)  # SDXL's overflows in half precision
            decoded = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
        finally:
            vae.to(dtype)
        return self.image_processor.postprocess(self._checked(decoded), output_type=output_type)

    # --- what differs -------------------------------------------------------------------------------------------
    def _encode(self, prompts: Any, negative: Any, both: bool, embeds: dict) -> dict[bool, Condition]:
        raise NotImplementedError

    def _sizes(self, told: list[Told], size: tuple[int, int]) -> dict[str, torch.Tensor]:
        return {}

    def _checked(self, images: torch.Tensor) -> torch.Tensor:
        return images


class ControlConditionedPipeline(_Controlled, StableDiffusionPipeline):
    """Stable Diffusion 1.x or 2.x with a control checkpoint. These models are told no sizes of their own.

    Example:
        >>> pipe = ControlConditionedPipeline.from_pipe(StableDiffusionPipeline.from_pretrained("path/to/base"))
        >>> own = pipe.load_control("control.safetensors")
        >>> out = pipe("a red car", checkpoint=own, told=Told(original=(512, 512)), guidance=GuidanceConfig(4.0, 1.375))
        >>> out.images, [step.gamma for step in out.log]
    """

    def _encode(self, prompts: Any, negative: Any, both: bool, embeds: dict) -> dict[bool, Condition]:
        made = self.encode_prompt(prompts, self._execution_device, 1, both, negative, **embeds)
        return {True: Condition(made[0])} | ({False: Condition(made[1])} if both else {})

    def _checked(self, images: torch.Tensor) -> torch.Tensor:
        return self.run_safety_checker(images, self._execution_device, images.dtype)[0]


class ControlConditionedXLPipeline(_Controlled, StableDiffusionXLPipeline):
    """SDXL with time-weighted sizes, training-free or with a control checkpoint.

    Without control a picture is told its own size, no crop. That is also what the unconditional half is told, where the
    stock pipeline repeats the positive's sizes unless ``negative_original_size`` and its siblings are given.

    Example:
        >>> pipe = ControlConditionedXLPipeline.from_pipe(StableDiffusionXLPipeline.from_pretrained("path/to/sdxl"))
        >>> images = pipe("a red car", told=Told(original=(512, 512)), gamma=GammaConfig(alpha=1.0)).images
    """

    def _encode(self, prompts: Any, negative: Any, both: bool, embeds: dict) -> dict[bool, Condition]:
        text, none, pooled, none_pooled = self.encode_prompt(
            prompts, device=self._execution_device, do_classifier_free_guidance=both, negative_prompt=negative, **embeds
        )
        return {True: Condition(text, pooled)} | ({False: Condition(none, none_pooled)} if both else {})

    def _sizes(self, told: list[Told], size: tuple[int, int]) -> dict[str, torch.Tensor]:
        if self.unet.config.addition_embed_type != "text_time":
            return {}
        return {"time_ids": torch.tensor([t.time_ids(size) for t in told], dtype=torch.float32)}


class ControlConditionedPixArtPipeline(_Controlled, PixArtAlphaPipeline):
    """PixArt, training-free where it is told sizes (the 1024 px models), or with a control checkpoint.

    Pictures are made at the size asked for: no resolution binning.
    """

    _backbone_name = "transformer"

    def _encode(self, prompts: Any, negative: Any, both: bool, embeds: dict) -> dict[bool, Condition]:
        text, mask, none, none_mask = self.encode_prompt(
            prompts, both, "" if negative is None else negative, 1, self._execution_device, **embeds
        )
        found = {True: (text, mask)} | ({False: (none, none_mask)} if both else {})
        return {k: Condition(t, None, {"encoder_attention_mask": m.to(t)}) for k, (t, m) in found.items()}

    def _lengths(self, cond: Condition, prompts: list[str]) -> torch.Tensor:
        return cond.extra["encoder_attention_mask"].sum(1).long()

    def _sizes(self, told: list[Told], size: tuple[int, int]) -> dict[str, torch.Tensor]:
        if not self.transformer.config.use_additional_conditions:
            return {}
        ratios = torch.tensor([[t.aspect(size)] for t in told], dtype=torch.float32)
        return {"resolution": torch.tensor([t.original or size for t in told]).float(), "aspect_ratio": ratios}


def _each(told: Told | Sequence[Told], count: int) -> list[Told]:
    listed = [told] * count if isinstance(told, Told) else list(told)
    if len(listed) != count:
        raise refuse("told", len(listed), f"1 or {count}", "one for each picture")
    return listed


def _length(cond: Condition) -> int:
    return 0 if cond.text is None else len(cond.text)


def _look_up(found: dict[Key, torch.Tensor], control: bool, semantics: bool) -> torch.Tensor:
    return found[control, semantics]
