"""What the LoRA report asks of a LoRA, and its few-step samples: kept in a folder, within a budget of time.

Nothing here knows a library: ComfyUI and diffusers pass a :class:`ReportModel`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from ..diffusion.denoiser import Denoiser
from ..diffusion.noise import seeded_noise
from ..io.file_names import as_name
from ..io.files import named, read_safetensors, save_safetensors
from ..jobs.digests import digest
from ..jobs.run import Run
from ..nemo.few_step_detection import FewStepSampler
from ..nemo.noise_similarity import Request
from ..network.condition import Condition
from ..runtime.finite import require_finite
from ..runtime.progress import Progress, silent
from ..settings.copies_options import ReportConfig
from ..settings.nemo_options import FewStepConfig
from ..w2w.loras.lora_facts import LoraFacts

CAPTION, TRIGGER, NATURAL, ORDINARY = "caption", "trigger alone", "natural", "ordinary"
CLASS_WORDS = frozenset({
    "a", "an", "the", "of", "in", "on", "at", "by", "with", "and", "or", "to", "for", "from", "is", "are", "her", "his",
    "its", "this", "that", "photo", "picture", "image", "portrait", "painting", "drawing", "illustration", "person",
    "man", "woman", "boy", "girl", "child", "dog", "cat", "face", "style", "art", "character", "object",
})  # fmt: skip
"""Words that stay in a natural prompt even if they are part of a trigger phrase."""
USUAL = (
    "a dog in the snow",
    "a street at night",
    "a bowl of soup",
    "a woman reading a book",
    "a mountain lake",
    "an old car",
    "a man playing the guitar",
    "a plate of fruit",
)
"""Default ordinary prompts."""


@dataclass(frozen=True)
class AskedPrompt:
    """One prompt and its kind: ``caption``, ``trigger alone``, ``natural`` or ``ordinary``."""

    text: str
    kind: str


def prompts_of(
    facts: LoraFacts,
    captions: Sequence[str],
    triggers: Sequence[str],
    ordinary: Sequence[str] = USUAL,
    most: int = 4,
    pieces: Callable[[str], int] | None = None,
) -> list[AskedPrompt]:
    """The prompts of a report on one LoRA: at most ``most`` captions, and all ordinary prompts, without repetition.

    Without captions the header's tags replace them; without tags, the trigger before ordinary prompts; without either,
    the ordinary prompts themselves, since such a LoRA affects all prompts.

    Args:
        captions: of its training images.
        triggers: trigger words; none: those of the header.
        pieces: word -> number of tokens: words of several tokens are unknown to the text encoder.
    """
    triggers = [*triggers] or [*facts.triggers]
    own = _spread([c for c in dict.fromkeys(captions) if c.strip()], most)
    if not own and facts.tags:
        own = [", ".join([*triggers[:1], *(t for t in list(facts.tags)[:6] if t not in triggers)])]
    if not own:
        own = [f"{triggers[0]}, {text}" for text in ordinary[:most]] if triggers else list(ordinary[:most])
    rare = rare_words(own, triggers, pieces)
    asked = [AskedPrompt(text, CAPTION) for text in own]
    asked += [AskedPrompt(triggers[0], TRIGGER)] if triggers else []
    asked += [AskedPrompt(text, NATURAL) for text in (natural(caption, rare) for caption in own) if text]
    asked += [AskedPrompt(text, ORDINARY) for text in ordinary]
    first: dict[str, AskedPrompt] = {}
    for prompt in asked:
        first.setdefault(prompt.text, prompt)
    return list(first.values())


def rare_words(
    captions: Sequence[str], triggers: Sequence[str], pieces: Callable[[str], int] | None = None
) -> set[str]:
    """Words specific to the LoRA: those of its triggers, and words of several tokens.

    A long common word may have several tokens, too; it is then missing from natural prompts.
    """
    rare = {word for phrase in triggers for word in _words(phrase) if word not in CLASS_WORDS}
    if pieces is not None:
        rare |= {word for caption in captions for word in _words(caption) if pieces(word) > 1 and word.isalpha()}
    return rare


def natural(caption: str, rare: set[str]) -> str:
    """A caption without rare words; empty if only class words remain."""
    kept = re.sub(r"[\w'-]+", lambda match: "" if match[0].lower() in rare else match[0], caption)
    kept = re.sub(r"\s+([,.;])", r"\1", " ".join(kept.split())).strip(" ,;")
    kept = re.sub(r"([,;])(\s*[,;])+", r"\1", kept)
    return kept if any(word not in CLASS_WORDS for word in _words(kept)) else ""


def _words(text: str) -> list[str]:
    return re.findall(r"[\w'-]+", text.lower())


def _spread(texts: Sequence[str], most: int) -> list[str]:
    """At most ``most`` texts, evenly spaced over the list."""
    if len(texts) <= most:
        return list(texts)
    return [texts[round(i * (len(texts) - 1) / max(most - 1, 1))] for i in range(most)]


# --- the model, and what is sampled of it ---------------------------------------------------------------------------
KEPT = 256
"""Largest side of a sample as it is kept, in pixels: copies are judged at 64."""
BARE = "without a LoRA"
"""Folder of the samples that all LoRAs of a report are compared with."""
SHARES = (0.95, 0.75, 0.55, 0.35, 0.15)
"""Of the schedule: timesteps at which one forward is compared with the model's without the LoRA."""


