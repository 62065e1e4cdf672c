"""The copy check: which prompts come back as copies, how often, where in the picture, and of which picture.

Nothing here knows how pictures are sampled: both libraries pass a function. Prompts are worked on after each other and
leave a row of numbers and one picture in a folder, so any number of them fits, and the same call resumes after a kill.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..errors import refuse
from ..io.files import write_whole
from ..io.number_checks import refuse_unless_finite
from ..io.table_on_disk import RowFile
from ..jobs.digests import digest
from ..jobs.run import Run
from ..runtime.progress import Progress, silent
from ..settings.config import Config
from .blocked_copies import THIRD, share_interval
from .nearest import LENGTH, SIDE, Nearest, PictureIndex, overlay, thumbnails

Sample = Callable[[str, Sequence[int], bool, Callable[[int], None]], torch.Tensor]
"""(prompt, n seeds, without the LoRA, called after each step with its number) -> (n, 3, H, W) in [0, 1]."""
SCORES = ("nemo", "likeness")
"""Scores of a prompt: NeMo's, and the cosine of a descriptor with the picture that is nearest. NaN where one was not
measured."""


@dataclass(frozen=True)
class CheckConfig(Config):
    """What is sampled for a copy check.

    Attributes:
        seeds: samples of each prompt.
        first_seed: of these; searches and verifications use seeds 1 and 101.
        usual: samples that say which distance is usual.
        ordinary: captions for them, which have nothing to do with the pictures; with a LoRA none are needed, as the
            model without it says what is usual.
    """

    seeds: int = 8
    first_seed: int = 2000
    usual: int = 16
    ordinary: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ordinary", tuple(self.ordinary))
        if min(self.seeds, self.usual) < 2:
            raise refuse("seeds, usual", (self.seeds, self.usual), "2 or more of both", "8 and 16 are a good start")


CHECK = CheckConfig()


@dataclass(frozen=True)
class Pictures:
    """Training pictures, read when their turn comes.

    Attributes:
        names: one for each.
        read: number -> (3, H, W) in [0, 1], of the samples' proportions.
        content: what they are, such as their files, for the check's identity; None: they are all read for it.
    """

    names: Sequence[str] = ()
    read: Callable[[int], torch.Tensor] | None = None
    content: object = None

    @property
    def inputs(self) -> list[object]:
        """Names and contents."""
        if self.content is not None or self.read is None:
            return [list(self.names), self.content]
        return [list(self.names), [digest(self.read(i)) for i in range(len(self.names))]]


@dataclass(frozen=True)
class Instruments:
    """What a check works with.

    Attributes:
        sample: see :data:`Sample`.
        steps: of one sampling run, for the progress.
        rows: pictures that are sampled together.
        lora: whether the model has something that can be taken off for comparison.
        scores: prompt -> scores by name, of :data:`SCORES`.
        describe: (n, 3, H, W) in [0, 1] -> (n, D), a copy descriptor such as SSCD or CLIP.
        identity: what samples and scores depend on: models, sampler, size; by name, as a
            :class:`~vitrine.engine.jobs.run.Run` takes it.
    """

    sample: Sample
    steps: int
    rows: int = 8
    lora: bool = False
    scores: Callable[[str], Mapping[str, float | None]] | None = None
    describe: Callable[[torch.Tensor], torch.Tensor] | None = None
    identity: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckedPrompt:
    """What became of one prompt.

    Attributes:
        prompt, label: as they came.
        ratios: (S,) each sample's distance to the nearest picture, as a share of the usual one.
        numbers: (S,) which picture that is; without pictures, which other sample.
        areas: (S,) 0..1, how much of the sample is copied.
        similar: (S,) MS-SSIM with it.
        seeds: (S,) of the samples.
        scores: by the names in ``SCORES``; those that were measured.
        file: its sample that is nearest, whole; next to it the overlay.
    """

    prompt: str
    label: str
    ratios: torch.Tensor
    numbers: torch.Tensor
    areas: torch.Tensor
    similar: torch.Tensor
    seeds: Sequence[int]
    scores: Mapping[str, float] = field(default_factory=dict)
    file: Path = Path()

    @property
    def copies(self) -> int:
        """How many samples are copies."""
        return int((self.ratios < THIRD).sum())

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

    def text(self) -> str:
        """The outcome in some lines."""
        back = [p for p in self.ranked if p.copies]
        kind = f"one of {len(self.names)} pictures" if self.names else "each other"
        lines = [f"{len(back)} of {len(self.prompts)} prompts have samples that copy {kind} (below a third of the "
                 f"usual distance {self.level:.3f}, {self.config.seeds} seeds)"]  # fmt: skip
        for p in back[:10]:
            name = f", nearest {self.names[int(p.numbers[p.closest])]}" if self.names else ""
            lines.append(f"{p.copies} of {len(p.ratios)}: {p.prompt[:80]}{name}")
        if self.tau is None:
            lines.append("NeMo's score has no verdict: no threshold was calibrated for this model")
        return "\n".join(lines)


def check_copies(
    prompts: Sequence[str], folder: str | Path, instruments: Instruments, pictures: Pictures = Pictures(),  # noqa: B008
    config: CheckConfig = CHECK, *, labels: Sequence[str] = (), tau: float | None = None, progress: Progress = silent,
) -> CopyCheck:  # fmt: skip
    """Sample every prompt, compare, score; the same call resumes where an interrupted one stopped.

    Args:
        folder: of this check; its samples are kept there.
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
    inputs |= {"descriptor": instruments.describe, "lora": instruments.lora, **instruments.identity}
    with Run(folder, "copy check", inputs, ("state/*/rows.json",)):
        return _Check(prompts, Path(folder), instruments, pictures, config, captions, progress).whole(labels, tau)


