"""`vitrine nemo erase`: trains memorized pictures out of the weights, as a LoRA or as a whole UNet.

Heavy imports are in `run`, so settings are plain numbers here; see :class:`EraseConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from ..engine.errors import refuse
from ..engine.io.files import named
from ..engine.io.prompt_files import read_prompts
from ..engine.io.tables import read_records
from ..engine.pipelines.loading import LoadConfig
from ..engine.settings.setting_checks import AtLeast, Count, OutFile, OutFolder
from .nemo_commands import _pipeline
from .options import Load


@dataclass(frozen=True)
class Erase:
    """Train memorized pictures out of a model (DoRI's remedy). The same command resumes.

    Blocking keeps the picture in the weights, where an optimised embedding finds it; verify afterwards with the
    pipeline's `verify` and an empty set of neurons.
    """

    pairs: Positional[Annotated[Path, arg(metavar="PAIRS")]]
    """CSV with the columns prompt and picture; picture paths are relative to the CSV's folder."""
    neurons: tuple[Path, ...]
    """NEURONS files that vitrine nemo find wrote; their union is blocked while surrogates are sampled."""
    ordinary: Path
    """Captions whose pictures must not change, 100 or more: text, one per line, or CSV, TSV, JSON, JSONL."""
    model: str = "portraits"
    """Pipeline folder or hub id of an SD1.x or SD2.x model."""
    out: OutFile = Path("erased.safetensors")
    """A LoRA (rank above 0), or all weights of the UNet."""
    work: OutFolder | None = None
    """Folder for the state of the training; the default is next to the output."""
    rank: Annotated[int, AtLeast(0)] = 0
    """Rank of the LoRA; 0 trains all weights, as published."""
    rounds: Count = 10
    """Attacks on the current weights; each adds one embedding per picture."""
    updates: Count = 30
    """Updates of the weights after each attack."""
    lr: float = 3e-4
    """Adam's highest learning rate."""
    batch: Count = 16
    """Batch rows of each of the two losses per update."""
    attack_steps: Count = 30
    """Steps of each attack."""
    attack_batch: Count = 4
    """Noise samples per step of an attack."""
    keep: Literal["predictions", "noise"] = "predictions"
    """Target for ordinary captions: the original network's predictions, or the noise (published)."""
    seed: int = 0
    """Seed of batches, noise and initialisation."""
    surrogates: Count = 3
    """Samples that replace each picture."""
    first_seed: int = 500
    """Seed of surrogates and ordinary pictures."""
    steps: Count = 30
    """Their sampling steps."""
    guidance: float = 7.5
    """Their guidance scale."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 on success."""
        from ..engine.io.picture_files import open_picture
        from ..engine.nemo import AttackConfig, EraseConfig, NeuronSet
        from ..engine.pipelines.nemo_erase import SurrogateConfig
        from ..engine.runtime.progress import TqdmProgress

        training = EraseConfig(
            self.rounds, self.updates, self.lr, self.batch, self.rank,
            AttackConfig(self.attack_steps, batch=self.attack_batch), keep=self.keep, seed=self.seed,
        )  # fmt: skip
        sources = SurrogateConfig(self.surrogates, self.first_seed, self.steps, self.guidance)
        if not self.neurons:
            raise refuse("NEURONS files", 0, "one or more", "vitrine nemo find writes them")
        prompts, pictures = read_pairs(self.pairs)
        sets = [NeuronSet.load(p) for p in self.neurons]
        work = self.work or self.out.with_suffix(".work")
        opened, union = [open_picture(p) for p in pictures], sets[0].merged(*sets[1:])
        erased = _pipeline(self.model, self.load).erase(
            prompts, opened, read_prompts(self.ordinary)[0], union, training, sources, work, TqdmProgress("updates")
        )  # fmt: skip
        erased.save(self.out)
        kind = f"LoRA of rank {erased.rank}" if erased.rank else "UNet"
        print(f"{len(prompts)} pictures, {training.total} updates -> {self.out} ({kind})")
        return 0


def read_pairs(path: Path) -> tuple[list[str], list[Path]]:
    """Prompts and the paths of their pictures."""
    accepted = "a CSV in UTF-8 with the columns prompt and picture"
    with named(path, "pairs", accepted, "one line per memorized picture"):
        rows = read_records(path, ("prompt", "picture"), "pairs")
        pairs = [(row["prompt"], path.parent / row["picture"]) for row in rows]
    missing = [str(picture) for _, picture in pairs if not picture.is_file()]
    if missing or not pairs:
        raise refuse("pairs", missing[:3] or f"{path.name}, no rows", "pictures that exist", "correct the paths")
    return [prompt for prompt, _ in pairs], [picture for _, picture in pairs]


@dataclass(frozen=True)
class Consensus:
    """Keep the neurons that several searches of one prompt agree on, as one NEURONS file."""

    searches: Positional[Annotated[tuple[Path, ...], arg(metavar="SEARCHES ...")]]
    """NEURONS files of one prompt and model, each searched from other seeds."""
    share: float = 0.5
    """Fraction of the searches that must have kept a neuron."""
    out: OutFile = Path("consensus.json")
    """The NEURONS file."""

    def run(self) -> int:
        """0 on success."""
        from ..engine.nemo import NeuronSet, consensus

        chosen = consensus([NeuronSet.load(p) for p in self.searches], self.share)
        chosen.save(self.out)
        agree, empty = (chosen.info["consensus"][key] for key in ("jaccard", "empty_pairs"))
        pairs = "none kept a neuron" if agree is None else f"pairs agree by {agree:.2f}"
        left_out = f", {empty} of two empty sets left out" if empty and agree is not None else ""
        print(f"{len(chosen)} neurons of {len(self.searches)} searches ({pairs}{left_out}) -> {self.out}")
        return 0


COMMANDS: dict[str, type] = {"erase": Erase, "consensus": Consensus}
