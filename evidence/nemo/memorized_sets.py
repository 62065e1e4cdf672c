"""What NEMO finds and blocks in one LoRA's memorized pictures: detection, search, copies, ordinary captions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...engine.jobs.run import Run
from ...engine.nemo.blocked_copies import share_interval
from ...engine.nemo.dose import FACTORS, FULL, MOST_COST, PART, PART_FACTORS, STEP
from ...engine.nemo.few_step_detection import Agreement, FewStepSampler, sample_agreement
from ...engine.nemo.find import make_probe, score_prompts
from ...engine.nemo.neurons import NeuronSet
from ...engine.portraits import sample_scenes
from ...engine.portraits.plants import Plant
from ...engine.runtime.progress import Progress, silent
from ...engine.settings.config import Config
from ...engine.settings.nemo_options import ProbeConfig, SearchConfig
from ..intervals import auroc, auroc_interval
from .baselines import random_neurons
from .flow_claims import COPY as FLOW_COPY
from .flow_claims import EFFECT_FRACTION as FLOW_FRACTION
from .flow_claims import SEARCH as FLOW_SEARCH
from .later_plants import SETS
from .plant_files import PlantFile
from .probed_model import (
    DETECT,
    EFFECT_FRACTION,
    ORDINARY,
    ROWS,
    SEARCH,
    STEPS,
    ProbedModel,
    SampleBudget,
    captions,
    setting,
)
from .remedies import COPY, Sampler
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


UNTOUCHED, RANDOM = "untouched", "as many random neurons"
BARE, BASE = "untouched, without the rare words", "the model without the LoRA"
SEEDS = tuple(range(1000, 1025))
"""Of samples; none on which a search tries or verifies a dose."""
CHOSEN = {"portraits": Chosen(), "flow": Chosen(FLOW_SEARCH, FLOW_FRACTION, FLOW_COPY, FLOW_SEARCH)}


@dataclass(frozen=True)
class Measured(Config):
    """How much is measured of each LoRA.

    Attributes:
        searches: seeds of the search's noises.
        plants: pictures at most.
        samples: of each caption, untouched and with its embedding adjusted.
        blocked: samples of each caption with its neurons blocked.
        others: samples of each caption under the other baselines.
        ordinary: ordinary captions that detection is tested on.
        agreement: ordinary captions that are sampled with and without the neurons, over all pictures.
        baselines: rivals, random neurons, and the captions without their rare words, too.
        statistics, calibration: captions for the statistics and for the thresholds.
        steps: of the sampler.
    """

    searches: tuple[int, ...] = (1,)
    plants: int = 12
    samples: int = 6
    blocked: int = 25
    others: int = 2
    ordinary: int = 100
    agreement: int = 240
    baselines: bool = True
    statistics: int = 1000
    calibration: int = 60
    steps: int = STEPS

    @property
    def budget(self) -> SampleBudget:
        """For :func:`~vitrine.evidence.nemo.probed_model.setting`."""
        return SampleBudget(statistics=self.statistics, calibration=self.calibration, steps=self.steps)


@dataclass
class Picture:
    """One memorized picture's figures.

    Attributes:
        name, kind: of the picture; the kind names the LoRA and how often the picture was repeated.
        verbatim: one picture, or a template.
        away: way -> pixel RMS between each sample and the memorized picture.
        shown: way -> fraction of the caption's attributes that samples show.
        seconds: way -> of processor time, of the search or the adjustment; without the sampling.
        verdicts, neurons, rows: what each search says, how many neurons it blocks, and its UNet evaluations.
        doses: of each search, as :meth:`~vitrine.engine.nemo.dose.DoseCurve.to_dict` gives them.
        agreement: prompt agreement of ordinary captions, untouched and under the first search's neurons.
    """

    name: str
    kind: str
    verbatim: bool
    away: dict[str, list[float]]
    shown: dict[str, float]
    seconds: dict[str, float]
    verdicts: list[str]
    neurons: list[int]
    rows: list[int]
    doses: list[dict[str, Any]]
    agreement: tuple[float, float]


@dataclass
class Outcome:
    """One LoRA's figures.

    Attributes:
        pictures: of the list that were measured.
        copy: pixel RMS below which a sample is a copy.
        memorized, ordinary: agreements of the memorized and of ordinary captions' few-step samples.
        one_step: (memorized, ordinary) scores of one-step predictions.
    """

    pictures: list[Picture]
    copy: float
    memorized: list[Agreement]
    ordinary: list[Agreement]
    one_step: tuple[torch.Tensor, torch.Tensor]

    @property
    def ways(self) -> list[str]:
        """That were measured, untouched first."""
        return list(dict.fromkeys(way for picture in self.pictures for way in picture.away))

    def copies(self, picture: Picture, way: str) -> torch.Tensor:
        """(samples,) bool."""
        return torch.tensor(picture.away[way]) < self.copy

    def copied(self, picture: Picture) -> bool:
        """Whether half or more of the untouched samples copy."""
        return float(self.copies(picture, UNTOUCHED).float().mean()) >= 0.5

    def share(self, way: str) -> float:
        """Of samples that copy, the mean over all pictures."""
        return sum(float(self.copies(p, way).float().mean()) for p in self.pictures) / len(self.pictures)

    @property
    def agreement(self) -> tuple[float, float]:
        """Prompt agreement of ordinary captions, untouched and blocked, the mean over the pictures' neurons."""
        before, after = zip(*(picture.agreement for picture in self.pictures), strict=True)
        return sum(before) / len(before), sum(after) / len(after)

    def table(self) -> dict[str, Any]:
        """For the report."""
        detected = torch.tensor([a.memorized for a in self.memorized])
        alarms, count = sum(a.memorized for a in self.ordinary), len(self.ordinary)
        few = [-torch.tensor([a.distance for a in each]) for each in (self.memorized, self.ordinary)]
        true = torch.tensor([self.copied(p) and p.verbatim for p in self.pictures])
        return {
            "pictures": len(self.pictures),
            "copied untouched": sum(map(self.copied, self.pictures)),
            "by picture": {picture.name: self._line(picture) for picture in self.pictures},
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
                    p.name: round(a.ratio, 3) for p, a in zip(self.pictures, self.memorized, strict=True)
                },
            },
        }

    def _line(self, picture: Picture) -> dict[str, Any]:
        copies = {way: round(float(self.copies(picture, way).float().mean()), 3) for way in picture.away}
        doses = [points["points"][points["chosen"]]["dose"] for points in picture.doses]
        return {
            "kind": picture.kind,
            "verdicts": picture.verdicts,
            "doses": doses,
            "neurons": picture.neurons,
            "rows of a search": picture.rows,
            "fraction of samples that copy": copies,
            "ordinary captions, prompt agreement": [round(v, 4) for v in picture.agreement],
        }


