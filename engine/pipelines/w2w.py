"""weights2weights as a diffusers pipeline: sample, edit, invert and blend models of a space, and draw with them.

Not postponing annotations here: ``from_pipe`` reads the component types from ``__init__``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import StableDiffusionPipeline

from ..condition import Condition
from ..denoiser import Denoiser
from ..errors import refuse
from ..progress import Progress, silent
from ..w2w import (
    EditConfig,
    Inversion,
    InvertConfig,
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


class W2WPipeline(StableDiffusionPipeline):
    """Stable Diffusion whose weights are a point of a space of models (weights2weights, Dravid et al., NeurIPS 2024).

    Example:
        >>> pipe = W2WPipeline.from_pipe(StableDiffusionPipeline.from_pretrained("path/to/base"))
        >>> space = load_space("people.w2w.safetensors")
        >>> person = pipe.sample_models(space, seeds=[0])
        >>> images = pipe("sks person", space=space, model=person, edits={"beard": 2.0}, num_inference_steps=50).images
    """

    def sample_models(self, space: Space, seeds: Sequence[int], config: SampleConfig | None = None) -> W2WModel:
        """New models, one for each seed."""
        told = {"sample": {"seeds": list(seeds), "factor": (config or SampleConfig()).factor}}
        return W2WModel(sample(space, seeds, config), space.identity, (told,))

    def edit_model(
        self, space: Space, model: W2WModel, strengths: Mapping[str, float], config: EditConfig | None = None
    ) -> W2WModel:
        """The models with sliders applied, strengths in standard deviations."""
        moved = edit(space, model.belongs(space).coefficients, strengths, config)
        return model.told(moved, edit=dict(strengths))

    def blend_models(
        self, space: Space, models: Sequence[W2WModel], weights: Sequence[float] | None = None
    ) -> W2WModel:
        """One model between several."""
        rows = [row for m in models for row in m.belongs(space).coefficients]
        return W2WModel(blend(rows, weights)[None], space.identity, ({"blend": list(weights or [])},))

    def invert_image(
        self, space: Space, image: torch.Tensor, prompt: str, config: InvertConfig | None = None,
        mask: torch.Tensor | None = None, progress: Progress = silent,
    ) -> tuple[W2WModel, Inversion]:  # fmt: skip
        """Models for pictures.

        Args:
            image: (B, 3, H, W) in [0, 1], one model for each.
            prompt: the one the space was trained with, or what the picture shows beside the subject.
            mask: (B, H, W) in [0, 1], white where the subject is.

        Raises:
            VitrineError: see :func:`~vitrine.engine.w2w.invert`.
        """
        if image.ndim != 4 or image.shape[1] != 3:
            raise refuse("image", tuple(image.shape), "(B, 3, H, W) in [0, 1]", "add the batch dimension")
        with torch.no_grad():
            pixels = image.to(self.vae.device, self.vae.dtype) * 2 - 1
            latents = self.vae.encode(pixels).latent_dist.mean * self.vae.config.scaling_factor
            text = self.encode_prompt([prompt], self._execution_device, 1, False)[0]
        small = None if mask is None else latent_mask(mask, *latents.shape[-2:])
        kept = [p for p in self.unet.parameters() if p.requires_grad]
        try:
            for p in kept:
                p.requires_grad_(False)
            denoiser = Denoiser.from_diffusers(self)
            found = invert(denoiser, space, latents.float(), Condition(text), config, small, progress=progress)
        finally:
            for p in kept:
                p.requires_grad_(True)
        return W2WModel(found.coefficients, space.identity, ({"invert": {"steps": found.steps}},)), found

    @torch.no_grad()
    def __call__(  # type: ignore[override]
        self, prompt: str | list[str], *args: Any, space: Space | None = None, model: W2WModel | None = None,
        edits: Mapping[str, float] | None = None, edit_config: EditConfig | None = None,
        seeds: Sequence[int] | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Sample as StableDiffusionPipeline does, each picture with its own model.

        Args:
            space, model: B models for B pictures, or one for all; without them the base model draws.
            edits: label -> strength; in force from timestep ``edit_config.start`` on.
            seeds: one for each picture, instead of ``generator``.

        Raises:
            VitrineError: a model of another space, or counts that do not match.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        count = max(len(prompts), len(model) if model else 1, len(seeds) if seeds else 1)
        prompts = prompts * count if len(prompts) == 1 else prompts
        if seeds is not None:
            if len(seeds) != count:
                raise refuse("seeds", len(seeds), f"{count} pictures", "give one seed for each picture")
            kwargs["generator"] = [torch.Generator().manual_seed(int(s)) for s in seeds]
        if model is None or space is None:
            return super().__call__(prompts, *args, **kwargs)
        if len(prompts) != count or len(model) not in (1, count):
            raise refuse("models", len(model), f"1 or {count}", "give one model, or one for each picture")
        config = edit_config or EditConfig()
        before, after, manifest = self._weights(space, model.belongs(space), edits or {}, config)
        before, after = (w.expand(count, -1).to(self.unet.device) for w in (before, after))
        with late_lora(self.unet, manifest, before, after, config.start):
            return super().__call__(prompts, *args, **kwargs)

    def _weights(
        self, space: Space, model: W2WModel, edits: Mapping[str, float], config: EditConfig
    ) -> tuple[torch.Tensor, torch.Tensor, Manifest]:
        """Flat weights of the models before and after the edit, (B, D) each, and their manifest."""
        plain = [edited_lora(space, row, {}) for row in model.coefficients]
        moved = [edited_lora(space, row, edits, config) for row in model.coefficients]
        ranks = {path: max(x[path].rank for x in plain + moved) for path in plain[0]}
        filled = [[_padded(x, ranks) for x in rows] for rows in (plain, moved)]
        manifest = Manifest.of(filled[0][0])
        before, after = (torch.stack([manifest.flatten(x) for x in rows]) for rows in filled)
        return before, after, manifest


def _padded(lora: Mapping[str, Any], ranks: Mapping[str, int]) -> dict[str, Any]:
    """Layers brought to common ranks with zero rows, so that models of a delta space share one manifest."""
    from ..w2w import LoraLayer

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
