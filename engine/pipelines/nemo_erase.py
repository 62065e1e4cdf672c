"""What erasing needs, sampled by the pipeline itself: surrogates of the memorized pictures, and ordinary pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..activations.picture_latents import to_pixels
from ..diffusion.noise import generators
from ..errors import refuse
from ..jobs.digests import digest
from ..nemo import EraseConfig, Erased, EraseData, NeuronSet, erase, picture_distance
from ..nemo.blocked_copies import THIRD
from ..runtime.progress import Progress, silent
from ..settings.config import Config
from .components import components_of
from .nemo_prompts import text_of
from .nemo_tools import NEMOTools


@dataclass(frozen=True)
class SurrogateConfig(Config):
    """How the pictures that training needs are sampled.

    Attributes:
        count: surrogates of each prompt, with other seeds.
        seed: of the first; ordinary pictures count from it too.
        steps, guidance: of sampling.
    """

    count: int = 3
    seed: int = 500
    steps: int = 30
    guidance: float = 7.5

    def __post_init__(self) -> None:
        if min(self.count, self.steps) < 1:
            raise refuse("count, steps", (self.count, self.steps), "1 or more", "use 3 and 30")


class ErasingPart(NEMOTools):
    """The part of :class:`~vitrine.engine.pipelines.NEMOPipeline` that trains pictures out of the weights."""

    def erase(
        self, prompts: Sequence[str], pictures: Sequence[Any], ordinary: Sequence[str],
        neurons: NeuronSet | Sequence[NeuronSet], config: EraseConfig | None = None,
        sources: SurrogateConfig | None = None, folder: str | Path | None = None, progress: Progress = silent,
    ) -> Erased:  # fmt: skip
        """Train the pictures out of a copy of the UNet; this pipeline stays as it is.

        Load the result with ``unet.load_state_dict(erased.weights)``, or a LoRA, saved, with ``load_lora_weights``.

        Args:
            prompts, pictures: of the memorized; as many of both. A picture is PIL, an array (H, W, 3), or a tensor
                (1, 3, H, W) in [0, 1].
            ordinary: captions that must stay as they are, 100 or more.
            neurons: blocked while the surrogates are sampled: one set for all, or one for each prompt.
            sources: how surrogates and ordinary pictures are sampled.
            folder: for the state of the training; the same call resumes from it, also after the process was killed.
        """
        if (pipe := self._adapter.pipe) is not self:
            accepted = "StableDiffusionPipeline, of SD 1.x or 2.x, whose network reads the text alone"
            raise refuse("pipeline to erase from", type(pipe).__name__, accepted, "block the neurons instead")
        data = erase_data(self, list(prompts), list(pictures), list(ordinary), neurons, sources or SurrogateConfig())
        own = [digest(to_pixels(p, None, self._adapter.factor)) for p in pictures]
        made_of = {**components_of(self, ("unet",)), "prompts": list(prompts), "pictures": own}
        made_of |= {"ordinary captions": list(ordinary), "neurons": neurons, "sampling": sources or SurrogateConfig()}
        with self._in_use():
            return erase(
                self._denoiser(), data, config or EraseConfig(), folder=folder, identity=made_of,
                progress=progress,
            )  # fmt: skip


def erase_data(
    pipe: NEMOTools, prompts: list[str], pictures: list[Any], ordinary: list[str],
    neurons: NeuronSet | Sequence[NeuronSet], config: SurrogateConfig,
) -> EraseData:  # fmt: skip
    """Samples and encodes what :func:`vitrine.engine.nemo.erase` trains on."""
    sets = [neurons] * len(prompts) if isinstance(neurons, NeuronSet) else list(neurons)
    counts = {"prompts": len(prompts), "pictures": len(pictures), "neuron sets": len(sets)}
    if not prompts or len(set(counts.values())) > 1:
        raise refuse("erasing", counts, "one picture and one set for each prompt", "or one set for all")
    if not ordinary:
        raise refuse("ordinary", 0, "ordinary captions, 100 or more", "they say what must stay as it is")
    condition = pipe.conditions(prompts[:1])[0]
    if condition.pooled is not None or condition.extra:
        shown = f"{type(pipe._network).__name__}, conditioned on more than the text"
        raise refuse("network", shown, "one that reads the text alone, as SD 1.x's and 2.x's", "erase() is for these")
    wanted = [to_pixels(p, None, pipe._adapter.factor) for p in pictures]
    height, width = wanted[0].shape[-2:]
    size: dict[str, Any] = {
        "height": height,
        "width": width,
        "num_inference_steps": config.steps,
        "guidance_scale": config.guidance,
    }

    def sample(prompt: str, number: int, blocked: NeuronSet | None = None) -> torch.Tensor:
        (g,) = generators([config.seed + number])
        latents: torch.Tensor = pipe(prompt, generator=g, neurons=blocked, output_type="latent", **size).images
        return latents

    usual = torch.cat([sample(p, i) for i, p in enumerate(ordinary)])
    tries = [[sample(p, i, n) for i in range(config.count)] for p, n in zip(prompts, sets, strict=True)]
    surrogates = torch.stack([torch.cat(own) for own in tries])
    _refuse_copies(pipe, prompts, wanted, surrogates, usual)
    with torch.no_grad():
        text, other = (torch.cat([text_of(c) for c in pipe.conditions(list(p))]) for p in (prompts, ordinary))
    return EraseData(text, torch.cat([pipe.latents(p) for p in pictures]), surrogates, other, usual)


@torch.no_grad()
def _refuse_copies(
    pipe: NEMOTools, prompts: list[str], wanted: list[torch.Tensor], surrogates: torch.Tensor, usual: torch.Tensor
) -> None:
    def pixels(latents: torch.Tensor) -> torch.Tensor:
        return (torch.cat([pipe._adapter.decode(x) for x in latents.split(8)]).float().cpu() / 2 + 0.5).clamp(0, 1)

    ordinary = pixels(usual[:32])
    for prompt, picture, own in zip(prompts, wanted, surrogates, strict=True):
        reference = (picture + 1) / 2
        level = THIRD * float(picture_distance(ordinary, reference).median())
        nearest = float(picture_distance(pixels(own), reference).min())
        if nearest < level:
            shown, accepted = f"{nearest:.3f} from the picture of {prompt!r}", f"a distance of {level:.3f} or more"
            raise refuse("surrogate", shown, accepted, "block more neurons: search with a higher share or wider scope")
