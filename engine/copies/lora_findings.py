"""What the LoRA report makes of samples, and its summary: five sentences, each with a verdict and its threshold.

Measured are agreement and copies by prompt and strength, variety, and drift of ordinary prompts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..emd.variety import mean_distance, small_pixels
from ..jobs.digests import digest
from ..nemo.blocked_copies import share_interval
from ..settings.one_line import one_line
from ..settings.verdicts import BAD, COPIES_BAD, FINE, LOOK, OPEN, verdict_of, with_missing, word_of
from ..w2w.loras.lora_facts import LoraFacts
from .altered import LOOKED_FOR, altered_words
from .lora_contents import LoraHealth, Neighbours
from .lora_samples import CAPTION, NATURAL, ORDINARY, SHARES, TRIGGER, AskedPrompt, Loading
from .nearest import PictureIndex, Pictures, distances, thumbnails

_USUAL = 32
"""Samples without the LoRA that say which distance is usual."""
Samples = Mapping[str, torch.Tensor]
"""Prompt -> (S, 3, h, w) in [0, 1]."""
LOST_LOOK, LOST_BAD = 0.5, 2 / 3
"""Share of the distance between samples (see :class:`PromptCopies`) that the own prompt loses
which loses most: at two thirds samples are as near to each other as copies are. Chosen on LoRAs of people that are
measured nowhere else (``evidence/nemo/lora_report_claims.py``)."""
DRIFT_LOOK, DRIFT_BAD = 0.5, 0.9
"""Of ordinary prompts, as a share of the distance between two prompts' samples: at 1 nothing of the picture is left."""
VARIETY_LOOK, VARIETY_BAD = 0.8, 0.5
"""Share of the variety that is left."""
NOTHING, SAME = 0.01, 0.8
"""Change of the predicted picture below which a LoRA does nothing; ordinary prompts' share of its own prompts' change
from which it acts on all alike."""


# --- measures -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class PromptCopies:
    """Of one prompt at strength 1.

    Attributes:
        prompt, kind: see :class:`~.lora_samples.AskedPrompt`.
        samples: how many.
        distance, bare: of two of its samples, the median pair's, with the LoRA and without it (NaN: not sampled).
        repeats: samples that are copies of another sample of the prompt: nearer than a third of the usual distance.
        copies: samples that are copies of a training picture; None without pictures.
        nearest: which training picture the shown sample is nearest to; None without pictures.
        ratio: its distance, as a share of the usual one; without pictures that to the nearest other sample.
        area: share of the picture where it is below a third.
        shown: (3, h, w) the sample that is nearest.
        where: (64, 64) the ratio around each pixel of it.
        alterations: how its copies were altered, in words; empty where none was.
    """

    prompt: str
    kind: str
    samples: int
    distance: float
    bare: float
    repeats: int
    copies: int | None
    nearest: int | None
    ratio: float
    area: float
    shown: torch.Tensor = field(repr=False)
    where: torch.Tensor = field(repr=False)
    alterations: str = ""

    @property
    def lost(self) -> float:
        """Share of the distance between its samples that the LoRA takes: 1 where every seed gives one picture."""
        return max(1 - self.distance / max(self.bare, 1e-6), -1.0)

    def to_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """As JSON."""
        table: dict[str, Any] = {
            "prompt": self.prompt,
            "kind": self.kind,
            "samples": self.samples,
            "distance": round(self.distance, 4),
            "distance_without": round(self.bare, 4),
            "lost": round(self.lost, 4),
            "repeats": self.repeats,
            "ratio": round(self.ratio, 4),
            "area": round(self.area, 4),
        }
        if self.copies is not None and self.nearest is not None:
            interval = share_interval(self.copies, self.samples)
            table |= {"copies": self.copies, "copies_95": list(interval), "nearest": names[self.nearest]}
            table |= {"altered_copies": self.alterations} if self.alterations else {}
        return table


