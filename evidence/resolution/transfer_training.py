"""Fine-tunes the portraits transformer from 64 to 128 pixels, with the parts of resolution transfer on and off.

Berrada et al. 2024, Fig. 8, at small scale: the same fine-tuning from the same 64-pixel model, in arms that differ in
positions (grid resampled or extrapolated) and noise schedule (Eq. 3 or unchanged). Each arm and seed has a folder with
its state, from which it resumes, and its curve of Frechet distances.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ...engine.control.control_trainer import AdvancedControlTrainConfig, ControlTrainConfig
from ...engine.errors import refuse
from ...engine.io.files import write_json
from ...engine.portraits.models import Portraits, load_portraits
from ...engine.resolution.transfer import apply
from ...engine.resolution.transfer_config import ResolutionTransferConfig
from ...engine.runtime.progress import Progress, silent
from ...engine.settings.config import Config
from ..control.controlled_transformer import ControlledTransformer, TransformerTrainer, export_transformer
from ..metrics import frechet_distance
from ..portraits.transformer import TransformerData, saved_data
from .curves import ARMS, Curves, curves_by_seed, read_curve, read_curves, run_folder, write_curve

PAPER = "On improved Conditioning Mechanisms (Berrada et al., NeurIPS 2024)"
TRAINED_SIDE, TARGET_SIDE = 64, 128
LADDER = (0, 50, 100, 200, 400, 800, 1600, 3200, 6400)
FIRST_SCENE = 8_000_000
"""First scene of the prompts; the reference scenes follow."""

Bars = Callable[[str], Progress]


@dataclass(frozen=True)
class TransferConfig(Config):
    """Settings shared by all arms and seeds.

    Attributes:
        source: the 64-pixel transformer, a shipped one's name or a folder.
        batch, lr, ema: images per update, constant learning rate of Adam, decay of the measured average.
        pictures: training images of 128 px, rendered once.
        samples: images per Frechet distance. sampler_steps, guidance: of their sampling.
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
            numbers = (self.lr, self.ema, self.guidance)
            raise refuse("lr, ema, guidance", numbers, "lr > 0, 0 <= ema < 1, guidance >= 0", "see the defaults")


def points(steps: int) -> list[int]:
    """Steps at which a run is measured: a fixed series, and the last step."""
    return sorted({p for p in LADDER if p <= steps} | {steps})


def transfer_of(arm: str) -> ResolutionTransferConfig:
    """The transfer of an arm, from 64 to 128 pixels."""
    if arm not in ARMS:
        raise refuse("arm", arm, sorted(ARMS), "name one of them")
    schedule, positions = ARMS[arm]
    # override: the arm is the training for which relabelling is right
    return ResolutionTransferConfig(
        (TARGET_SIDE, TARGET_SIDE), (TRAINED_SIDE, TRAINED_SIDE), schedule=schedule, pos_embed=positions, override=True
    )


# --- measuring ----------------------------------------------------------------------------------------------------
class Judge:
    """Frechet distance of classifier features between samples at 128 px and renders of other scenes at 128 px.

    The classifier's input is 64 px, so both are area-averaged: the metric is about content, not the finest
    detail. Prompts and seeds are the same for every arm, seed and step.
    """

    def __init__(self, config: TransferConfig) -> None:
        from ...engine.portraits import caption, render, sample_scenes
        from ..portraits.classifier import load_classifier

        self.config, self._net = config, load_classifier()
        self.prompts = caption(sample_scenes(range(FIRST_SCENE, FIRST_SCENE + config.samples)))
        others = [FIRST_SCENE + config.samples + i for i in range(2 * config.samples)]
        chunks = (others[i : i + 64] for i in range(0, len(others), 64))
        self._real = torch.cat([self._features(render(sample_scenes(c), TARGET_SIDE).images) for c in chunks])

    def _features(self, images: torch.Tensor) -> torch.Tensor:
        from ..portraits.classifier import read

        return read(self._net, functional.interpolate(images, (TRAINED_SIDE, TRAINED_SIDE), mode="area")).features

    def __call__(self, model: ControlledTransformer) -> float:
        """The distance of a model's current weights."""
        images = model.draw(
            self.prompts,
            list(range(len(self.prompts))),
            steps=self.config.sampler_steps,
            guidance=self.config.guidance,
            side=TARGET_SIDE,
            batch=25,
        )
        return round(frechet_distance(self._features(images), self._real), 3)


