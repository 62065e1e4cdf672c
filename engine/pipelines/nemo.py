"""NEMO as a diffusers pipeline: score prompts, find the neurons that memorize, sample with them blocked.

Not postponing annotations here: ``from_pipe`` reads the component types from ``__init__``.
"""

from collections.abc import Iterable
from typing import Any

import torch
from diffusers import StableDiffusionPipeline

from ..condition import Condition
from ..denoiser import Denoiser
from ..errors import refuse
from ..forward_clock import Timesteps
from ..nemo import (
    BlockConfig,
    NeuronSet,
    NeuronStatistics,
    ProbeConfig,
    Result,
    Score,
    SearchConfig,
    Verification,
    VerifyConfig,
    block,
    find_neurons,
    fingerprint_of,
    gather,
    make_probe,
    score_prompts,
    threshold,
    value_activations,
    value_sites,
    verify,
)
from ..nemo.block import RunningForward
from ..progress import Progress, silent
from .shared import SharedPipeline


class NEMOPipeline(SharedPipeline, StableDiffusionPipeline):
    """Stable Diffusion 1.x or 2.x with the NEMO tools (Hintersdorf et al., NeurIPS 2024).

    Example:
        >>> pipe = NEMOPipeline.from_pipe(StableDiffusionPipeline.from_pretrained("path/to/model"))
        >>> statistics = pipe.statistics(ordinary_captions)
        >>> (result,) = pipe.find(["a suspicious prompt"], statistics)
        >>> images = pipe("a suspicious prompt", neurons=pipe.neurons(result)).images
    """

    @torch.no_grad()
    def __call__(
        self, *args: Any, neurons: NeuronSet | list[NeuronSet] | None = None, block_config: BlockConfig | None = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Sample as StableDiffusionPipeline does, with neurons blocked meanwhile.

        Args:
            neurons: one set, or several that are merged; None or an empty set samples untouched.
            block_config: factor, branch, part of sampling; the default blocks fully, in both branches, all the time.

        Raises:
            VitrineError: If the neurons belong to another model, before any sampling.
        """
        sets = [neurons] if isinstance(neurons, NeuronSet) else list(neurons or [])
        if not any(map(len, sets)):
            return super().__call__(*args, **kwargs)
        config, running, timesteps = block_config or BlockConfig(), RunningForward(), Timesteps()

        def follow(unet: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            batch, t = len(args[0]), timesteps.first(args, kwargs)
            first = batch // 2 if self.do_classifier_free_guidance else 0  # the rows before it have the negative prompt
            assert t is not None
            running.update(config, t, torch.arange(batch) >= first)

        handle = self.unet.register_forward_pre_hook(follow, with_kwargs=True)
        try:
            with block(self.unet, sets[0].merged(*sets[1:]), config, running=running):
                return super().__call__(*args, **kwargs)
        finally:
            handle.remove()

    def conditions(self, prompts: Iterable[str]) -> list[Condition]:
        """One condition of one row for each prompt, encoded as the pipeline does.

        Raises:
            VitrineError: If there is no prompt.
        """
        prompts = list(prompts)
        if not prompts:
            raise refuse("prompts", prompts, "one prompt at least", "pass a list of texts")
        texts = []
        for start in range(0, len(prompts), 64):
            with torch.no_grad():
                texts.append(self.encode_prompt(prompts[start : start + 64], self._execution_device, 1, False)[0])
        return [Condition(row[None]) for row in torch.cat(texts)]

    def statistics(
        self, prompts: Iterable[str], scope: str = "down+mid", progress: Progress = silent
    ) -> NeuronStatistics:
        """Mean and deviation of every value neuron over ordinary captions (500 or more; the paper took 50,000)."""
        denoiser, sites = Denoiser.from_diffusers(self), value_sites(self.unet, scope)
        conds = self.conditions(prompts)
        encoded = (Condition.batch(conds[i : i + 64]) for i in range(0, len(conds), 64))
        batches = (value_activations(denoiser, batch, sites) for batch in encoded)
        return gather(batches, [s.address for s in sites], fingerprint_of(self.unet), len(conds), progress)

    def score(
        self, prompts: Iterable[str], tau: float, config: ProbeConfig | None = None, progress: Progress = silent
    ) -> list[Score]:
        """Cross-seed score of each prompt: how alike the one-step predictions from different noises are."""
        probe = make_probe(Denoiser.from_diffusers(self), config=config or ProbeConfig())
        return score_prompts(probe, self.conditions(prompts), self._shape(), tau, progress)[0]

    def calibrate(self, prompts: Iterable[str], config: ProbeConfig | None = None) -> float:
        """tau = mean + one deviation of the scores of ordinary captions, under the settings detection will use."""
        return threshold([s.value for s in self.score(prompts, 1.0, config)])[0]

    def find(
        self,
        prompts: Iterable[str],
        statistics: NeuronStatistics,
        config: SearchConfig | None = None,
        probe: ProbeConfig | None = None,
        scope: str = "down+mid",
        progress: Progress = silent,
    ) -> list[Result]:
        """Search the memorized prompts among ``prompts``, all in lockstep.

        Raises:
            VitrineError: If the statistics belong to another model.
        """
        statistics.check(self.unet)
        prompts, config = list(prompts), config or SearchConfig()
        prober = make_probe(Denoiser.from_diffusers(self), scope, probe or ProbeConfig(), config.rows)
        return find_neurons(prober, prompts, self.conditions(prompts), statistics, self._shape(), config, progress)

    def neurons(self, result: Result) -> NeuronSet:
        """A result as a set to block or to save, which only this model accepts."""
        return result.neurons(fingerprint_of(self.unet), {})

    def verify(
        self,
        prompt: str,
        neurons: NeuronSet,
        tau: float,
        picture: torch.Tensor | None = None,
        probe: ProbeConfig | None = None,
        seed: int = 101,
        progress: Progress = silent,
    ) -> Verification:
        """Score blocked neurons on other seeds and, with ``picture``, under an optimised embedding.

        Args:
            picture: (1, 3, H, W) in [0, 1], the memorized one, or an unblocked sample.
        """
        prober = make_probe(Denoiser.from_diffusers(self), "all", probe or ProbeConfig())
        (cond,), reference = self.conditions([prompt]), None
        if picture is not None:
            with torch.no_grad():
                mean = self.vae.encode(picture.to(self.vae.device, self.vae.dtype) * 2 - 1).latent_dist.mean
            reference = mean * self.vae.config.scaling_factor
        config = VerifyConfig(tau, seed)
        return verify(prober, cond, neurons, self._shape(), config, reference=reference, progress=progress)

    def _shape(self) -> tuple[int, int, int]:
        side = self.unet.config.sample_size
        height, width = (side, side) if isinstance(side, int) else side
        return self.unet.config.in_channels, height, width