class CopyReader:
    """Compares samples with the training pictures, or with each other where there are none.

    Args:
        bare: samples without the LoRA.
        own: its own prompts: of these say which distance is usual.
        pictures: the training pictures; they are read once, and their thumbnails kept in the folder.
    """

    def __init__(self, bare: Samples, own: Sequence[str], pictures: Pictures, folder: Path) -> None:
        self.bare = bare
        # as in the copy check, the model without the LoRA says on the same prompts which distance is usual
        known = [bare[prompt] for prompt in own if prompt in bare] or list(bare.values())
        usual = torch.cat(known)[:_USUAL]
        self._open = ExitStack()
        fitting = pictures.cropped(usual.shape[-2:])
        self._table = self._open.enter_context(fitting.table(folder / f"pictures-{digest(pictures)[:16]}"))
        self._among = PictureIndex(None, thumbnails(usual))
        self._index = self._among if self._table is None else PictureIndex(self._table, thumbnails(usual))

    def __enter__(self) -> CopyReader:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    @property
    def by_pictures(self) -> bool:
        """Whether there are training pictures to compare with."""
        return self._table is not None

    def of_prompt(self, asked: AskedPrompt, full: torch.Tensor) -> PromptCopies:
        """One prompt, from its samples with the LoRA."""
        near, others = (index.nearest(thumbnails(full)) for index in (self._index, self._among))
        closest = int(near.ratios.argmin())
        bare = between(self.bare[asked.text]) if asked.text in self.bare else float("nan")
        return PromptCopies(
            asked.text,
            asked.kind,
            len(full),
            between(full),
            bare,
            int(others.copied.sum()),
            int(near.copied.sum()) if self.by_pictures else None,
            int(near.numbers[closest]) if self.by_pictures else None,
            float(near.ratios[closest]),
            float(near.areas[closest]),
            full[closest],
            near.maps[closest],
            altered_words(near.kinds[near.copied]),
        )


def between(samples: torch.Tensor) -> float:
    """Distance of two samples (S, 3, h, w) of one prompt, see :func:`distances`: the median pair's."""
    small = thumbnails(samples)
    first, second = torch.triu_indices(len(small), len(small), 1)
    return float(distances(small, small)[first, second].quantile(0.5))


@dataclass(frozen=True)
class Cost:
    """What the LoRA costs.

    Attributes:
        variety: (without, with) mean distance between two samples of one prompt, over its own prompts.
        ordinary: the same over ordinary prompts.
        drift: distance of samples of ordinary prompts to those without the LoRA at equal seeds, as a share of that
            between samples of different prompts.
    """

    variety: tuple[float, float] | None
    ordinary: tuple[float, float] | None
    drift: float | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        pairs = {"variety": self.variety, "variety_ordinary": self.ordinary}
        table: dict[str, Any] = {
            name: None if pair is None else {"without": round(pair[0], 4), "with": round(pair[1], 4)}
            for name, pair in pairs.items()
        }
        return table | {"drift": None if self.drift is None else round(self.drift, 4)}


def cost_of(asked: Sequence[AskedPrompt], bare: Samples, full: Samples) -> Cost:
    """From samples of the same prompts and seeds without and with the LoRA."""
    both = [p for p in asked if p.text in bare and p.text in full]
    own, ordinary = ([p.text for p in both if (p.kind == ORDINARY) == plain] for plain in (False, True))
    drift = None
    if len(ordinary) > 1:
        apart = [(thumbnails(bare[p]) - thumbnails(full[p])).flatten(1) for p in ordinary]  # of equal seeds
        moved = torch.cat(apart).square().mean(1).sqrt()
        first = thumbnails(torch.cat([bare[p][:1] for p in ordinary]))
        rows, columns = torch.triu_indices(len(first), len(first), 1)
        drift = float(moved.median() / distances(first, first)[rows, columns].median().clamp_min(1e-6))
    return Cost(_variety(own, bare, full), _variety(ordinary, bare, full), drift)