def _separation(memorized: torch.Tensor, ordinary: torch.Tensor) -> dict[str, Any]:
    hits = int((memorized > ordinary.quantile(0.99)).sum())
    span = auroc_interval(memorized, ordinary) if min(len(memorized), len(ordinary)) > 1 else None
    return {
        "AUROC, 95 %": [round(auroc(memorized, ordinary), 4), span],
        "above the 99 % level of ordinary captions": f"{hits} of {len(memorized)}",
    }


def measure_plants(
    file: PlantFile,
    name: str,
    model: str | None,
    size: Measured,
    progress: Progress = silent,
    state: Path | None = None,
) -> Outcome:
    """Everything for one LoRA, picture by picture; of a template its first caption.

    Args:
        name: of the list.
        state: a folder for what is measured so far; the same call resumes from it.
    """
    chosen, portraits = CHOSEN[file.world], file.model(model)
    probed = setting(portraits, progress, size.budget, chosen.search, "all")
    sampler, plants = probed.sampler(size.calibration, progress=progress), file.plants[: size.plants]
    base = None
    if size.baselines and file.lora is not None:
        base = replace(probed, model=replace(file, lora=None).model(model))
    bench = _Bench(probed, sampler, base, size, chosen)
    doses = {"factors": list(FACTORS), "step": STEP, "most cost": MOST_COST, "full": list(FULL)}
    doses |= {"part": PART, "factors of the part": list(PART_FACTORS), "steps": SearchConfig().sample_steps}
    settings = {"size": size, "network": probed.model.backbone} | doses
    levels, pictures = _repetitions(name, plants), []
    for number, plant in enumerate(plants):
        folder = None if state is None else state / name / f"{number:02d}"
        with Run(folder, "memorized picture", settings | {"name": plant.name}) as run:
            kept = run.load()
            if kept is None:
                picture = bench.measure(plant, levels[number], number, len(plants))
                run.save({}, facts=asdict(picture))
            else:
                picture = Picture(**kept.facts | {"agreement": tuple(kept.facts["agreement"])})
        pictures.append(picture)
        progress(number + 1, len(plants), None)
    return Outcome(pictures, chosen.copy, *_detection(bench, [p.captions[0] for p in plants]))


def _repetitions(name: str, plants: Sequence[Plant]) -> list[str]:
    """The kind of each picture: the list's name, with the repetitions where these differ."""
    times = SETS[name].times if name in SETS else []
    if len(set(times)) < 2 or len(times) < len(plants):
        return [name] * len(plants)
    return [f"{name}, {times[i]} repetitions" for i in range(len(plants))]


