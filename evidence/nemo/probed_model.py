"""The portraits model, where what is memorized is known: the claims and the demo page measure NEMO on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ...engine.diffusion.denoiser import Denoiser
from ...engine.nemo.block import block
from ...engine.nemo.calibration import KEPT_CAPTIONS, threshold
from ...engine.nemo.few_step_detection import FewStepSampler, sample_agreement, sample_threshold
from ...engine.nemo.find import Result, find_neurons, make_probe, score_prompts
from ...engine.nemo.neuron_statistics import NeuronStatistics, gather
from ...engine.nemo.neurons import NeuronSet, fingerprint_of
from ...engine.nemo.noise_similarity import Probe, probe_noise
from ...engine.nemo.sites import text_only, value_activations
from ...engine.network.condition import Condition
from ...engine.portraits.dataset import PORTRAITS, Dataset
from ...engine.runtime.progress import Progress, silent
from ...engine.settings.nemo_options import FEW_STEPS, FewStepConfig, ProbeConfig, SearchConfig
from ...engine.tracing.fingerprint import width_of
from ..portraits.avataaars import open_model

if TYPE_CHECKING:
    from ...engine.portraits import Portraits
    from ...engine.portraits.flow import FlowPortraits

PAPER = "Finding NeMo (Hintersdorf et al., NeurIPS 2024)"
SHAPE, STEPS, GUIDANCE = (4, 16, 16), 30, 3.0
DETECT, SEARCH = ProbeConfig(timestep_index=15), ProbeConfig(timestep_index=4)
"""On 16 x 16 latents the published index 1 separates less: nothing of the picture is decided there yet."""
EFFECT_FRACTION = 0.98
"""The search stops at this fraction of what blocking every neuron does to the prediction."""
ROWS = 40
"""On two CPU cores 40 rows a forward take 3.05 ms each, 160 take 3.5, and 10 take 5."""
STATISTICS, CALIBRATION, ORDINARY = 8_100_000, 8_200_000, 8_300_000
"""First seeds of the captions for statistics, for the threshold, and for measurements."""


@dataclass(frozen=True)
class SampleBudget:
    """How much is measured.

    Attributes:
        statistics, calibration: captions for the statistics and for the threshold.
        plants: memorized pictures, of the eight repeated verbatim.
        seeds: samples of each caption.
        ordinary, renders: ordinary captions, and renders that their samples are compared with.
        colourings: captions of each memorized template.
        steps: of the sampler.
        noises: of the search's probe; None takes as many as the search was chosen with.
    """

    statistics: int = 1000
    calibration: int = 100
    plants: int = 8
    seeds: int = 10
    ordinary: int = 200
    renders: int = 1000
    colourings: int = 10
    steps: int = STEPS
    noises: int | None = None


FULL = SampleBudget()
QUICK = SampleBudget(
    statistics=100, calibration=20, plants=2, seeds=3, ordinary=20, renders=100, colourings=4, steps=10, noises=4
)


def budget_of(quick: bool) -> SampleBudget:
    """Full, or what fits into half a minute or so."""
    return QUICK if quick else FULL


def verbatim(budget: SampleBudget = FULL, dataset: Dataset = PORTRAITS) -> list[Any]:
    """The memorized pictures of a dataset that were repeated under one caption."""
    return [p for p in dataset.plants() if p.kind == "verbatim"][: budget.plants]


@dataclass(frozen=True)
class ProbedModel:
    """The portraits model with statistics and threshold from ordinary captions, none of which is measured later."""

    model: Any
    denoiser: Denoiser
    statistics: NeuronStatistics
    tau: float
    probe: ProbeConfig = SEARCH
    steps: int = STEPS

    def conditions(self, prompts: Sequence[str]) -> list[Condition]:
        """One condition of one row for each prompt."""
        with torch.no_grad():
            return [self.model.condition(row[None]) for row in self.model.encode(list(prompts))]

    def find(
        self,
        prompts: Sequence[str],
        progress: Progress = silent,
        effect_fraction: float = EFFECT_FRACTION,
        protocol: str = "vitrine",
        sampler: FewStepSampler | None = None,
    ) -> list[Result]:
        """Search all prompts in lockstep; with ``protocol`` nemo those above tau, and stop there."""
        config = SearchConfig(tau=self.tau, effect_fraction=effect_fraction, rows=ROWS, protocol=protocol)
        probe = make_probe(self.denoiser, config=self.probe, rows=config.rows)
        shape = self.model.latent_shape
        conds = self.conditions(prompts)
        return find_neurons(probe, prompts, conds, self.statistics, shape, config, progress, sampler)

    def sampler(
        self, count: int = 100, config: FewStepConfig = FEW_STEPS, progress: Progress = silent
    ) -> FewStepSampler:
        """Samples in few steps, with the threshold of ``count`` ordinary captions; 0 captions: without one."""
        (empty,) = self.conditions([""])
        sites = make_probe(self.denoiser, "all").sites
        sampler = FewStepSampler(self.denoiser, config, empty, sites, rows=ROWS)
        if not count:
            return sampler
        ordinary = self.conditions(captions(CALIBRATION, count, self.model.dataset))
        usual = sample_agreement(sampler, ordinary, self.model.latent_shape, progress)
        measured = sample_threshold(usual, fingerprint_of(self.model.backbone))
        return replace(sampler, threshold=measured, ordinary=ordinary[:KEPT_CAPTIONS])

    def neurons(self, result: Result) -> NeuronSet:
        """A result as a set to block."""
        return result.neurons(fingerprint_of(self.model.backbone))

    def widths(self) -> dict[str, int]:
        """address -> number of neurons."""
        return {s.address: width_of(self.model.backbone, s) for s in make_probe(self.denoiser).sites}

    def sample(
        self, prompts: Sequence[str] | torch.Tensor, seeds: Sequence[int], neurons: NeuronSet | None = None
    ) -> torch.Tensor:
        """(N, 3, side, side) in [0, 1] for texts or text states (N, T, 64), with neurons blocked in both branches."""
        from ..portraits.sampling import sample_images

        texts = prompts if isinstance(prompts, torch.Tensor) else list(prompts)
        with block(self.model.backbone, neurons or NeuronSet({})):
            return sample_images(self.model, texts, list(seeds), steps=self.steps, guidance=GUIDANCE)


def captions(first: int, count: int, dataset: Dataset = PORTRAITS) -> list[str]:
    """Ordinary captions by seed."""
    return dataset.caption(dataset.sample_scenes(range(first, first + count)))


def setting(
    model: str | Portraits | FlowPortraits | None = None,
    progress: Progress = silent,
    budget: SampleBudget = FULL,
    search: ProbeConfig = SEARCH,
    scope: str = "down+mid",
) -> ProbedModel:
    """Statistics of some captions, and the threshold from others at the settings that the search uses.

    Args:
        scope: of the statistics; with ``all`` an exhausted search begins again in all layers.
    """
    portraits = open_model(model) if model is None or isinstance(model, str) else model
    denoiser, shape = Denoiser.from_diffusers(portraits), portraits.latent_shape
    search = replace(search, seeds=budget.noises or search.seeds)
    probe = make_probe(denoiser, scope, search, ROWS)
    probed = ProbedModel(portraits, denoiser, NeuronStatistics({}, {}, 0), 1.0, search)
    conds = probed.conditions(captions(STATISTICS, budget.statistics, portraits.dataset))
    noise = None if all(text_only(s) for s in probe.sites) else probe_noise(search, shape)
    batches = (_values(probe, conds[i : i + 50], noise) for i in range(0, len(conds), 50))
    statistics = gather(batches, [s.address for s in probe.sites], fingerprint_of(portraits.backbone))
    ordinary = probed.conditions(captions(CALIBRATION, budget.calibration, portraits.dataset))
    scores, _ = score_prompts(probe, ordinary, shape, 1.0, progress)
    return ProbedModel(portraits, denoiser, statistics, threshold([s.value for s in scores])[0], search, budget.steps)


def _values(probe: Probe, conds: Sequence[Condition], noise: torch.Tensor | None) -> list[torch.Tensor]:
    """Activations of captions; where they depend on the latent too, each caption has one of the probe's noises."""
    latents = None if noise is None else noise[torch.arange(len(conds)) % len(noise)]
    return value_activations(probe.denoiser, Condition.batch(conds), probe.sites, latents, probe.t)