def _variety(prompts: Sequence[str], bare: Samples, full: Samples) -> tuple[float, float] | None:
    if not prompts:
        return None
    means = [sum(mean_distance(small_pixels(samples[p])) for p in prompts) / len(prompts) for samples in (bare, full)]
    return means[0], means[1]


# --- the summary ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sentence:
    """One line of the summary.

    Attributes:
        topic: what it is, where it acts, what it copies, what it costs, its neighbours.
        verdict: ``fine``, ``look``, ``bad`` or ``not measured``.
        text: what was measured.
        advice: what to do; empty where there is nothing.
        threshold: which numbers make the verdict.
    """

    topic: str
    verdict: str
    text: str
    advice: str
    threshold: str


@one_line
@dataclass(frozen=True)
class Findings:
    """Everything about one LoRA that the summary, the page and the JSON are made of.

    Attributes:
        name: in the report.
        health_problem: why its tensors could not be read.
        loadings: of each library that tried.
        changes: prompt -> change of the predicted picture at each of ``SHARES``, in the order of ``copies``' prompts.
        kinds: prompt -> its kind, of ``changes``.
        strengths: strength -> its measures.
        skipped: what the budget left out.
        asked: prompt -> its kind, of all that were to be sampled.
        asked_strengths: that its captions were to be sampled at.
        asked_changes: prompts that were to be compared forward by forward.
    """

    name: str
    facts: LoraFacts
    health: LoraHealth | None = None
    health_problem: str = ""
    loadings: Sequence[Loading] = ()
    changes: Mapping[str, Sequence[float]] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    copies: Sequence[PromptCopies] = ()
    strengths: Mapping[float, Mapping[str, float]] = field(default_factory=dict)
    cost: Cost | None = None
    neighbours: Neighbours | None = None
    pictures: Sequence[str] = ()
    skipped: Sequence[str] = ()
    asked: Mapping[str, str] = field(default_factory=dict)
    asked_strengths: Sequence[float] = ()
    asked_changes: Sequence[str] = ()

    @property
    def own(self) -> list[PromptCopies]:
        """All but ordinary prompts, of which something says how much they copy."""
        return [p for p in self.copies if p.kind != ORDINARY and (self.pictures or not math.isnan(p.bare))]

    @property
    def summary(self) -> list[Sentence]:
        """Five sentences."""
        return [what_it_is(self), where_it_acts(self), what_it_copies(self), what_it_costs(self), neighbours(self)]

    @property
    def worst(self) -> str:
        """The verdict's word, see :func:`~vitrine.engine.settings.verdicts.word_of`."""
        return word_of([sentence.verdict for sentence in self.summary])

    @property
    def verdict(self) -> str:
        """The word, and how many of the five parts were measured."""
        return verdict_of([sentence.verdict for sentence in self.summary])

    def missing(self, kinds: Sequence[str], measured: Collection[str]) -> list[str]:
        """Prompts of some kinds that were asked for and not measured."""
        return [prompt for prompt, kind in self.asked.items() if kind in kinds and prompt not in measured]

    def copy_score(self) -> float:
        """0..1, how much it copies: the largest share of copies of a prompt; without pictures of distance lost."""
        if not self.own:
            return math.nan
        if self.pictures:
            return max((p.copies or 0) / p.samples for p in self.own)
        return max(0.0, *(p.lost for p in self.own if p.lost == p.lost), 0.0)

    def kind_mean(self, kinds: Sequence[str]) -> list[float]:
        """Mean change at each of ``SHARES`` over prompts of some kinds; empty where none was measured."""
        rows = [row for prompt, row in self.changes.items() if self.kinds.get(prompt) in kinds]
        return [sum(column) / len(rows) for column in zip(*rows, strict=True)] if rows else []

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "name": self.name,
            "verdict": self.worst,
            "parts_measured": sum(s.verdict != OPEN for s in self.summary),
            "parts": len(self.summary),
            "summary": [asdict(s) for s in self.summary],
            "what_it_is": self.facts.to_dict()
            | {"tensors": self.health_problem or (self.health.to_dict() if self.health else None)},
            "loading": [loading._asdict() for loading in self.loadings],
            "where_it_acts": {
                "shares_of_schedule": list(SHARES),
                "change_of_predicted_picture": {p: [round(v, 4) for v in row] for p, row in self.changes.items()},
            },
            "what_it_copies": {
                "score": None if math.isnan(self.copy_score()) else round(self.copy_score(), 4),
                "prompts": [p.to_dict(self.pictures) for p in self.copies],
                "by_strength": {f"{s:g}": dict(v) for s, v in self.strengths.items()},
            },
            "what_it_costs": None if self.cost is None else self.cost.to_dict(),
            "neighbours": None if self.neighbours is None else self.neighbours.to_dict(),
            "left_out_for_the_budget": list(self.skipped),
        }