# --- training -----------------------------------------------------------------------------------------------------
@dataclass
class _Shared:
    """State shared by all arms and seeds."""

    config: TransferConfig
    folder: Path
    portraits: Portraits
    data: TransformerData
    device: torch.device | None = None

    @classmethod
    def open(
        cls, folder: Path, config: TransferConfig, progress: Progress = silent, device: torch.device | None = None
    ) -> _Shared:
        portraits = load_portraits()
        data = saved_data(folder / "pictures.safetensors", portraits, config.pictures, TARGET_SIDE, progress)
        return cls(config, folder, portraits, data, device)

    def model(self) -> ControlledTransformer:
        """A new copy of the 64-pixel transformer, on the training device."""
        model = ControlledTransformer.open(self.config.source, self.portraits)
        return model if self.device is None else model.to(self.device)

    def trainer(self, model: ControlledTransformer, arm: str, seed: int) -> TransformerTrainer:
        """A trainer inside the arm's transfer, with the current scheduler's schedule."""
        config = self.config
        forever = LADDER[-1]  # the rate is constant, so that a longer run is a continuation
        advanced = AdvancedControlTrainConfig(betas=(0.9, 0.95), ema=config.ema, drop_together=False, save_every=50)
        settings = ControlTrainConfig(forever, config.batch, config.lr, gamma=model.gamma, seed=seed, advanced=advanced)
        return TransformerTrainer(model, self.data, settings, run_folder(self.folder, arm, seed), forever, warmup=10)


def transfer(
    folder: str | Path,
    seeds: Sequence[int],
    steps: int,
    config: TransferConfig | None = None,
    arms: Sequence[str] = tuple(ARMS),
    until: int | None = None,
    progress: Bars = lambda name: silent,
    device: torch.device | None = None,
) -> Curves:
    """Trains and measures every arm with every seed; the same call resumes or continues.

    Args:
        steps: updates per run. until: stop after this step (state saved).
        device: of training and sampling; None is the CPU.

    Returns:
        The curves so far, also those of earlier calls in this folder.
    """
    folder, config = Path(folder), config or TransferConfig()
    if not 1 <= steps <= LADDER[-1]:
        raise refuse("steps", steps, f"1 to {LADDER[-1]}", "choose a number of updates")
    for arm in arms:
        transfer_of(arm)
    _settle(folder, config)
    shared, judge = _Shared.open(folder, config, progress("pictures"), device), Judge(config)
    for seed in seeds:
        for arm in arms:
            _run(shared, judge, arm, seed, steps, steps if until is None else until, progress(f"{arm} {seed}"))
    curves = read_curves(folder)
    write_json(folder / "curves.json", {"settings": config.to_dict(), "curves": curves})
    return curves


def _run(shared: _Shared, judge: Judge, arm: str, seed: int, steps: int, until: int, bar: Progress) -> None:
    model = shared.model()
    folder = run_folder(shared.folder, arm, seed)
    curve = read_curve(folder)
    with apply(model, transfer_of(arm)):
        trainer = shared.trainer(model, arm, seed)
        for stop in points(steps):
            if stop in curve or stop < trainer.done:
                continue
            trainer.train(bar, min(stop, until), steps)
            if trainer.done < stop:
                return
            with trainer.averaged():
                # Before the first step the seeds do not differ yet.
                starts = [c[0] for c in curves_by_seed(shared.folder, arm).values() if 0 in c] if stop == 0 else []
                curve[stop] = starts[0] if starts else judge(model)
            write_curve(folder, curve)


def export(folder: str | Path, out: str | Path, arm: str = "grid-rescaled", seed: int = 0) -> Path:
    """Writes the averaged model of one run to the folder ``out``: transformer, control file, scheduler."""
    folder, out = Path(folder), Path(out)
    if not (run_folder(folder, arm, seed) / "state.safetensors").is_file():
        raise refuse(
            "run",
            str(run_folder(folder, arm, seed)),
            "one with a state",
            "the recipe `transfer`",
        )
    mode, positions = ARMS[arm]
    if positions != "grid":
        raise refuse("arm", arm, "one with resampled positions", "a model of another table needs apply() to load")
    shared = _Shared.open(folder, TransferConfig.from_dict(_settings(folder)))
    model = shared.model()
    with apply(model, transfer_of(arm)):
        trainer = shared.trainer(model, arm, seed)
        schedule = {"kind": "scaled_linear", "T": 1000, "s_pre": TRAINED_SIDE, "s_now": TARGET_SIDE, "mode": mode}
        base = {"mode": "grid", "align": "step", "base": model.transformer.config.sample_size // 2}
        export_transformer(trainer, out.parent, out.name, schedule, base)
        model.scheduler.save_pretrained(out)
    return out


# --- settings of a folder -----------------------------------------------------------------------------------------
def _settings(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "settings.json").read_text(encoding="utf-8"))


def _settle(folder: Path, config: TransferConfig) -> None:
    """Checks or stores the settings of a folder."""
    path = folder / "settings.json"
    if path.is_file() and _settings(folder) != config.to_dict():
        accepted = f"those of {folder.name}: {_settings(folder)}"
        raise refuse("settings", config.to_dict(), accepted, "choose a new folder")
    write_json(path, config.to_dict())