class Loading(NamedTuple):
    """What came of loading a file.

    Attributes:
        library: which one loaded it.
        loaded, layers: layers that arrived in the network, and those of the file.
        dropped: names of those that did not, the first few.
        text: layers that arrived in text encoders.
        note: what else is to say, such as that the library refused the file.
    """

    library: str
    loaded: int
    layers: int
    dropped: tuple[str, ...] = ()
    text: int = 0
    note: str = ""


class OnModel(NamedTuple):
    """The model at one strength: its denoiser, and what encodes prompts, one condition of one row for each."""

    denoiser: Denoiser
    conditions: Callable[[Sequence[str]], list[Condition]]
    null: Condition


class ReportModel(Protocol):
    """A text-to-image model that LoRAs can be put on, of whatever library.

    Attributes:
        shape: (C, h, w) of its latents.
        shift: of a flow model's times.
        identity: what its samples depend on, as a :class:`~vitrine.engine.jobs.run.Run` takes it.
    """

    shape: tuple[int, ...]
    shift: float
    identity: dict[str, object]

    def lora(self, facts: LoraFacts) -> AbstractContextManager[Loading]:
        """Loads a LoRA; the model is as before when the block ends."""

    def at(self, strength: float) -> AbstractContextManager[OnModel]:
        """The model with that LoRA at a strength; 0 is the model without it."""

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents (n, C, h, w) -> (n, 3, H, W) in [0, 1]."""

    def pieces(self, word: str) -> int:
        """How many tokens a word is cut into."""


@dataclass
class Budget:
    """Time that may be spent on samples.

    Attributes:
        minutes: None is without end.
        skipped: what was left out for it, in words.
        seconds, rows_of: name of a part of the report -> what its samples took, and evaluations of the network, in this
            call.
        rows: all of these evaluations.
    """

    minutes: float | None = None
    skipped: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    rows_of: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def over(self) -> bool:
        """Whether it is spent."""
        return self.minutes is not None and time.monotonic() - self.began > 60 * self.minutes

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Counts the seconds and evaluations of the block under a part of the report."""
        began, before = time.monotonic(), self.rows
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - began
            self.rows_of[part] = self.rows_of.get(part, 0) + self.rows - before