# --- sentences ----------------------------------------------------------------------------------------------------
def what_it_is(f: Findings) -> Sentence:
    """Sound, and loaded whole."""
    topic, rule = (
        "what it is",
        "bad: refused, NaN anywhere, or no layer loads; look: layers that change nothing, end their ",
    )
    rule += "number format, or do not load; a base model or an alpha that is not known"
    file = f.facts.file
    if file is None or f.health is None:
        if file is None:
            return Sentence(topic, BAD, f"Not read: {f.facts.problem}", "", rule)
        return Sentence(topic, BAD, f"Not usable: {f.health_problem}", "Choose its base model, or another file.", rule)
    ranks = f"rank {file.ranks[0]}" if len(file.ranks) == 1 else f"ranks {file.ranks[0]} to {file.ranks[-1]}"
    kinds, base = " and ".join(sorted(f.facts.to_dict()["kinds"])), file.shaped_base or file.said_base
    layers = "1 layer" if len(file.entries) == 1 else f"{len(file.entries)} layers"
    text = f"{kinds} of {layers}, {ranks}, for {base or 'a base model that is not known'}."
    text += "" if f.loadings else " Whether it loads was not tried."
    others = [f"{file.text_layers} layers of text encoders"] if file.text_layers else []
    others += file.dropped
    text += f" Looked at for NaN alone: {', '.join(others)}." if others else ""
    broken = f.health.broken("NaN or infinite")
    lost = [loading for loading in f.loadings if not loading.loaded]
    if broken or lost or f.health.others_broken:
        where = f" {len(broken)} layers contain NaN or infinity, first {broken[0]}." if broken else ""
        others_broken = f.health.others_broken
        if others_broken:
            where += f" {len(others_broken)} other tensors contain NaN or infinity, first {others_broken[0]}."
        where += "".join(f" {x.library} loads none of its layers." for x in lost)
        spreads = "Retrain with a lower rate or in bfloat16; NaN spreads into every picture."
        advice = spreads if broken or others_broken else ""
        return Sentence(topic, BAD, text + where, advice or "Choose the base model that it was trained on.", rule)
    kinds_of_fault = {"changes nothing": "are zero", "at the end of its number format": "end their number format"}
    notes = [
        f"{len(f.health.broken(p))} of {len(file.entries)} layers {word}."
        for p, word in kinds_of_fault.items()
        if f.health.broken(p)
    ]
    notes += [
        f"{x.library} drops {x.layers - x.loaded} of {x.layers} layers, such as {x.dropped[0]}."
        for x in f.loadings
        if x.loaded < x.layers and x.dropped
    ]
    notes += [f"{x.note}." for x in f.loadings if x.note]
    advice = "What does not load has no effect: save it in kohya's or diffusers' names." if notes else ""
    unknown = f.facts.not_known
    advice = advice or (unknown[0][1] if unknown else "")
    said = ["It gives no alpha: programs take the rank for it."] if f.facts.to_dict()["no_alpha"] else []
    verdict = LOOK if notes or unknown else FINE
    return Sentence(topic, verdict, " ".join([text, *notes, *(note for note, _ in unknown), *said]), advice, rule)


