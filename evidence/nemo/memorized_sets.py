"""What NEMO finds and blocks in one LoRA's memorized pictures: detection, search, copies, ordinary captions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...engine.nemo.blocked_copies import share_interval
from ...engine.nemo.few_step_detection import Agreement, FewStepSampler, sample_agreement
from ...engine.nemo.find import make_probe, score_prompts
from ...engine.nemo.neurons import NeuronSet
from ...engine.portraits import sample_scenes
from ...engine.portraits.plants import Plant
from ...engine.portraits.scenes import Scenes
from ...engine.runtime.progress import Progress, silent
from ...engine.settings.nemo_options import ProbeConfig
from ..intervals import auroc, auroc_interval
from .baselines import random_neurons
from .flow_claims import COPY as FLOW_COPY
from .flow_claims import EFFECT_FRACTION as FLOW_FRACTION
from .flow_claims import SEARCH as FLOW_SEARCH
from .plant_files import PlantFile
from .probed_model import DETECT, EFFECT_FRACTION, ORDINARY, ROWS, SEARCH, ProbedModel, SampleBudget, captions, setting
from .remedies import COPY, SEEDS, Sampler
from .rivals import rival_samplers, with_blocked


@dataclass(frozen=True)
class Chosen:
    """Settings that were chosen on the pictures that a shipped model memorized.

    Attributes:
        search: the search's probe.
        effect_fraction: where the search stops.
        copy: pixel RMS to the memorized picture below which a sample is a copy.
        one_step: the probe of the score of one-step predictions, the baseline.
    """

    search: ProbeConfig = SEARCH
    effect_fraction: float = EFFECT_FRACTION
    copy: float = COPY
    one_step: ProbeConfig = DETECT


BARE, BASE = "untouched, without the rare words", "the model without the LoRA"
CHOSEN = {"portraits": Chosen(), "flow": Chosen(FLOW_SEARCH, FLOW_FRACTION, FLOW_COPY, FLOW_SEARCH)}


@dataclass(frozen=True)
class Measured:
    """How much is measured of each LoRA.

    Attributes:
        searches: seeds of the search's noises.
        plants: pictures at most.
        ordinary: ordinary captions that detection is tested on.
        agreement: ordinary captions that are sampled with and without the neurons.
        baselines: rivals, random neurons, and the captions without their rare words, too.
        budget: samples of each caption, captions for the statistics and thresholds.
    """

    searches: tuple[int, ...] = (1, 2, 3)
    plants: int = 8
    ordinary: int = 200
    agreement: int = 100
    baselines: bool = True
    budget: SampleBudget = field(default_factory=SampleBudget)


@dataclass
class Outcome:
    """One LoRA's figures.

    Attributes:
        names, verbatim: of the pictures; whether each is one picture or a template.
        away: way -> (P, seeds) pixel RMS between samples and their memorized picture.
        shown: way -> share of the captions' attributes that samples show.
        neurons: way -> how many were blocked for each picture.
        copy: RMS below which a sample is a copy.
        memorized, ordinary: agreements of the memorized and of ordinary captions' few-step samples.
        one_step: (memorized, ordinary) scores of one-step predictions.
        agreement: prompt agreement of ordinary captions, untouched and blocked.
        rows: UNet evaluations of each search, its checks included.
    """

    names: list[str]
    verbatim: torch.Tensor
    away: dict[str, torch.Tensor]
    shown: dict[str, float]
    neurons: dict[str, list[int]]
    copy: float
    memorized: list[Agreement]
    ordinary: list[Agreement]
    one_step: tuple[torch.Tensor, torch.Tensor]
    agreement: tuple[float, float]
    rows: list[int]

    def shares(self, way: str) -> torch.Tensor:
        """(P,) share of samples that copy."""
        return (self.away[way] < self.copy).float().mean(1)

    def row(self, way: str) -> list[float]:
        """[share of samples, pictures by their median, by any sample, median RMS]."""
        fractions, away = self.shares(way), self.away[way]
        by_median = int((away.median(1).values < self.copy).sum())
        return [
            round(float(fractions.mean()), 3),
            by_median,
            int((fractions > 0).sum()),
            round(float(away.median()), 3),
        ]

    @property
    def copied(self) -> torch.Tensor:
        """(P,) bool: half or more of the untouched samples copy."""
        return self.shares("untouched") >= 0.5

    def table(self) -> dict[str, Any]:
        """For the report."""
        detected = torch.tensor([a.memorized for a in self.memorized])
        alarms, count = sum(a.memorized for a in self.ordinary), len(self.ordinary)
        few = [-torch.tensor([a.distance for a in each]) for each in (self.memorized, self.ordinary)]
        true = self.copied & self.verbatim
        lines: dict[str, Any] = {
            "pictures": len(self.names), "copied untouched": int(self.copied.sum()),
            "copies [share of samples, pictures by their median, by any sample, median RMS]": {
                way: self.row(way) for way in self.away
            },
            "attributes of the caption that samples show": {way: round(v, 3) for way, v in self.shown.items()},
            "neurons": self.neurons, "rows of a search": self.rows,
            "ordinary captions, prompt agreement [untouched, blocked]": [round(v, 4) for v in self.agreement],
            "detection": {
                "few-step samples": _separation(*few) | {"rows a prompt": self.memorized[0].config.rows},
                "one-step predictions": _separation(*self.one_step),
                "at the measured threshold: copied verbatim pictures found": f"{int((detected & true).sum())} of "
                f"{int(true.sum())}",
                "... of all planted": f"{int(detected.sum())} of {len(detected)}",
                "... false alarms": f"{alarms} of {count}",
                "... 95 %": share_interval(alarms, count),
                "distance of each, as a share of the usual one": {
                    n: round(a.ratio, 3) for n, a in zip(self.names, self.memorized, strict=True)
                },
                "kind": {n: a.kind for n, a in zip(self.names, self.memorized, strict=True)},
            },
        }  # fmt: skip
        return lines


def _separation(memorized: torch.Tensor, ordinary: torch.Tensor) -> dict[str, Any]:
    hits = int((memorized > ordinary.quantile(0.99)).sum())
    span = auroc_interval(memorized, ordinary) if min(len(memorized), len(ordinary)) > 1 else None
    return {
        "AUROC, 95 %": [round(auroc(memorized, ordinary), 4), span],
        "above the 99 % level of ordinary captions": f"{hits} of {len(memorized)}",
    }


def measure_plants(file: PlantFile, model: str | None, size: Measured, progress: Progress = silent) -> Outcome:
    """Everything for one LoRA; of a template its first caption."""
    chosen, portraits = CHOSEN[file.world], file.model(model)
    probed = setting(portraits, progress, size.budget, chosen.search, "all")
    sampler = probed.sampler(size.budget.calibration, progress=progress)
    plants = file.plants[: size.plants]
    texts, controls = [p.captions[0] for p in plants], [p.controls[0] for p in plants]
    seeds, untouched = SEEDS[: size.budget.seeds], [NeuronSet({})] * len(plants)
    searches: list[list[NeuronSet]] = []
    rows: list[int] = []
    for seed in size.searches:
        looking = replace(probed, probe=replace(probed.probe, seed=seed))
        results = looking.find(texts, effect_fraction=chosen.effect_fraction, progress=progress, sampler=sampler)
        searches.append([looking.neurons(r) for r in results])
        rows += [r.forwards for r in results]

    def blocking(of: Sequence[str], sets: Sequence[NeuronSet], on: ProbedModel = probed) -> list[Sampler]:
        return [with_blocked(on, text, neurons, seeds) for text, neurons in zip(of, sets, strict=True)]

    ways = {"untouched": blocking(texts, untouched)}
    named = {f"blocked, search seed {seed}": sets for seed, sets in zip(size.searches, searches, strict=True)}
    ways |= {way: blocking(texts, sets) for way, sets in named.items()}
    if size.baselines:
        random = [random_neurons(probed.model.backbone, each) for each in searches[0]]
        ways |= {"as many random neurons": blocking(texts, random), BARE: blocking(controls, untouched)}
        ways |= rival_samplers(probed, texts, searches, seeds)
    if size.baselines and file.lora is not None:
        ways[BASE] = blocking(texts, untouched, replace(probed, model=replace(file, lora=None).model(model)))
    away, shown = _sampled(probed, plants, ways)
    return Outcome(
        [p.name for p in plants], torch.tensor([p.kind == "verbatim" for p in plants]), away, shown,
        {way: [len(s) for s in sets] for way, sets in named.items()}, chosen.copy,
        *_detection(probed, texts, sampler, size, chosen), _agreement(probed, searches[0], size.agreement), rows,
    )  # fmt: skip


def _sampled(
    probed: ProbedModel, plants: Sequence[Plant], ways: Mapping[str, Sequence[Sampler]]
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Way -> (P, seeds) pixel RMS between samples and their picture; way -> share of attributes that they show."""
    from ..portraits.classifier import attribute_accuracy, load_classifier
    from ..portraits.quality import look

    net, away, shown = load_classifier(), {}, {}
    for way, samplers in ways.items():
        rows, right = [], []
        for sampled, plant in zip(samplers, plants, strict=True):
            images = sampled()
            rows.append((images - probed.model.draw(plant.scenes[[0]])).square().mean((1, 2, 3)).sqrt())
            right += list(attribute_accuracy(look(net, images), plant.scenes[[0] * len(images)]).values())
        away[way], shown[way] = torch.stack(rows), float(torch.tensor(right).nanmean())
    return away, shown


