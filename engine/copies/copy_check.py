"""The copy check: which prompts come back as copies, how often, where in the picture, and of which picture.

Nothing here knows how pictures are sampled: both libraries pass a function. Prompts are worked on after each other and
leave a row of numbers and one picture in a folder, so any number of them fits, and the same call resumes after a kill.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..errors import refuse
from ..io.files import write_whole
from ..io.number_checks import refuse_unless_finite
from ..io.table_on_disk import RowFile
from ..jobs.run import Run
from ..nemo.blocked_copies import SIDE, THIRD, share_interval
from ..runtime.progress import Progress, silent
from ..settings.copies_options import CheckConfig
from ..settings.one_line import one_line
from ..settings.verdicts import BAD, COPIES_BAD, FINE, LOOK, verdict_of
from .altered import LOOKED_FOR, altered_words
from .nearest import LENGTH, PictureIndex, Pictures, as_image, overlay, thumbnails

Sample = Callable[[str, Sequence[int], bool, Callable[[int], None]], torch.Tensor]
"""(prompt, n seeds, without the LoRA, called after each step with its number) -> (n, 3, H, W) in [0, 1]."""


CHECK = CheckConfig()


@dataclass(frozen=True)
class Instruments:
    """What a check works with.

    Attributes:
        sample: see :data:`Sample`.
        steps: of one sampling run, for the progress.
        rows: pictures that are sampled together.
        lora: whether the model has something that can be taken off for comparison.
        score: prompt -> NeMo's score; None where it cannot be measured.
        identity: what samples and scores depend on: models, sampler, size; by name, as a
            :class:`~vitrine.engine.jobs.run.Run` takes it.
    """

    sample: Sample
    steps: int
    rows: int = 8
    lora: bool = False
    score: Callable[[str], float] | None = None
    identity: Mapping[str, object] = field(default_factory=dict)


@one_line
@dataclass(frozen=True)
class CheckedPrompt:
    """What became of one prompt.

    Attributes:
        prompt, label: as they came.
        ratios: (S,) each sample's distance to the nearest picture, as a share of the usual one.
        numbers: (S,) which picture that is; without pictures, which other sample.
        areas: (S,) 0..1, how much of the sample is copied.
        similar: (S,) MS-SSIM with it.
        kinds: (S,) index into :data:`.altered.KINDS`: how a copied picture was altered.
        seeds: (S,) of the samples.
        score: NeMo's; None where it was not measured.
        file: its sample that is nearest, whole; next to it the overlay.
    """

    prompt: str
    label: str
    ratios: torch.Tensor
    numbers: torch.Tensor
    areas: torch.Tensor
    similar: torch.Tensor
    kinds: torch.Tensor
    seeds: Sequence[int]
    score: float | None = None
    file: Path = Path()

    @property
    def copies(self) -> int:
        """How many samples are copies."""
        return int((self.ratios < THIRD).sum())

    @property
    def alterations(self) -> str:
        """How its copies were altered, in words, such as ``3 mirrored``; empty where none was."""
        return altered_words(self.kinds[self.ratios < THIRD])

    @property
    def share(self) -> float:
        """Of the samples that are copies."""
        return self.copies / len(self.ratios)

    @property
    def interval(self) -> tuple[float, float]:
        """Of the share, 95 %."""
        return share_interval(self.copies, len(self.ratios))

    @property
    def closest(self) -> int:
        """Which sample is shown."""
        return int(self.ratios.argmin())

    @property
    def overlay_file(self) -> Path:
        """Of the same sample: what is copied in its colours, all else grey and dark."""
        return _overlay_file(self.file)


@one_line
@dataclass(frozen=True)
class CopyCheck:
    """The outcome.

    Attributes:
        prompts: in their order.
        names: of the pictures; empty where samples were compared with each other.
        level: the usual distance at 64 px, 0..1.
        config: as it was run.
        tau: NeMo's threshold for this model, if somebody measured one; without it no score has a verdict.
    """

    prompts: Sequence[CheckedPrompt]
    names: Sequence[str]
    level: float
    config: CheckConfig
    tau: float | None = None

    @property
    def ranked(self) -> list[CheckedPrompt]:
        """Most copied first; among equals the nearest."""
        return sorted(self.prompts, key=lambda p: (-p.copies, float(p.ratios.min())))

    @property
    def verdict(self) -> str:
        """Of the prompts' samples: bad from a quarter of copies of a prompt on, look from one copy on."""
        words = [BAD if p.share >= COPIES_BAD else LOOK if p.copies else FINE for p in self.prompts]
        return verdict_of(words, "prompts")

    def text(self) -> str:
        """The outcome in some lines, the verdict first."""
        back = [p for p in self.ranked if p.copies]
        kind = f"one of {len(self.names)} pictures" if self.names else "each other"
        lines = [
            f"{self.verdict}, {self.config.seeds} samples each",
            f"{len(back)} of {len(self.prompts)} prompts have samples that copy {kind} (below a third of the "
            f"usual distance {self.level:.3f}, {self.config.seeds} seeds)",
        ]
        for p in back[:10]:
            name = f", nearest {self.names[int(p.numbers[p.closest])]}" if self.names else ""
            how = f" ({p.alterations})" if p.alterations else ""
            lines.append(f"{p.copies} of {len(p.ratios)}{how}: {p.prompt[:80]}{name}")
        if self.names:
            lines.append(f"Copies were looked for that are {LOOKED_FOR}")
        else:
            lines.append("No training picture was given: samples of a prompt were compared with each other")
        scores = [p.score for p in self.prompts if p.score is not None]
        if self.tau is None:
            lines.append("NeMo's score has no verdict: no threshold was calibrated for this model")
        else:
            above, count = sum(score > self.tau for score in scores), len(self.prompts)
            lines.append(f"NeMo's score, measured of {len(scores)} of {count} prompts, calls {above} memorized")
        return "\n".join(lines)