class _Check:
    """One call: the tables on disk, and what remains to be sampled."""

    def __init__(
        self, prompts: Sequence[str], folder: Path, instruments: Instruments, pictures: Pictures, config: CheckConfig,
        captions: Sequence[str], progress: Progress,
    ) -> None:  # fmt: skip
        self.prompts, self.folder, self.instruments, self.pictures = prompts, folder, instruments, pictures
        self.config, self.captions, self.progress = config, captions, progress
        self.steps, self.total = 0, 0

    def whole(self, labels: Sequence[str], tau: float | None) -> CopyCheck:
        """Whatever is missing, then all of it."""
        count, width = self.config.seeds, 4 * self.config.seeds + len(SCORES)
        tables = [("usual", (self.config.usual, LENGTH), torch.float16),
                  ("prompts", (len(self.prompts), width), torch.float64)]  # fmt: skip
        usual, rows = (RowFile(self.folder / "state" / n, s, d) for n, s, d in tables)
        with usual, rows:
            missing = int((~usual.done).sum()) + count * int((~rows.done).sum())
            self.total = missing * self.instruments.steps
            self._usual(usual)
            with self._picture_table() as table:
                index = PictureIndex(table, usual.rows(range(self.config.usual)).float().view(-1, 3, SIDE, SIDE))
                for i in range(len(self.prompts)):
                    if not rows.done[i]:
                        rows.write(i, self._checked(i, index)[None])
                names = list(labels) or [""] * len(self.prompts)
                checked = [self._row(i, rows.rows([i])[0], names[i]) for i in range(len(self.prompts))]
                return CopyCheck(checked, list(self.pictures.names), index.level, self.config, tau)

    def _sample(self, prompt: str, seeds: Sequence[int], bare: bool = False) -> torch.Tensor:
        """(n, 3, H, W) in [0, 1], some at a time; each step of each picture counts in the progress."""
        images = []
        for start in range(0, len(seeds), self.instruments.rows):
            part = seeds[start : start + self.instruments.rows]

            def after(step: int, before: int = self.steps, size: int = len(part)) -> None:
                self.progress(min(before + step * size, self.total), self.total, None)

            images.append(self.instruments.sample(prompt, part, bare, after).float().cpu().clamp(0, 1))
            self.steps += len(part) * self.instruments.steps
            self.progress(self.steps, self.total, images[-1][:1])
        return torch.cat(images)

    def _usual(self, table: RowFile) -> None:
        """Samples that have nothing to do with the pictures."""
        for i in (~table.done).nonzero()[:, 0].tolist():
            caption, seed = self.captions[i % len(self.captions)], self.config.first_seed - 1 - i
            table.write(i, thumbnails(self._sample(caption, [seed], self.instruments.lora)).flatten(1))

    def _picture_table(self) -> AbstractContextManager[RowFile | None]:
        """Thumbnails of the training pictures, or nothing."""
        if not self.pictures.names or self.pictures.read is None:
            return nullcontext()
        shape = (len(self.pictures.names), LENGTH)
        table = RowFile(self.folder / "state" / "pictures", shape, torch.float16)
        for i in (~table.done).nonzero()[:, 0].tolist():
            table.write(i, thumbnails(self.pictures.read(i)[None]).flatten(1))
            self.progress(self.steps, self.total, None)
        return table

    def _checked(self, i: int, index: PictureIndex) -> torch.Tensor:
        """(4 S + scores,) numbers of one prompt; its nearest sample and the overlay are written."""
        images = self._sample(self.prompts[i], self._seeds)
        near = index.nearest(thumbnails(images))
        closest = int(near.ratios.argmin())
        _save(self._file(i), images[closest])
        _save(_overlay_file(self._file(i)), overlay(images[closest], near.maps[closest]))
        scores = dict(self.instruments.scores(self.prompts[i])) if self.instruments.scores else {}
        self.progress(self.steps, self.total, None)
        if self.instruments.describe is not None:
            scores["likeness"] = self._likeness(images, near, closest)
        values = [torch.nan if scores.get(name) is None else scores[name] for name in SCORES]
        numbers = torch.tensor([float(v) for v in values if v is not None], dtype=torch.float64)
        parts = (near.ratios, near.numbers, near.areas, near.similar)
        return torch.cat([*(p.double() for p in parts), numbers])

    def _likeness(self, images: torch.Tensor, near: Nearest, closest: int) -> float:
        """Cosine of the descriptors of the nearest sample and its picture."""
        assert self.instruments.describe is not None
        number = int(near.numbers[closest])
        picture = images[number] if self.pictures.read is None else self.pictures.read(number)
        sample, other = (self.instruments.describe(p[None]).float().cpu() for p in (images[closest], picture))
        return float(torch.cosine_similarity(sample, other))

    @property
    def _seeds(self) -> Sequence[int]:
        return range(self.config.first_seed, self.config.first_seed + self.config.seeds)

    def _file(self, i: int) -> Path:
        return self.folder / "samples" / f"{i:06d}.png"

    def _row(self, i: int, row: torch.Tensor, label: str) -> CheckedPrompt:
        count = self.config.seeds
        ratios, numbers, areas, similar = row[: 4 * count].split(count)
        scores = dict(zip(SCORES, row[4 * count :].tolist(), strict=True))
        measured = {name: value for name, value in scores.items() if value == value}
        return CheckedPrompt(self.prompts[i], label, ratios, numbers.long(), areas, similar, self._seeds, measured,
                             self._file(i))  # fmt: skip


def _overlay_file(path: Path) -> Path:
    return path.with_name(f"{path.stem}-where.png")


def _save(path: Path, picture: torch.Tensor) -> None:
    """(3, H, W) in [0, 1] as a PNG, whole or not at all."""
    from PIL import Image

    image = Image.fromarray((picture.movedim(0, -1) * 255).round().byte().numpy())
    write_whole(path, lambda scratch: image.save(scratch, "PNG"))
