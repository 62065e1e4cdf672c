"""weights2weights as a diffusers pipeline: sample, edit, invert and blend models of a space, and sample with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput

from ..diffusion.noise import generators, seeds_of
from ..errors import expect, refuse
from ..w2w import (
    Lora,
    LoraLayer,
    Manifest,
    SampleConfig,
    Space,
    W2WModel,
    sample,
    usual_sampling,
)
from ..w2w.edit.editing import EditConfig, blend, edit, edit_step, edited_lora
from ..w2w.train.batched_lora import Clock, late_lora
from . import w2w_jobs
from .conventions import refuse_unknown
from .joined import TaskPipeline
from .sampling_clock import clock_of
from .w2w_jobs import expect_model, expect_space


@dataclass(frozen=True)
class CallRequest:
    """What a call asks for beyond what the stock pipeline takes.

    Attributes:
        space, model: B models for B pictures, one for each prompt, or one for all.
        edits, config: label -> strength, and from where they act.
        seeds: one per picture.
    """

    space: Space | None = None
    model: W2WModel | None = None
    edits: Mapping[str, float] | None = None
    config: EditConfig | None = None
    seeds: list[int] | None = None

    def __post_init__(self) -> None:
        if self.space is not None:
            expect_space(self.space)
        if self.model is not None:
            expect_model(self.model)
        if self.edits is not None:
            expect_strengths("edits", self.edits)


class W2WPipeline(TaskPipeline):
    """Any pipeline whose weights are a point of a space of models (weights2weights, Dravid et al., NeurIPS 2024).

    Example:
        >>> pipe = W2WPipeline.from_pipe(StableDiffusionPipeline.from_pretrained("path/to/base"))
        >>> space = load_space("people.w2w.safetensors")
        >>> person = pipe.sample_models(space, seeds=[0])
        >>> images = pipe("sks person", space=space, model=person, edits={"beard": 2.0}, num_inference_steps=50).images
    """

    invert_image = w2w_jobs.invert_image
    train_pair_slider = w2w_jobs.train_pair_slider

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *args: Any,
        space: Space | None = None,
        model: W2WModel | None = None,
        edits: Mapping[str, float] | None = None,
        edit_config: EditConfig | None = None,
        seeds: int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> ImagePipelineOutput:
        """Samples as the stock pipeline does, each picture with its own model.

        Args:
            space, model: B models for B pictures, one for each prompt, or one for all; without them the base model
                samples.
            edits: label -> strength; they act from timestep ``edit_config.start_timestep`` down.
            seeds: one per picture, instead of ``generator``.
            args, kwargs: as the stock pipeline takes them; a single prompt, with all that belongs to it, is repeated
                for the models or seeds.
        """
        refuse_unknown(type(self), kwargs)
        stock: Any = super().__call__

        def run(prompt: Any, **named: Any) -> Any:  # not every pipeline's first argument is the prompt
            return stock(prompt, *args, **named) if args else stock(prompt=prompt, **named)

        names = [name for name in kwargs if "prompt" in name and not name.startswith("num_")]
        texts = {"prompt": prompt} | {name: kwargs.pop(name) for name in names}  # they say the same of each picture
        wanted = CallRequest(space, model, edits, edit_config, None if seeds is None else seeds_of(seeds))
        pictures: ImagePipelineOutput = self._sampled(run, wanted, texts, kwargs, clock_of(self, self._network))
        return pictures

    def sample_models(self, space: Space, seeds: int | Sequence[int], config: SampleConfig | None = None) -> W2WModel:
        """New models, one per seed; without a config as the space's file says, as in the nodes and commands."""
        expect_space(space)
        seeds, config = seeds_of(seeds), config or usual_sampling(space)
        history = {"sample": {"seeds": seeds, **config.to_dict()}}
        return W2WModel(sample(space, seeds, config), space.identity, (history,))

    def edit_model(
        self, space: Space, model: W2WModel, strengths: Mapping[str, float], config: EditConfig | None = None
    ) -> W2WModel:
        """The models with sliders applied; ``strengths`` in standard deviations of training models."""
        expect_space(space)
        expect_model(model)
        expect_strengths("strengths", strengths)
        coefficients = edit(space, model.belongs(space).coefficients, strengths, config)
        return model.moved_to(coefficients, **edit_step(strengths, config))

    def blend_models(
        self, space: Space, models: Sequence[W2WModel], weights: Sequence[float] | None = None
    ) -> W2WModel:
        """One model between several; ``weights`` (default equal) are normalised to sum 1."""
        expect_space(space)
        for model in models:
            expect_model(model)
        coefficients = [row for m in models for row in m.belongs(space).coefficients]
        return W2WModel(blend(coefficients, weights)[None], space.identity, ({"blend": list(weights or [])},))

    def _sampled(
        self,
        run: Callable[..., Any],
        wanted: CallRequest,
        texts: dict[str, Any],
        kwargs: dict[str, Any],
        now: Clock,
    ) -> Any:
        """``run(**texts, **kwargs)``, each picture with its own model; ``now`` as in :func:`late_lora`."""
        space, model = wanted.space, wanted.model
        scaled = [name for name in _ADAPTERS if (kwargs.get(name) or {}).get("scale") is not None]
        if model is not None and scaled:
            remedy = "its strength is its coefficients': blend_models, edit_model, or scale them"
            raise refuse(scaled[0], "a scale together with a model", "none", remedy)
        if (model is None) != (space is None) or (model is None and (wanted.edits or wanted.config)):
            parts = {"space": space, "model": model, "edits": wanted.edits, "edit_config": wanted.config}
            shown = ", ".join(name for name, value in parts.items() if value is not None) + " alone"
            raise refuse("arguments", shown, "space and model together", "without both, the base model would sample")
        each = kwargs.get("num_images_per_prompt") or kwargs.get("num_videos_per_prompt") or 1
        prompts = _rows(texts, each, len(model) if model else 1, len(wanted.seeds) if wanted.seeds else 1)
        pictures = prompts * each
        if wanted.seeds is not None:
            if len(wanted.seeds) != pictures:
                raise refuse("seeds", len(wanted.seeds), f"{pictures} pictures", "give one seed for each picture")
            kwargs["generator"] = generators(wanted.seeds)
        if model is None or space is None:
            with self._in_use():
                return run(**texts, **kwargs)
        if len(model) not in (1, prompts, pictures):
            raise refuse("models", len(model), f"1 or {pictures}", "give one model, or one for each picture")
        config = wanted.config or EditConfig()
        before, after, manifest = self._weights(space, model.belongs(space), wanted.edits or {}, config)
        # The pictures of one prompt follow each other, so a model for each prompt is a model for each run of them.
        repeats = 1 if len(model) == 1 else pictures // len(model)
        before, after = (w.repeat_interleave(repeats, 0).to(self._adapter.device) for w in (before, after))
        with self._in_use(), late_lora(self._network, manifest, before, after, config.start_timestep, now):
            return run(**texts, **kwargs)

    def _weights(
        self, space: Space, model: W2WModel, edits: Mapping[str, float], config: EditConfig
    ) -> tuple[torch.Tensor, torch.Tensor, Manifest]:
        """Flat weights (B, D) of the models before and after the edit, and their manifest."""
        plain = [edited_lora(space, row, {}) for row in model.coefficients]
        moved = [edited_lora(space, row, edits, config) for row in model.coefficients]
        ranks = {path: max(x[path].rank for x in plain + moved) for path in plain[0]}
        padded = [[_padded(x, ranks) for x in loras] for loras in (plain, moved)]
        manifest = Manifest.of(padded[0][0])
        before, after = (torch.stack([manifest.flatten(x) for x in loras]) for loras in padded)
        return before, after, manifest