def where_it_acts(f: Findings) -> Sentence:
    """Whether it acts, and whether only where it is asked for."""
    topic = "where it acts"
    rule = f"bad: own prompts change by less than {NOTHING:.0%}; look: with a trigger word, ordinary prompts change "
    rule += f"by {SAME:.0%} of that or more"
    if f.health is None or not f.health.total:
        return Sentence(topic, OPEN, "Nothing to say without its tensors.", "", rule)
    kind, fraction = next(iter(f.health.fractions("kind").items()))
    text = f"{fraction:.0%} of its change of the weights is in {kind}."
    own, ordinary = f.kind_mean((CAPTION, TRIGGER)), f.kind_mean((ORDINARY,))
    if not own:
        return Sentence(topic, OPEN, f"{text} No model was given for forwards.", "Give its base model.", rule)
    first, mean = SHARES[max(range(len(own)), key=own.__getitem__)], sum(own) / len(own)
    text += f" Its own prompts' predictions change by {mean:.0%} on average, most at {first:.0%} of the schedule."
    if mean < NOTHING:
        return Sentence(topic, BAD, text, "It does nothing here: is it for this base model?", rule)
    missing = [prompt for prompt in f.asked_changes if prompt not in f.changes]
    if not ordinary or missing:
        text += f" Not measured: {_missing(missing)}." if missing else " Ordinary prompts were not measured."
    if not ordinary:
        return Sentence(topic, LOOK, text, "Give ordinary prompts, or more minutes.", rule)
    relative = sum(ordinary) / len(ordinary) / mean
    text += f" Prompts that do not ask for it change by {relative:.0%} of that."
    if f.facts.triggers and relative >= SAME:
        advice = "Its trigger word is no switch: take it off where it is not wanted, or train with captions that vary."
        return Sentence(topic, LOOK, text, advice, rule)
    return Sentence(topic, with_missing(FINE, missing), text, "Give more minutes." if missing else "", rule)


def _missing(prompts: Sequence[str]) -> str:
    """Prompts that the budget left out."""
    return f'{len(prompts)} prompts, such as "{prompts[0][:40]}"'


def what_it_copies(f: Findings) -> Sentence:
    """Training pictures, or one picture again and again."""
    topic = "what it copies"
    rule = f"distance between samples of one prompt that the LoRA takes: look from {LOST_LOOK:.0%}, bad from "
    rule += f"{LOST_BAD:.0%}"
    if f.pictures:
        rule = f"bad: {COPIES_BAD:.0%} of a prompt's samples or more copy a training picture (below a third of the "
        rule += "usual distance); look: any"
    if not f.own:
        return Sentence(topic, OPEN, "No samples were made.", "Give its base model, or more minutes.", rule)
    worst = max(f.own, key=lambda p: ((p.copies or 0) / p.samples, p.lost))
    score, quoted = f.copy_score(), f'"{worst.prompt[:80]}"'
    if f.pictures:
        verdict = BAD if score >= COPIES_BAD else LOOK if score > 0 else FINE
        how = f" ({worst.alterations})" if worst.alterations else ""
        text = f"{worst.copies} of {worst.samples} samples of the {worst.kind} {quoted} copy a training picture{how}."
        if not score:
            text = f"No sample of {len(f.own)} prompts copies a training picture; the nearest is at "
            text += f"{min(p.ratio for p in f.own):.2f} of the usual distance. Looked for: {LOOKED_FOR}."
    else:
        verdict = BAD if score >= LOST_BAD else LOOK if score >= LOST_LOOK else FINE
        text = f"Samples are most alike of the {worst.kind} {quoted}: their distance is {worst.distance:.3f}, without "
        text += f"the LoRA {worst.bare:.3f} ({worst.lost:.0%} lost)."
    begins = begins_at(f)
    text += f" It begins at strength {begins:g}." if begins is not None and verdict != FINE else ""
    missing = f.missing((CAPTION, TRIGGER, NATURAL), [p.prompt for p in f.own])
    asked = len(missing) + len(f.own)
    text += f" Measured: {len(f.own)} of {asked} prompts." if missing else ""
    left = [f"{strength:g}" for strength in f.asked_strengths if strength not in f.strengths]
    text += f" Not measured at strength {', '.join(left)}." if left else ""
    verdict = with_missing(verdict, [*missing, *left])
    natural = [p for p in f.own if p.kind == NATURAL and (p.copies or (not f.pictures and p.lost >= LOST_BAD))]
    text += f' Natural prompts bring it back, too: "{natural[0].prompt[:60]}".' if natural else ""
    below = max((s for s in f.strengths if begins is not None and s < begins), default=None)
    train = "rain fewer steps or on more pictures, and vary the captions of the copied ones."
    advice = f"T{train}" if below is None else f"Use it at strength {below:g} or below, or t{train}"
    advice = "" if verdict == FINE else "Give more minutes." if not score else advice
    return Sentence(topic, verdict, text, advice, rule)


