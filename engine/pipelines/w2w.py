"""weights2weights as a diffusers pipeline: sample, edit, invert and blend models of a space, and draw with them.

Annotations are not postponed here: ``from_pipe`` reads the component types from ``__init__``.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionPipeline

from ..activations.images import encode_pixels, to_pixels
from ..condition import Condition
from ..denoiser import Denoiser
from ..errors import refuse
from ..noise import generators
from ..progress import Progress, silent
from ..w2w import (
    BaseWeights,
    EditConfig,
    Encoded,
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
    encode,
    in_deviations,
    invert,
    invert_in,
    latent_mask,
    member,
    read_lora,
    sample,
    usual_sampling,
)
from ..w2w.batched_lora import late_lora
from .conventions import refuse_unknown, soft_masks
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
        """New models, one per seed; without a config as the space's file says, as at the other doors."""
        config = config or usual_sampling(space)
        history = {"sample": {"seeds": list(seeds), **config.to_dict()}}
        return W2WModel(sample(space, seeds, config), space.identity, (history,))

    def edit_model(
        self, space: Space, model: W2WModel, strengths: Mapping[str, float], config: EditConfig | None = None
    ) -> W2WModel:
        """The models with sliders applied; ``strengths`` in standard deviations of the training models.

        Raises:
            VitrineError: As :func:`~vitrine.engine.w2w.edit`, and if the model is of another space.
        """
        coefficients = edit(space, model.belongs(space).coefficients, strengths, config)
        return model.moved_to(coefficients, edit=in_deviations(space, strengths, config))

    def blend_models(
        self, space: Space, models: Sequence[W2WModel], weights: Sequence[float] | None = None
    ) -> W2WModel:
        """One model between several; ``weights`` (default equal) are normalised to sum 1."""
        coefficients = [row for m in models for row in m.belongs(space).coefficients]
        return W2WModel(blend(coefficients, weights)[None], space.identity, ({"blend": list(weights or [])},))

    def encode_model(self, space: Space, source: str | Path | Lora) -> Encoded:
        """Somebody's LoRA (factors, or the path of its file), or a training model by name, as a model of the space.

        Raises:
            VitrineError: As :func:`~vitrine.engine.w2w.encode`, :func:`~vitrine.engine.w2w.member` and
                :func:`~vitrine.engine.w2w.read_lora`.
        """
        if isinstance(source, Mapping):
            return encode(space, source)
        if str(source).endswith(".safetensors"):
            lora = read_lora(source, base=BaseWeights.of_module(self.unet))
            return encode(space, lora, Path(source).stem)
        return member(space, str(source))

    def invert_image(
        self, space: Space, image: Any, prompt: str, config: InvertConfig | None = None, mask: Any = None,
        progress: Progress = silent, folder: str | Path | None = None,
    ) -> tuple[W2WModel, Inversion]:  # fmt: skip
        """A model for each picture.

        Args:
            image: one or more pictures, of one size: PIL, arrays (H, W, 3), tensors (B, 3, H, W) in [0, 1].
            prompt: the one the space was trained with, or what the pictures show beside the subject.
            mask: (B, H, W) in [0, 1], 1 where the subject is, or PIL pictures or arrays of 0..255.
            folder: keeps the run's state, from which the same call goes on after ``kill -9``, bit for bit.

        Raises:
            VitrineError: If ``image`` holds no pictures, or ``mask`` not one for each, and as
                :func:`~vitrine.engine.w2w.invert`.
            BaseException: Whatever ``progress`` raises; :func:`~vitrine.engine.w2w.partial_inversion` gives the best
                result so far.
        """
        pixels = to_pixels(image, None, self.vae_scale_factor)
        masks = None if mask is None else soft_masks(mask, (len(pixels), *pixels.shape[-2:]))
        with self._in_use():
            with torch.no_grad():
                latents = encode_pixels(self.vae, pixels)
                text = self.encode_prompt([prompt], self._execution_device, 1, False)[0]
            latent_size = None if masks is None else latent_mask(masks, *latents.shape[-2:])
            with _frozen(self.unet):
                denoiser = Denoiser.from_diffusers(self)
                run = invert if folder is None else partial(invert_in, folder)
                result = run(denoiser, space, latents, Condition(text), config, latent_size, progress)
        return W2WModel(result.coefficients, space.identity, ({"invert": {"steps": result.steps}},)), result

    @torch.no_grad()
    def __call__(  # type: ignore[override]
        self, prompt: str | list[str] | None = None, *args: Any, space: Space | None = None,
        model: W2WModel | None = None, edits: Mapping[str, float] | None = None, edit_config: EditConfig | None = None,
        seeds: Sequence[int] | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Samples as StableDiffusionPipeline does, each picture with its own model.

        Args:
            space, model: B models for B pictures, one for each prompt, or one for all; without them the base model
                draws.
            edits: label -> strength; they act from timestep ``edit_config.start`` down.
            seeds: one per picture, instead of ``generator``.
            args, kwargs: as StableDiffusionPipeline takes them; a single prompt, with its negative one, or encoded, is
                repeated for the models or seeds.

        Raises:
            VitrineError: If the model is of another space, or comes without one, or there is nothing to edit, or counts
                do not match.
        """
        refuse_unknown(type(self), kwargs)
        if model is not None and (kwargs.get("cross_attention_kwargs") or {}).get("scale") is not None:
            remedy = "its strength is its coefficients': blend_models, edit_model, or scale them"
            raise refuse("cross_attention_kwargs", "a scale beside a model", "none", remedy)
        if (model is None) != (space is None) or (model is None and (edits or edit_config)):
            named = {"space": space, "model": model, "edits": edits, "edit_config": edit_config}
            shown = ", ".join(name for name, value in named.items() if value is not None) + " alone"
            raise refuse("arguments", shown, "space and model together", "without both, the base model would draw")
        each = kwargs.get("num_images_per_prompt") or 1
        texts = {"prompt": prompt, **{name: kwargs.pop(name) for name in _TEXTS if name in kwargs}}
        prompts = _rows(texts, each, len(model) if model else 1, len(seeds) if seeds else 1)
        pictures = prompts * each
        if seeds is not None:
            if len(seeds) != pictures:
                raise refuse("seeds", len(seeds), f"{pictures} pictures", "give one seed for each picture")
            kwargs["generator"] = generators(seeds)
        if model is None or space is None:
            with self._in_use():
                return super().__call__(texts.pop("prompt"), *args, **texts, **kwargs)
        if len(model) not in (1, prompts, pictures):
            raise refuse("models", len(model), f"1 or {pictures}", "give one model, or one for each picture")
        config = edit_config or EditConfig()
        before, after, manifest = self._weights(space, model.belongs(space), edits or {}, config)
        # The pictures of one prompt follow each other, so a model for each prompt is a model for each run of them.
        repeats = pictures // len(model)
        before, after = (w.repeat_interleave(repeats, 0).to(self._execution_device) for w in (before, after))
        with self._in_use(), late_lora(self.unet, manifest, before, after, config.start):
            return super().__call__(texts.pop("prompt"), *args, **texts, **kwargs)

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


_TEXTS = ("negative_prompt", "prompt_embeds", "negative_prompt_embeds")


def _rows(texts: dict[str, Any], each: int, models: int, seeds: int) -> int:
    """How many prompts a call has; a single one is repeated in ``texts`` for its models or seeds.

    Raises:
        VitrineError: If these are not a multiple of the pictures for each prompt.
    """
    encoded = texts.get("prompt_embeds")
    prompts = len(encoded) if encoded is not None else 1 if isinstance(texts["prompt"], str) else len(texts["prompt"])
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