def expect_strengths(name: str, strengths: Any) -> None:
    """Refuse anything but labels with strengths, before it is asked for its labels."""
    expect(strengths, Mapping, name, "label -> strength, such as {'beard': 2.0}")


_ADAPTERS = ("cross_attention_kwargs", "joint_attention_kwargs", "attention_kwargs")
"""Names under which stock pipelines take the strength of an adapter."""


def _rows(texts: dict[str, Any], each: int, models: int, seeds: int) -> int:
    """How many prompts a call has; a single one is repeated in ``texts`` for its models or seeds."""
    rows = texts["prompt"] if texts.get("prompt_embeds") is None else texts["prompt_embeds"]
    prompts = 1 if rows is None or isinstance(rows, str) else len(rows)
    for name, value in texts.items():
        if isinstance(value, str):
            texts[name] = [value] * prompts
    wanted = max(prompts * each, models, seeds)
    if wanted % each:
        raise refuse("models or seeds", wanted, f"a multiple of {each} pictures a prompt", "leave some out")
    if prompts > 1:
        return prompts
    for name, value in texts.items():
        if isinstance(value, list):
            texts[name] = value * (wanted // each)
        elif isinstance(value, torch.Tensor):
            texts[name] = value.repeat_interleave(wanted // each, 0)
    return wanted // each


def _padded(lora: Lora, ranks: Mapping[str, int]) -> dict[str, LoraLayer]:
    """Layers padded with zeros to common ranks, so that models of a delta space share one manifest."""
    out = {}
    for path, layer in lora.items():
        missing = ranks[path] - layer.rank
        if not missing:
            out[path] = layer
            continue
        down = torch.cat([layer.down, layer.down.new_zeros(missing, *layer.down.shape[1:])])
        up = torch.cat([layer.up * layer.scale, layer.up.new_zeros(layer.up.shape[0], missing)], 1)
        out[path] = LoraLayer(down, up, float(ranks[path]))
    return out