class Bench:
    """Samples of LoRAs and of the model without them, each made once and kept.

    Attributes:
        total: samplings of the LoRA at work that are planned, for the progress.

    Args:
        folder: of the report; each LoRA has a folder there, and so has the model without one.
    """

    def __init__(
        self, folder: Path, model: ReportModel, config: ReportConfig, budget: Budget, progress: Progress = silent
    ) -> None:
        self.folder, self.model, self.config, self.budget, self.progress = folder, model, config, budget, progress
        self.done, self.total = 0, 0

    @contextmanager
    def of(self, name: str, facts: LoraFacts) -> Iterator[Bench]:
        """Takes samples of a LoRA, which was put on the model, while the block is open."""
        config = self.config
        inputs: dict[str, object] = self.model.identity | {
            "seeds": [config.first_seed, config.seeds],
            "steps": config.steps,
            "guidance": config.guidance,
            "latents": list(self.model.shape),
            "shift": self.model.shift,
        }
        begun = ("*.safetensors",)
        self._folders = (self.folder / BARE, self.folder / as_name(f"lora {name}"))
        bare = Run(self._folders[0], "LoRA report, the model without a LoRA", inputs, begun)
        own = Run(self._folders[1], "LoRA report", inputs | {"LoRA": facts.path}, begun)
        self.done, self.total = 0, 0
        with bare, own:
            yield self

    @property
    def seeds(self) -> list[int]:
        """Of each prompt's samples."""
        return list(range(self.config.first_seed, self.config.first_seed + self.config.seeds))

    def samples(self, prompts: Sequence[str], strength: float, part: str) -> dict[str, torch.Tensor]:
        """Prompt -> its samples (S, 3, h, w) in [0, 1]; those that the budget does not allow are missing."""
        files = {prompt: self._file([prompt], strength) for prompt in prompts}
        missing = [prompt for prompt, file in files.items() if not file.is_file()]
        self._advance(len(files) - len(missing))
        if missing and not self.budget.over:
            with self.budget.timed(part), self.model.at(strength) as on:
                for number, prompt in enumerate(missing):
                    if number and self.budget.over:
                        break
                    self._sample(on, prompt, files[prompt])
        left = [prompt for prompt, file in files.items() if not file.is_file()]
        if left:
            self.budget.skipped.append(f"{part}: {len(left)} prompts at strength {strength:g}")
        return {p: self._read(f)["pictures"].float() / 255 for p, f in files.items() if f.is_file()}

    def _sample(self, on: OnModel, prompt: str, file: Path) -> None:
        (cond,), config = on.conditions([prompt]), self.config
        few = FewStepConfig(config.seeds, config.first_seed, config.steps, config.guidance, shift=self.model.shift)
        sampler = FewStepSampler(on.denoiser, few, on.null)
        (latents,) = sampler.samples([Request(cond, sampler.noise(self.model.shape).to(cond.device), {})])
        pictures = _kept(self.model.decode(latents))
        self.budget.rows += sampler.forwards
        save_safetensors(file, {"pictures": pictures, "latents": latents[:2].half()})
        self._advance(1, pictures.float() / 255)

    def changes(self, prompts: Sequence[str], part: str) -> dict[str, list[float]]:
        """Prompt -> how far the LoRA moves the predicted clean picture at each of ``SHARES``, one forward each.

        The root mean square of the difference over the standard deviation of the prediction without the LoRA. Noisy
        latents are the model's own samples of the same prompt with noise.
        """
        known = {p: self._file([p], 0.0) for p in prompts}
        ready = [p for p, file in known.items() if file.is_file()]
        file = self._file(["forwards", *ready], 1.0)
        if not file.is_file():
            if self.budget.over or not ready:
                self.budget.skipped.append(f"{part}: one forward at each timestep")
                return {}
            with self.budget.timed(part):
                latents = {p: self._read(known[p])["latents"].float() for p in ready}
                bare, full = (self._predicted(latents, strength) for strength in (0.0, 1.0))
                # () root mean square of the difference over the deviation of the prediction without the LoRA
                moved = {
                    str(i): (full[p] - bare[p]).square().flatten(1).mean(1).sqrt()
                    / bare[p].flatten(1).std(1).clamp_min(1e-6)
                    for i, p in enumerate(ready)
                }
                save_safetensors(file, moved)
        tensors = self._read(file)
        return {p: tensors[str(i)].tolist() for i, p in enumerate(ready)}

    def _predicted(self, latents: dict[str, torch.Tensor], strength: float) -> dict[str, torch.Tensor]:
        """Prompt -> (T, n, C, h, w) clean predictions at each of ``SHARES``."""
        predicted = {}
        with self.model.at(strength) as on, torch.no_grad():
            for prompt, x0 in latents.items():
                cond = on.conditions([prompt])[0].take(torch.zeros(len(x0), dtype=torch.long))
                noise, each = seeded_noise(self.seeds[: len(x0)], x0.shape[1:]), []
                for t in (fraction * on.denoiser.schedule.last for fraction in SHARES):
                    x = on.denoiser.network_input(x0, noise, t).to(cond.device)
                    each.append(on.denoiser.predict(x, t, cond).x0.float().cpu())
                    self.budget.rows += len(x0)
                predicted[prompt] = torch.stack(each)
        return predicted

    def _file(self, key: Sequence[str], strength: float) -> Path:
        folder = self._folders[strength > 0]
        return folder / f"{digest(list(key))[:16]}-{strength:g}.safetensors"

    @staticmethod
    def _read(file: Path) -> dict[str, torch.Tensor]:
        with named(file, "samples", "a whole file", "delete it, to sample again"):
            return read_safetensors(file)[0]

    def _advance(self, count: int, preview: torch.Tensor | None = None) -> None:
        self.done += count
        self.progress(min(self.done, self.total), self.total, preview)


def _kept(pictures: torch.Tensor) -> torch.Tensor:
    """uint8 of pictures in [0, 1], at most ``KEPT`` on their longer side."""
    require_finite(pictures, "pictures")
    scale = KEPT / max(pictures.shape[-2:])
    if scale < 1:
        size = [max(1, round(side * scale)) for side in pictures.shape[-2:]]
        pictures = F.interpolate(pictures.float(), size, mode="area")
    return (pictures.float().clamp(0, 1) * 255).round().byte().cpu()
