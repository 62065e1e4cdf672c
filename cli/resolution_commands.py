"""`vitrine resolution transfer | export | tune`: portraits models at larger sizes. Imports are in `run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..engine.settings.setting_checks import Count, OutFolder


@dataclass(frozen=True)
class Transfer:
    """Fine-tune the 64-pixel transformer at 128 pixels, each part of the transfer on and off; the same command resumes.

    Frechet distances at steps 0, 50, 100, 200, 400, ... are stored in FOLDER/ARM-SEED/curve.json and, together, in
    FOLDER/curves.json, which `vitrine reproduce resolution.transfer --model FOLDER` reads.
    """

    folder: OutFolder = Path("portraits-128")
    """Folder for pictures, states and curves."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of every arm per seed."""
    arms: tuple[str, ...] = ()
    """grid-rescaled, extrapolated-rescaled, grid-plain; none means all."""
    steps: Count = 400
    """Updates per run."""
    source: str = "power-cosine"
    """The 64-pixel model: a shipped one or a folder."""
    batch: Count = 8
    """Batch size."""
    lr: float = 5e-4
    """Learning rate, constant."""
    ema: float = 0.995
    """Decay of the averaged weights, which are measured."""
    pictures: Count = 2048
    """Training pictures, rendered and encoded first."""
    samples: Count = 250
    """Pictures per Frechet distance."""
    guidance: float = 1.0
    """Guidance scale of these; 1 is none and costs half."""
    stop_after: int | None = None
    """Stop each run after this many updates (the state is saved)."""
    device: str = ""
    """cpu, cuda, cuda:1, mps ...; none: an accelerator if there is one."""

    def run(self) -> int:
        """0 when finished."""
        from ..engine.pipelines.loading import LoadConfig
        from ..engine.portraits.shipped import transformer_folder
        from ..engine.runtime.stages import Stages
        from ..evidence.resolution.curves import mean_curve
        from ..evidence.resolution.transfer_training import ARMS, TransferConfig, transfer

        transformer_folder(self.source)  # raises before the pictures are rendered
        config = TransferConfig(
            self.source, self.batch, self.lr, self.ema, self.pictures, self.samples, guidance=self.guidance
        )
        arms, device = self.arms or tuple(ARMS), LoadConfig(self.device).checked_place
        runs = [f"{arm} {seed}" for seed in self.seeds for arm in arms]
        stages = Stages(dict.fromkeys(["pictures", *runs]))
        curves = transfer(self.folder, self.seeds, self.steps, config, arms, self.stop_after, stages.bar, device)
        for arm, seeds in curves.items():
            distances = "  ".join(f"{step}: {fid:.2f}" for step, fid in mean_curve(seeds).items())
            print(f"{arm:<24} seeds {list(seeds)}  FID {distances}")
        print(f"curves: {self.folder / 'curves.json'}")
        return 0


@dataclass(frozen=True)
class Export:
    """Save the model of one run as a transformer that loads by folder, in half precision."""

    folder: Path = Path("portraits-128")
    """The folder of `vitrine resolution transfer`."""
    out: OutFolder = Path("power-cosine-128")
    """Folder to write; the shipped one is engine/portraits/weights/transformer/power-cosine-128."""
    arm: str = "grid-rescaled"
    """Which arm."""
    seed: int = 0
    """Which seed."""

    def run(self) -> int:
        """0 when written."""
        from ..evidence.resolution.transfer_training import export

        print(f"model: {export(self.folder, self.out, self.arm, self.seed)}")
        return 0


@dataclass(frozen=True)
class Tune:
    """Fine-tune the flow portraits at 256 px with a LoRA, rotary positions scaled; the same command resumes.

    `vitrine reproduce resolution.tuned --model FOLDER` measures such runs.
    """

    folder: OutFolder = Path("portraits-256")
    """Folder for the training pictures and a subfolder per run."""
    positions: str = "rope_yarn"
    """keep, rope_pi, rope_ntk or rope_yarn."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run per seed."""
    steps: Count = 200
    """Updates per run."""
    rank: Count = 16
    """Rank of the LoRA."""
    batch: Count = 4
    """Batch size."""
    lr: float = 1e-3
    """Highest learning rate; it falls to zero at the end."""
    pictures: Count = 128
    """Training pictures, rendered and encoded first."""
    stop_after: int | None = None
    """Stop each run after this many updates (the state is saved)."""
    device: str = ""
    """cpu, cuda, cuda:1, mps ...; none: an accelerator if there is one."""

    def run(self) -> int:
        """0 when finished."""
        from ..engine.pipelines.loading import LoadConfig
        from ..engine.runtime.progress import TqdmProgress
        from ..evidence.resolution.tuned import TuneConfig, tune

        device = LoadConfig(self.device).checked_place
        for seed in self.seeds:
            config = TuneConfig(self.positions, self.rank, self.batch, self.lr, self.steps, self.pictures, seed)
            tune(self.folder, config, self.stop_after, TqdmProgress(f"{self.positions} {seed}"), device)
        print(f"states: {self.folder}")
        return 0


COMMANDS: dict[str, type] = {"transfer": Transfer, "export": Export, "tune": Tune}
