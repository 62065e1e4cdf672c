"""weights2weights as a diffusers pipeline: sample, edit, invert and blend models of a space, and draw with them.

Annotations are not postponed here: ``from_pipe`` reads the component types from ``__init__``.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import StableDiffusionPipeline

from ..condition import Condition
from ..denoiser import Denoiser
from ..errors import refuse
from ..noise import generators
from ..progress import Progress, silent
from ..w2w import (
    EditConfig,
    Inversion,
    InvertConfig,
    Lora,
    LoraLayer,
    Manifest,
    SampleConfig,
    Space,
    W2WModel,
    blend,
    edit,
    edited_lora,
    invert,
    latent_mask,
    sample,
)
from ..w2w.batched_lora import late_lora
from .shared import SharedPipeline


class W2WPipeline(SharedPipeline, StableDiffusionPipeline):
    """Stable Diffusion whose weights are a point of a space of models (weights2weights, Dravid et al., NeurIPS 2024).

    Example:
        >>> pipe = W2WPipeline.from_pipe(StableDiffusionPipeline.from_pretrained("path/to/base"))
        >>> space = load_space("people.w2w.safetensors")
        >>> person = pipe.sample_models(space, seeds=[0])
        >>> images = pipe("sks person", space=space, model=person, edits={"beard": 2.0}, num_inference_steps=50).images
    """

    def sample_models(self, space: Space, seeds: Sequence[int], config: SampleConfig | None = None) -> W2WModel:
        """New models, one per seed."""
        history = {"sample": {"seeds": list(seeds), "factor": (config or SampleConfig()).factor}}
        return W2WModel(sample(space, seeds, config), space.identity, (history,))

    def edit_model(
        self, space: Space, model: W2WModel, strengths: Mapping[str, float], config: EditConfig | None = None
    ) -> W2WModel:
        """The models with sliders applied; ``strengths`` in standard deviations of the training models.

        Raises:
            VitrineError: As :func:`~vitrine.engine.w2w.edit`, and if the model is of another space.
        """
        coefficients = edit(space, model.belongs(space).coefficients, strengths, config)
        return model.moved_to(coefficients, edit=dict(strengths))

    def blend_models(
        self, space: Space, models: Sequence[W2WModel], weights: Sequence[float] | None = None
    ) -> W2WModel:
        """One model between several; ``weights`` (default equal) are normalised to sum 1."""
        coefficients = [row for m in models for row in m.belongs(space).coefficients]
        return W2WModel(blend(coefficients, weights)[None], space.identity, ({"blend": list(weights or [])},))

    def invert_image(
        self, space: Space, image: torch.Tensor, prompt: str, config: InvertConfig | None = None,
        mask: torch.Tensor | None = None, progress: Progress = silent,
    ) -> tuple[W2WModel, Inversion]:  # fmt: skip
        """A model for each picture.

        Args:
            image: (B, 3, H, W) in [0, 1].
            prompt: the one the space was trained with, or what the pictures show beside the subject.
            mask: (B, H, W) in [0, 1], 1 where the subject is.

        Raises:
            VitrineError: If ``image`` is not a batch of pictures, and as :func:`~vitrine.engine.w2w.invert`.
            BaseException: Whatever ``progress`` raises; :func:`~vitrine.engine.w2w.partial_inversion` gives the best
                result so far.
        """
        if image.ndim != 4 or image.shape[1] != 3:
            raise refuse("image", tuple(image.shape), "(B, 3, H, W) in [0, 1]", "add the batch dimension")
        with self._in_use():
            with torch.no_grad():
                pixels = image.to(self._execution_device, self.vae.dtype) * 2 - 1
                latents = self.vae.encode(pixels).latent_dist.mean * self.vae.config.scaling_factor
                text = self.encode_prompt([prompt], self._execution_device, 1, False)[0]
            latent_size = None if mask is None else latent_mask(mask, *latents.shape[-2:])
            with _frozen(self.unet):
                denoiser = Denoiser.from_diffusers(self)
                result = invert(denoiser, space, latents.float(), Condition(text), config, latent_size, progress)
        return W2WModel(result.coefficients, space.identity, ({"invert": {"steps": result.steps}},)), result

    @torch.no_grad()
    def __call__(  # type: ignore[override]
        self, prompt: str | list[str], *args: Any, space: Space | None = None, model: W2WModel | None = None,
        edits: Mapping[str, float] | None = None, edit_config: EditConfig | None = None,
        seeds: Sequence[int] | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Samples as StableDiffusionPipeline does, each picture with its own model.

        Args:
            space, model: B models for B pictures, one for each prompt, or one for all; without them the base model
                draws.
            edits: label -> strength; they act from timestep ``edit_config.start`` down.
            seeds: one per picture, instead of ``generator``.

        Raises:
            VitrineError: If the model is of another space, or comes without one, or there is nothing to edit, or counts
                do not match.
        """
        if (model is None) != (space is None) or (model is None and (edits or edit_config)):
            named = {"space": space, "model": model, "edits": edits, "edit_config": edit_config}
            shown = ", ".join(name for name, value in named.items() if value is not None) + " alone"
            raise refuse("arguments", shown, "space and model together", "without both, the base model would draw")
        each = kwargs.get("num_images_per_prompt") or 1
        prompts = _prompts(prompt, each, len(model) if model else 1, len(seeds) if seeds else 1)
        pictures = len(prompts) * each
        if seeds is not None:
            if len(seeds) != pictures:
                raise refuse("seeds", len(seeds), f"{pictures} pictures", "give one seed for each picture")
            kwargs["generator"] = generators(seeds)
        if model is None or space is None:
            with self._in_use():
                return super().__call__(prompts, *args, **kwargs)
        if len(model) not in (1, len(prompts), pictures):
            raise refuse("models", len(model), f"1 or {pictures}", "give one model, or one for each picture")
        config = edit_config or EditConfig()
        before, after, manifest = self._weights(space, model.belongs(space), edits or {}, config)
        # The pictures of one prompt follow each other, so a model for each prompt is a model for each run of them.
        repeats = pictures // len(model)
        before, after = (w.repeat_interleave(repeats, 0).to(self._execution_device) for w in (before, after))
        with self._in_use(), late_lora(self.unet, manifest, before, after, config.start):
            return super().__call__(prompts, *args, **kwargs)

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


def _prompts(prompt: str | list[str], each: int, models: int, seeds: int) -> list[str]:
    """The prompts of a call; a single one is repeated for as many pictures as there are models or seeds.

    Raises:
        VitrineError: If that number is not a multiple of the pictures for each prompt.
    """
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    wanted = max(len(prompts) * each, models, seeds)
    if wanted % each:
        raise refuse("models or seeds", wanted, f"a multiple of {each} pictures a prompt", "leave some out")
    return prompts * (wanted // each) if len(prompts) == 1 else prompts


@contextmanager
def _frozen(module: torch.nn.Module) -> Iterator[None]:
    """Nothing in the module takes gradients while the block is open."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    try:
        for p in trainable:
            p.requires_grad_(False)
        yield
    finally:
        for p in trainable:
            p.requires_grad_(True)


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