def _detection(
    probed: ProbedModel, texts: Sequence[str], sampler: FewStepSampler, size: Measured, chosen: Chosen
) -> tuple[list[Agreement], list[Agreement], tuple[torch.Tensor, torch.Tensor]]:
    """Few-step agreements of memorized and ordinary captions, and the scores of one-step predictions of both."""
    both = [probed.conditions(each) for each in (texts, captions(ORDINARY, size.ordinary))]
    memorized, ordinary = (sample_agreement(sampler, conds, probed.model.latent_shape) for conds in both)
    probe = make_probe(probed.denoiser, config=chosen.one_step, rows=ROWS)
    scores = [score_prompts(probe, conds, probed.model.latent_shape, 1.0)[0] for conds in both]
    first, second = (torch.tensor([s.value for s in each]) for each in scores)
    return memorized, ordinary, (first, second)


def _agreement(probed: ProbedModel, sets: Sequence[NeuronSet], count: int) -> tuple[float, float]:
    """Prompt agreement of ordinary captions, untouched and with as many of them under each of the sets."""
    from ..portraits.classifier import attribute_accuracy, load_classifier
    from ..portraits.quality import look

    net, scenes = load_classifier(), sample_scenes(range(ORDINARY, ORDINARY + count))
    texts, seeds, each = captions(ORDINARY, count), list(range(count)), -(-count // len(sets))
    parts = [slice(i, min(i + each, count)) for i in range(0, count, each)]

    def agreeing(images: torch.Tensor, of: Scenes) -> float:
        return float(torch.tensor(list(attribute_accuracy(look(net, images), of).values())).nanmean())

    changed = [probed.sample(texts[p], seeds[p], neurons) for p, neurons in zip(parts, sets, strict=False)]
    return agreeing(probed.sample(texts, seeds), scenes), agreeing(torch.cat(changed), scenes)