def check_copies(
    prompts: Sequence[str],
    folder: str | Path,
    instruments: Instruments,
    pictures: Pictures = Pictures(),  # noqa: B008
    config: CheckConfig = CHECK,
    *,
    labels: Sequence[str] = (),
    tau: float | None = None,
    progress: Progress = silent,
) -> CopyCheck:
    """Sample every prompt, compare, score; the same call resumes where an interrupted one stopped.

    Args:
        folder: of this check; its samples are kept there.
        pictures: of the samples' proportions.
        labels: one for each prompt, handed through.
    """
    refuse_unless_finite("tau", tau)
    if not prompts or labels and len(labels) != len(prompts):
        raise refuse("prompts, labels", (len(prompts), len(labels)), "prompts, each with a label or none", "check both")
    captions = list(config.ordinary) or (list(prompts) if instruments.lora else [])
    if len(set(captions)) < (1 if instruments.lora or pictures.names else 2):
        remedy = "pass captions that have nothing to do with the pictures"
        raise refuse("ordinary captions", len(set(captions)), "two or more, or a LoRA to take off", remedy)
    inputs = {"prompts": list(prompts), "captions": captions, "pictures": pictures, "settings": config}
    inputs |= {"lora": instruments.lora, **instruments.identity}
    folder, count = Path(folder), config.seeds
    seeds = range(config.first_seed, config.first_seed + count)
    files = [folder / "samples" / f"{i:06d}.png" for i in range(len(prompts))]
    with Run(folder, "copy check", inputs, ("state/*/rows.json",)):
        usual = RowFile(folder / "state" / "usual", (config.usual, LENGTH), torch.float16)
        rows = RowFile(folder / "state" / "prompts", (len(prompts), 5 * count + 1), torch.float64)
        with usual, rows:
            sampler = _Sampler(instruments, progress, int((~usual.done).sum()) + count * int((~rows.done).sum()))
            for i in (~usual.done).nonzero()[:, 0].tolist():
                bare = sampler(captions[i % len(captions)], [config.first_seed - 1 - i], instruments.lora)
                usual.write(i, thumbnails(bare).flatten(1))
            with pictures.table(folder / "state" / "pictures", sampler.show) as table:
                index = PictureIndex(table, usual.rows(range(config.usual)).float().view(-1, 3, SIDE, SIDE))
                for i in (~rows.done).nonzero()[:, 0].tolist():
                    samples = sampler(prompts[i], seeds)
                    near = index.nearest(thumbnails(samples))
                    closest = int(near.ratios.argmin())
                    _save(files[i], samples[closest])
                    _save(_overlay_file(files[i]), overlay(samples[closest], near.maps[closest]))
                    score = torch.nan if instruments.score is None else instruments.score(prompts[i])
                    sampler.show()
                    parts = (near.ratios, near.numbers, near.areas, near.similar, near.kinds, torch.tensor([score]))
                    rows.write(i, torch.cat([part.double() for part in parts])[None])
            checked = []
            for i, label in enumerate(labels or [""] * len(prompts)):
                ratios, numbers, areas, similar, kinds, (score,) = rows.rows([i])[0].split([count] * 5 + [1])
                measured = None if score.isnan() else float(score)
                row = (ratios, numbers.long(), areas, similar, kinds.long())
                checked.append(CheckedPrompt(prompts[i], label, *row, seeds, measured, files[i]))
            return CopyCheck(checked, list(pictures.names), index.level, config, tau)


class _Sampler:
    """Samples some at a time; each step of each picture counts in the progress."""

    def __init__(self, instruments: Instruments, progress: Progress, count: int) -> None:
        self._instruments, self._progress = instruments, progress
        self._steps, self._total = 0, count * instruments.steps

    def show(self, preview: torch.Tensor | None = None) -> None:
        """How far the check is; a caller may interrupt it there."""
        self._progress(self._steps, self._total, preview)

    def __call__(self, prompt: str, seeds: Sequence[int], bare: bool = False) -> torch.Tensor:
        """(n, 3, H, W) in [0, 1] on the CPU."""
        images = []
        for start in range(0, len(seeds), self._instruments.rows):
            part = seeds[start : start + self._instruments.rows]

            def after(step: int, before: int = self._steps, size: int = len(part)) -> None:
                self._progress(min(before + step * size, self._total), self._total, None)

            images.append(self._instruments.sample(prompt, part, bare, after).float().cpu().clamp(0, 1))
            self._steps += len(part) * self._instruments.steps
            self.show(images[-1][:1])
        return torch.cat(images)


def _overlay_file(path: Path) -> Path:
    return path.with_name(f"{path.stem}-where.png")


def _save(path: Path, picture: torch.Tensor) -> None:
    """(3, H, W) in [0, 1] as a PNG, whole or not at all."""
    image = as_image(picture)
    write_whole(path, lambda scratch: image.save(scratch, "PNG"))