def begins_at(f: Findings) -> float | None:
    """The smallest strength at which its captions copy, or agree as much as copies do; None where none does."""
    for strength, values in sorted(f.strengths.items()):
        copied = values.get("copies", 0.0) >= COPIES_BAD if f.pictures else values.get("lost", 0.0) >= LOST_BAD
        if copied:
            return strength
    return None


def what_it_costs(f: Findings) -> Sentence:
    """Variety and ordinary prompts."""
    topic, cost = "what it costs", f.cost
    rule = f"variety left: look below {VARIETY_LOOK:.0%}, bad below {VARIETY_BAD:.0%}; drift of ordinary prompts: "
    rule += f"look from {DRIFT_LOOK:.0%}, bad from {DRIFT_BAD:.0%}"
    if cost is None or cost.variety is None:
        return Sentence(topic, OPEN, "No samples were made.", "Give its base model, or more minutes.", rule)
    left = cost.variety[1] / max(cost.variety[0], 1e-9)
    text = f"Samples of its own prompts keep {left:.0%} of the variety between seeds"
    if cost.drift is not None:
        text += f"; ordinary prompts move by {cost.drift:.0%} of the way to another picture"
    if cost.drift is None:
        text += "; ordinary prompts were not measured"
    missing = f.missing((CAPTION, TRIGGER, NATURAL, ORDINARY), [p.prompt for p in f.copies])
    text += f"; not measured: {_missing(missing)}" if missing else ""
    drift = cost.drift or 0.0
    bad = left < VARIETY_BAD or drift >= DRIFT_BAD
    look = left < VARIETY_LOOK or drift >= DRIFT_LOOK
    advice = "Lower its strength, or limit it to the blocks that carry the subject." if bad or look else ""
    lacking = missing or cost.drift is None
    advice = advice or ("Give ordinary prompts, or more minutes." if lacking else "")
    return Sentence(topic, BAD if bad else LOOK if look or lacking else FINE, f"{text}.", advice, rule)


def neighbours(f: Findings) -> Sentence:
    """Duplicates and merges."""
    topic, near = "its neighbours", f.neighbours
    rule = "look: the same weights, nearly the same (10 % apart or less), or a merge of others (20 % missing or less)"
    if near is None or not near.compared:
        text = "There is no other LoRA of its base model to compare with."
        return Sentence(topic, OPEN, text, "Give a folder of LoRAs.", rule)
    closest = f"the nearest is {near.alike[0][0]} (cosine {near.alike[0][1]:.2f})" if near.alike else "none is near"
    text = f"Compared with {near.compared} others: {closest}."
    if near.left_out:
        text += f" Not compared: {near.left_out}, of another base model or not readable."
    text += "".join(f" {copy}." for copy in near.copies[:3])
    text += f" {near.merge}." if near.merge is not None else ""
    twin = bool(near.copies) or near.merge is not None
    return Sentence(topic, LOOK if twin else FINE, text, "Keep one of the two." if near.copies else "", rule)