@dataclass(frozen=True)
class _Bench:
    """One LoRA's model with its thresholds, ``base`` being the model without the LoRA."""

    probed: ProbedModel
    sampler: FewStepSampler
    base: ProbedModel | None
    size: Measured
    chosen: Chosen

    def measure(self, plant: Plant, kind: str, number: int, count: int) -> Picture:
        """One picture of ``count``: the searches, samples of every way, and what it costs ordinary captions."""
        text, size, probed = plant.captions[0], self.size, self.probed
        results, seconds, sets = [], {}, []
        for seed in size.searches:
            looking, began = replace(probed, probe=replace(probed.probe, seed=seed)), time.process_time()
            (result,) = looking.find([text], effect_fraction=self.chosen.effect_fraction, sampler=self.sampler)
            seconds[blocked_way(seed)] = time.process_time() - began
            results.append(result)
            sets.append(probed.neurons(result))
        many, few, fewest = (SEEDS[:n] for n in (size.blocked, size.samples, size.others))
        ways = {UNTOUCHED: with_blocked(probed, text, NeuronSet({}), few)}
        ways |= {
            blocked_way(seed): with_blocked(probed, text, s, many) for seed, s in zip(size.searches, sets, strict=True)
        }
        if size.baselines:
            ways |= self._baselines(plant, sets[0], few, fewest)
        away, shown = self._sampled(plant, ways, seconds)
        return Picture(
            plant.name,
            kind,
            plant.kind == "verbatim",
            away,
            shown,
            seconds,
            [r.verdict for r in results],
            [len(each) for each in sets],
            [r.forwards for r in results],
            [r.curve.to_dict() for r in results if r.curve is not None],
            self._agreement(sets[0], number, count),
        )

    def _baselines(
        self, plant: Plant, neurons: NeuronSet, few: Sequence[int], fewest: Sequence[int]
    ) -> dict[str, Sampler]:
        text, probed, untouched = plant.captions[0], self.probed, NeuronSet({})
        ways = {
            RANDOM: with_blocked(probed, text, random_neurons(probed.model.backbone, neurons), fewest),
            BARE: with_blocked(probed, plant.controls[0], untouched, fewest),
        }
        ways |= rival_samplers(probed, text, few, fewest)
        if self.base is not None:
            ways[BASE] = with_blocked(self.base, text, untouched, fewest)
        return ways

    def _sampled(
        self, plant: Plant, ways: Mapping[str, Sampler], seconds: dict[str, float]
    ) -> tuple[dict[str, list[float]], dict[str, float]]:
        """Way -> pixel RMS of each sample to the picture; way -> fraction of the attributes that samples show."""
        from ..portraits.classifier import attribute_accuracy, load_classifier
        from ..portraits.quality import look

        net, picture, away, shown = load_classifier(), self.probed.model.draw(plant.scenes[[0]]), {}, {}
        for way, sampled in ways.items():
            began = time.process_time()
            images = sampled()
            seconds.setdefault(way, time.process_time() - began)
            away[way] = [round(v, 5) for v in (images - picture).square().mean((1, 2, 3)).sqrt().tolist()]
            right = attribute_accuracy(look(net, images), plant.scenes[[0] * len(images)]).values()
            shown[way] = float(torch.tensor(list(right)).nanmean())
        return away, shown

    def _agreement(self, neurons: NeuronSet, number: int, count: int) -> tuple[float, float]:
        """Prompt agreement of this picture's part of the ordinary captions, untouched and with its neurons blocked."""
        from ..portraits.classifier import attribute_accuracy, load_classifier
        from ..portraits.quality import look

        each = -(-self.size.agreement // count)
        first, seeds = ORDINARY + number * each, list(range(number * each, (number + 1) * each))
        net, scenes, texts = load_classifier(), sample_scenes(range(first, first + each)), captions(first, each)

        def agreeing(images: torch.Tensor) -> float:
            return float(torch.tensor(list(attribute_accuracy(look(net, images), scenes).values())).nanmean())

        return agreeing(self.probed.sample(texts, seeds)), agreeing(self.probed.sample(texts, seeds, neurons))


def blocked_way(seed: int) -> str:
    """The name of what a search's neurons do."""
    return f"blocked, search seed {seed}"


def _detection(
    bench: _Bench, texts: Sequence[str]
) -> tuple[list[Agreement], list[Agreement], tuple[torch.Tensor, torch.Tensor]]:
    """Few-step agreements of memorized and ordinary captions, and the scores of one-step predictions of both."""
    probed, shape = bench.probed, bench.probed.model.latent_shape
    both = [probed.conditions(each) for each in (texts, captions(ORDINARY, bench.size.ordinary))]
    memorized, ordinary = (sample_agreement(bench.sampler, conds, shape) for conds in both)
    probe = make_probe(probed.denoiser, config=bench.chosen.one_step, rows=ROWS)
    first, second = (
        torch.tensor([score.value for score in score_prompts(probe, conds, shape, 1.0)[0]]) for conds in both
    )
    return memorized, ordinary, (first, second)
