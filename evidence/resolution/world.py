"""The portraits sibling taken from 64 to 128 pixels, with the parts of resolution transfer on and off.

Berrada et al. 2024, Fig. 8, at small scale: the same fine-tuning from the same 64-pixel model, told apart by positions
(grid resampled or extrapolated) and noise schedule (Eq. 3 or as it was). Each arm and seed has a folder with its state,
so a run goes on at the step it was stopped at, and its own curve of Frechet distances.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ...engine.config import Config
from ...engine.errors import refuse
from ...engine.files import write_json
from ...engine.portraits.models import Portraits, load_portraits
from ...engine.progress import Progress, silent
from ...engine.resolution.config import ResolutionTransferConfig
from ...engine.resolution.transfer import apply
from ...engine.schedule import NoiseSchedule
from ..control.controlled_transformer import Sibling, SiblingTrainer, export_sibling
from ..metrics import frechet_distance
from ..portraits.transformer import SiblingData, saved_data

PAPER = "On improved Conditioning Mechanisms (Berrada et al., NeurIPS 2024)"
TRAINED, TARGET = 64, 128
ARMS = {
    "grid-rescaled": ("relabel", "grid"),
    "extrapolated-rescaled": ("relabel", "extrapolate"),
    "grid-plain": ("none", "grid"),
}
"""Name -> (schedule, positions) of the training and of the sampling."""
LADDER = (0, 50, 100, 200, 400, 800, 1600, 3200, 6400)
FIRST = 8_000_000
"""First scene of the prompts drawn from; those of the reference follow."""

Curve = dict[int, float]
"""Step -> Frechet distance."""
Curves = dict[str, dict[int, Curve]]
"""Arm -> seed -> curve."""
Bars = Callable[[str], Progress]


@dataclass(frozen=True)
class TransferConfig(Config):
    """Settings that all arms and seeds share.

    Attributes:
        source: the 64-pixel sibling, a shipped one's name or a folder.
        batch, lr, ema: pictures of an update, constant rate of Adam, rate of the average that is measured.
        pictures: training pictures of 128 px, rendered once.
        samples: pictures a Frechet distance is measured on. sampler_steps, guidance: of drawing them.

    Raises:
        VitrineError: numbers outside their range.
    """

    source: str = "power-cosine"
    batch: int = 8
    lr: float = 5e-4
    ema: float = 0.995
    pictures: int = 2048
    samples: int = 250
    sampler_steps: int = 20
    guidance: float = 1.0

    def __post_init__(self) -> None:
        least = {"batch": 1, "pictures": 1, "samples": 2, "sampler_steps": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise refuse(name, getattr(self, name), f"{low} or more", "see TransferConfig for the defaults")
        if not self.lr > 0 or not 0 <= self.ema < 1 or not self.guidance >= 0:
            given = (self.lr, self.ema, self.guidance)
            raise refuse("lr, ema, guidance", given, "lr > 0, 0 <= ema < 1, guidance >= 0", "see the defaults")


def points(steps: int) -> list[int]:
    """Steps at which a run of so many is measured: a ladder that longer runs share, and the last."""
    return sorted({p for p in LADDER if p <= steps} | {steps})


def transfer_of(arm: str) -> ResolutionTransferConfig:
    """What an arm does to the 64-pixel model at 128 pixels.

    Raises:
        VitrineError: no such arm.
    """
    if arm not in ARMS:
        raise refuse("arm", arm, sorted(ARMS), "name one of them")
    schedule, positions = ARMS[arm]
    # override: the arm is the very training that makes relabelling right
    return ResolutionTransferConfig(
        (TARGET, TARGET), (TRAINED, TRAINED), schedule=schedule, pos_embed=positions, override=True
    )


# --- measuring ----------------------------------------------------------------------------------------------------
class Judge:
    """Frechet distance of readout features between pictures drawn at 128 px and renders of other scenes at 128 px.

    The readout sees 64 px, so both are reduced by area: what is judged is what is in the picture, not its finest
    detail. Prompts and seeds are the same for every arm, seed and step.
    """

    def __init__(self, config: TransferConfig) -> None:
        from ...engine.portraits import caption, render, sample_scenes
        from ...engine.portraits.readout import load_readout

        self.config, self._net = config, load_readout()
        self.prompts = caption(sample_scenes(range(FIRST, FIRST + config.samples)))
        others = [FIRST + config.samples + i for i in range(2 * config.samples)]
        chunks = (others[i : i + 64] for i in range(0, len(others), 64))
        self._real = torch.cat([self._features(render(sample_scenes(c), TARGET).images) for c in chunks])

    def _features(self, images: torch.Tensor) -> torch.Tensor:
        from ...engine.portraits.readout import read

        return read(self._net, functional.interpolate(images, (TRAINED, TRAINED), mode="area")).features

    def __call__(self, sibling: Sibling) -> float:
        """Of a sibling as it stands."""
        how = {"steps": self.config.sampler_steps, "guidance": self.config.guidance, "side": TARGET}
        images = sibling.draw(self.prompts, list(range(len(self.prompts))), **how, batch=25)  # type: ignore[arg-type]
        return round(frechet_distance(self._features(images), self._real), 3)


# --- training -----------------------------------------------------------------------------------------------------
@dataclass
class _Parts:
    """What all arms and seeds share; the judge is made when first asked for."""

    config: TransferConfig
    folder: Path
    portraits: Portraits
    data: SiblingData
    null: torch.Tensor

    @classmethod
    def open(cls, folder: Path, config: TransferConfig, progress: Progress = silent) -> _Parts:
        portraits = load_portraits()
        data = saved_data(folder / "pictures.safetensors", portraits, config.pictures, TARGET, progress)
        with torch.no_grad():
            null = portraits.encode([""])[0].clone()
        return cls(config, folder, portraits, data, null)

    def trainer(self, sibling: Sibling, arm: str, seed: int) -> SiblingTrainer:
        """Inside the arm's transfer: the schedule is the scheduler's as it stands."""
        from ...engine.control import ControlTrainConfig

        config = self.config
        forever = LADDER[-1]  # the rate is constant, so that a longer run is the same run
        settings = ControlTrainConfig(
            forever, config.batch, config.lr, (0.9, 0.95), config.ema, gamma=sibling.gamma, seed=seed
        )
        sibling.transformer.train().requires_grad_(True)
        sibling.embedder.float().train().requires_grad_(True)
        schedule = NoiseSchedule.from_diffusers(sibling.scheduler)
        return SiblingTrainer(
            sibling.transformer, sibling.embedder, self.data, self.null, schedule, settings,
            run_folder(self.folder, arm, seed), decay_from=forever, warmup=10,
        )  # fmt: skip


def run_folder(folder: Path, arm: str, seed: int) -> Path:
    """Where an arm's state and curve of one seed lie."""
    return folder / f"{arm}-{seed}"


def transfer(
    folder: str | Path, seeds: Sequence[int], steps: int, config: TransferConfig | None = None,
    arms: Sequence[str] = tuple(ARMS), until: int | None = None, progress: Bars = lambda name: silent,
) -> Curves:  # fmt: skip
    """Train and measure every arm under every seed; the same call goes on where it was stopped, or further.

    Args:
        steps: updates of each run. until: stop there (state saved).

    Returns:
        The curves so far, also those of earlier calls in this folder.

    Raises:
        VitrineError: an unknown arm, or a folder of other settings.
    """
    folder, config = Path(folder), config or TransferConfig()
    if not 1 <= steps <= LADDER[-1]:
        raise refuse("steps", steps, f"1 to {LADDER[-1]}", "choose a number of updates")
    for arm in arms:
        transfer_of(arm)
    _settle(folder, config)
    parts, judge = _Parts.open(folder, config, progress("pictures")), Judge(config)
    for seed in seeds:
        for arm in arms:
            _run(parts, judge, arm, seed, steps, until or steps, progress(f"{arm} {seed}"))
    curves = read_curves(folder)
    write_json(folder / "curves.json", to_json(curves, config))
    return curves


def _run(parts: _Parts, judge: Judge, arm: str, seed: int, steps: int, until: int, bar: Progress) -> None:
    sibling = Sibling.open(parts.config.source, parts.portraits)
    path = run_folder(parts.folder, arm, seed) / "curve.json"
    curve: Curve = _curve(path)
    with apply(sibling, transfer_of(arm)):
        trainer = parts.trainer(sibling, arm, seed)
        for stop in points(steps):
            if stop in curve or stop < trainer.done:
                continue
            while trainer.done < min(stop, until):
                trainer.step()
                bar(trainer.done, steps, None)
                if trainer.done % 50 == 0:
                    trainer.save()
            trainer.save()
            if trainer.done < stop:
                return
            with trainer.averaged():
                # Before the first step the seeds do not differ yet.
                known = [c[0] for c in _seeds(parts.folder, arm).values() if 0 in c] if stop == 0 else []
                curve[stop] = known[0] if known else judge(sibling)
            write_json(path, {str(k): v for k, v in sorted(curve.items())})


def export(folder: str | Path, out: str | Path, arm: str = "grid-rescaled", seed: int = 0) -> Path:
    """The averaged model of one run as a sibling's folder ``out``: transformer, control file, scheduler.

    Raises:
        VitrineError: no such run, or positions that the model would not compute by itself when loaded.
    """
    folder, out = Path(folder), Path(out)
    if not (run_folder(folder, arm, seed) / "state.safetensors").is_file():
        raise refuse("run", str(run_folder(folder, arm, seed)), "one with a state", "`vitrine resolution transfer`")
    mode, positions = ARMS[arm]
    if positions != "grid":
        raise refuse("arm", arm, "one with resampled positions", "a model of another table needs apply() to load")
    config = TransferConfig.from_dict(_settings(folder))
    parts = _Parts.open(folder, config)
    sibling = Sibling.open(config.source, parts.portraits)
    with apply(sibling, transfer_of(arm)):
        trainer = parts.trainer(sibling, arm, seed)
        schedule = {"kind": "scaled_linear", "T": 1000, "s_pre": TRAINED, "s_now": TARGET, "mode": mode}
        base = {"mode": "grid", "align": "step", "base": sibling.transformer.config.sample_size // 2}
        export_sibling(trainer, out.parent, out.name, schedule, base)
        sibling.scheduler.save_pretrained(out)
    return out


# --- files --------------------------------------------------------------------------------------------------------
def read_curves(folder: str | Path) -> Curves:
    """Of a run's folder, or of a file that :func:`transfer` wrote.

    Raises:
        VitrineError: neither.
    """
    path = Path(folder)
    if path.is_file():
        table = json.loads(path.read_text(encoding="utf-8"))["curves"]
        return {a: {int(s): {int(k): float(v) for k, v in c.items()} for s, c in t.items()} for a, t in table.items()}
    found = {arm: _seeds(path, arm) for arm in ARMS}
    found = {arm: seeds for arm, seeds in found.items() if seeds}
    if not found:
        raise refuse("curves", str(path), "a folder or a file of `vitrine resolution transfer`", "run it first")
    return found


def to_json(curves: Curves, config: TransferConfig) -> dict[str, Any]:
    """What ``curves.json`` holds."""
    return {"settings": config.to_dict(), "curves": curves}


def _seeds(folder: Path, arm: str) -> dict[int, Curve]:
    found = {int(p.parent.name.rsplit("-", 1)[1]): _curve(p) for p in folder.glob(f"{arm}-*/curve.json")}
    return dict(sorted(found.items()))


def _curve(path: Path) -> Curve:
    if not path.is_file():
        return {}
    return {int(k): float(v) for k, v in json.loads(path.read_text(encoding="utf-8")).items()}


def _settings(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "settings.json").read_text(encoding="utf-8"))


def _settle(folder: Path, config: TransferConfig) -> None:
    """One folder, one set of settings."""
    path = folder / "settings.json"
    if path.is_file() and _settings(folder) != config.to_dict():
        accepted = f"those of {folder.name}: {_settings(folder)}"
        raise refuse("settings", config.to_dict(), accepted, "choose a new folder")
    write_json(path, config.to_dict())


# --- reading curves -----------------------------------------------------------------------------------------------
def mean_curve(seeds: Mapping[int, Curve]) -> Curve:
    """Mean over seeds at the steps all of them have."""
    steps = sorted(set.intersection(*(set(c) for c in seeds.values())))
    return {s: sum(c[s] for c in seeds.values()) / len(seeds) for s in steps}


def steps_to_reach(curve: Curve, level: float) -> float | None:
    """First step at which a curve, straight between its points, is at ``level`` or below; None if it never is."""
    steps = sorted(curve)
    for last, now in zip([None, *steps], steps, strict=False):
        if curve[now] <= level:
            if last is None:
                return float(now)
            return last + (now - last) * (curve[last] - level) / (curve[last] - curve[now])
    return None
