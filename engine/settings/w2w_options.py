"""Options of spaces of models: building, sampling, edits, inversions and trainings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from ..errors import refuse
from .option import Option, Options

PAPER_TARGETS = ("to_q", "to_v")
BUILD_MODES = ("auto", "factors", "delta")
ROUTES = ("auto", "gram", "randomised")
PROTECTIONS = ("joint", "official_sequential")
RNGS, ATTRIBUTES = ("vector", "official"), ("auto", "joined", "gaussian")
POSTERIORS = ("mean", "sample")
_MOST = 1000
"""Times the spread of the training models; beyond it numbers overflow."""

Kept = Annotated[int | None, Option("How many to keep.", ge=1, top=100_000, unset=0, unset_doc="all of them")]
"""K, at most N - 1."""
Route = Annotated[
    str,
    Option(
        "gram is exact, for some ten thousand models; randomised for more, with few components; "
        "auto: randomised if the Gram matrix and its eigenvectors do not fit into memory.",
        choices=ROUTES,
        node=False,
    ),
]
Memory = Annotated[
    int,
    Option(
        "Bytes used in addition to the result.",
        ge=2**20,
        node=False,
        remedy="2 GiB suits most folders",
    ),
]


@dataclass(frozen=True)
class PCAConfig(Options):
    """Settings of a principal component analysis."""

    components: Kept = None
    route: Route = "auto"
    memory: Memory = 2 * 2**30
    standardise: Annotated[bool, Option("Divide each number by its deviation, as the paper does.")] = True
    power: Annotated[int, Option("Iterations of the randomised route.")] = 4
    oversample: Annotated[int, Option("Extra vectors of the randomised route.")] = 16
    seed: Annotated[int, Option("Of the randomised route.")] = 0

    def _check(self) -> None:
        """The randomised route needs a number."""
        if self.route == "randomised" and self.components is None:
            raise refuse("components", None, "a number with the randomised route", "1000 is the paper's")


@dataclass(frozen=True)
class BuildConfig(Options):
    """How a space is built. Larger data than ``memory`` go through the work folder."""

    mode: Annotated[
        str,
        Option(
            "factors: LoRAs trained from one start, as in the paper. delta: any LoRAs. auto "
            "tests which, and the report says why.",
            choices=BUILD_MODES,
            remedy="auto chooses and says why",
        ),
    ] = "auto"
    components: Kept = None
    memory: Memory = 2 * 2**30
    route: Route = "auto"
    layers_per_block: Annotated[
        int,
        Option(
            "Resnets per block of the base UNet, to read ldm names: 2 for SD and SDXL.",
            ge=1,
            node=False,
        ),
    ] = 2
    base: Annotated[str, Option("Name of the base model, for the record.")] = ""
    linked: Annotated[
        bool,
        Option(
            "delta: leave the LoRAs' factors in their files, which must then stay; for folders larger than memory.",
            details="One layer of all files is in memory at a time.",
        ),
    ] = False

    def _check(self) -> None:
        """The analysis takes them."""
        PCAConfig(self.components, self.route, self.memory)


@dataclass(frozen=True)
class SampleConfig(Options):
    """How models are sampled.

    Binary attributes (glasses) split the training models into groups, and a Gaussian puts most models between the
    groups, where there are none: ``joined`` takes a random training model's position along all named directions
    together, and samples the rest.
    """

    spread: Annotated[
        float,
        Option(
            "1 varies as the training models do, 0 is their mean.",
            ge=0,
            le=_MOST,
            top=3,
            step=0.05,
        ),
    ] = 1.0
    components: Annotated[
        int | None,
        Option(
            "Sample only this many, from the first.",
            ge=1,
            top=100_000,
            unset=0,
            unset_doc="a third of the number of models",
            details="The others stay at the mean; beyond a third, independent Gaussians are mostly noise.",
        ),
    ] = None
    truncation: Annotated[
        float | None,
        Option(
            "Largest deviation of a number; 2 avoids odd models.",
            gt=0.1,
            top=5,
            step=0.1,
            unset=0.0,
            unset_doc="no bound",
            remedy="2 trims the rarest models",
        ),
    ] = None
    rng: Annotated[
        str,
        Option(
            "vector samples all coefficients at once; official one by one, as in the published code.",
            choices=RNGS,
            node=False,
            remedy="vector is faster",
        ),
    ] = "vector"
    attributes: Annotated[
        str,
        Option(
            "joined: along the named directions as one training model is, the rest sampled. "
            "gaussian: all sampled, as in "
            "the paper. auto: as the space's file says, else joined where there are directions.",
            choices=ATTRIBUTES,
            remedy="joined needs a space with directions",
        ),
    ] = "auto"
    emphasis: Annotated[
        float,
        Option(
            "joined: multiplies what is taken over; 1.5 was best for the shipped people.",
            ge=0,
            le=_MOST,
            top=4,
            step=0.05,
            unset=-1.0,
            unset_doc="as the space's file says, else 1",
        ),
    ] = 1.0
    inherit: Annotated[
        float,
        Option(
            "joined: how much of the rest is the training model's too, a correlation; 0.4 was "
            "best for the shipped people.",
            ge=0,
            lt=1,
            top=0.95,
            step=0.05,
            unset=-1.0,
            unset_doc="as the space's file says, else 0",
            remedy="at 1 it would be the training model",
        ),
    ] = 0.0


@dataclass(frozen=True)
class EditConfig(Options):
    """How sliders act."""

    protect: Annotated[tuple[str, ...], Option("Labels that must not change.")] = ()
    mode: Annotated[
        str,
        Option(
            "How they are protected.",
            choices=PROTECTIONS,
            remedy="joint clears all protected directions",
        ),
    ] = "joint"
    start_timestep: Annotated[
        float,
        Option(
            "Late model in force from this timestep down: 1000 all the time, 700 keeps layout, "
            "400 fine details only, -1 never.",
            ge=-1,
            le=1000,
            step=10,
            details="weights2weights, appendix I.",
            remedy="1000 edits the whole run",
        ),
    ] = 1000.0
    blocks: Annotated[
        tuple[str, ...],
        Option(
            "Prefixes of layer paths that the edit may change, such as ``up_blocks``; none: all.",
        ),
    ] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "protect", tuple(self.protect))
        object.__setattr__(self, "blocks", tuple(self.blocks))
        super().__post_init__()


@dataclass(frozen=True)
class InvertConfig(Options):
    """Settings of an inversion. ``photo()`` and ``out_of_distribution()`` are the paper's two presets.

    Losses on held-out noise select the best coefficients. If a published space lacks a deviation, the prior takes the
    last known one.
    """

    components: Annotated[
        int | None,
        Option(
            "How many, from the first.",
            ge=1,
            top=100_000,
            unset=0,
            unset_doc="all of them",
        ),
    ] = None
    steps: Annotated[int, Option("Adam steps.", ge=1, top=10_000)] = 400
    lr: Annotated[float, Option("Learning rate.", gt=0, bottom=1e-4, top=10, step=0.01)] = 0.1
    batch: Annotated[int, Option("Noise levels a step.", ge=1, top=64, details="One in the paper.")] = 1
    weight_decay: Annotated[
        float,
        Option(
            "L2 in Adam, as in the published code.",
            ge=0,
            node=False,
            remedy="the paper's is 1e-10",
        ),
    ] = 1e-10
    prior: Annotated[
        float,
        Option(
            "Pull towards the mean model; for drawings or hidden faces try 0.001.",
            ge=0,
            top=1,
            step=0.0001,
            details="Weight of mean((beta / sigma)^2); 0 in the paper.",
        ),
    ] = 0.0
    schedule: Annotated[
        str,
        Option(
            "Of the learning rate; constant in the paper.",
            choices=("constant", "cosine"),
            node=False,
        ),
    ] = "constant"
    low: Annotated[int, Option("Lowest timestep that is sampled.", ge=0, node=False)] = 0
    high: Annotated[int, Option("Highest timestep that is sampled.", le=999, node=False)] = 999
    antithetic: Annotated[
        bool,
        Option(
            "Spread a batch's timesteps evenly over the range, which reduces gradient noise.",
            node=False,
        ),
    ] = False
    seed: Annotated[int, Option("Of noise levels and noise.", bottom=0, top=2**32)] = 0
    check_every: Annotated[
        int,
        Option(
            "Steps between measurements of the loss on held-out noise.",
            ge=1,
            node=False,
        ),
    ] = 25
    together: Annotated[bool, Option("All pictures of the batch show one subject: one model for all of them.")] = False
    posterior: Annotated[
        str,
        Option(
            "mean trains on the latents that VAE Encode gives. sample takes new ones at each "
            "step, as the published code does; for VAEs with a Gaussian posterior.",
            choices=POSTERIORS,
        ),
    ] = "mean"

    def _check(self) -> None:
        """The range of timesteps is in order."""
        if self.low >= self.high:
            raise refuse("timesteps", (self.low, self.high), "0 <= low < high <= 999", "0 and 999 are the paper's")

    @classmethod
    def photo(cls) -> InvertConfig:
        """Published settings for real photos: 10,000 components, lr 0.1, 400 steps."""
        return cls(10_000, 400, 0.1, weight_decay=1e-10)

    @classmethod
    def out_of_distribution(cls) -> InvertConfig:
        """Published settings for paintings, cartoons, animals: 1,000 components, lr 1, 800 steps."""
        return cls(1_000, 800, 1.0, weight_decay=0.0)


def preset(name: str) -> InvertConfig:
    """``photo``, ``out_of_distribution``, or ``quick``: fewer steps, larger batches, evenly spread timesteps."""
    presets = {
        "photo": InvertConfig.photo(),
        "out_of_distribution": InvertConfig.out_of_distribution(),
        "quick": replace(InvertConfig.photo(), steps=100, batch=8, antithetic=True, schedule="cosine", lr=1.0),
    }
    if name not in presets:
        raise refuse("preset", name, sorted(presets), "photo is the paper's")
    return presets[name]


@dataclass(frozen=True)
class PairConfig(Options):
    """Training settings of a slider."""

    steps: Annotated[int, Option("Adam steps of 16 pictures.", ge=1, top=10_000)] = 150
    batch: Annotated[int, Option("Pictures in each step.", ge=1, node=False)] = 16
    lr: Annotated[
        float,
        Option(
            "Learning rate; with fewer than 100 steps a larger one, such as 0.3.",
            gt=0,
            bottom=0.001,
            top=2,
            step=0.01,
            details="Of Adam, relative to the RMS of the initial change.",
        ),
    ] = 0.08
    start_timestep: Annotated[float, Option(
        "Timestep from which the slider will act: Apply Person (W2W)'s.", gt=0, le=1000, bottom=1, step=10,
        details="Those below are trained.", remedy="1000 is usual",
    )] = 1000.0  # fmt: skip
    seed: Annotated[int, Option("Of pictures, noise levels and noise.", bottom=0, top=2**32)] = 0
    save_every: Annotated[int, Option("Steps between saved states, if there is a folder.", ge=1, node=False)] = 25


@dataclass(frozen=True)
class LoraTrainConfig(Options):
    """The paper's recipe (its train.sh); usually only ``batch`` and ``steps`` are changed."""

    rank: Annotated[int, Option("LoRA rank; 1 is the paper's.", ge=1)] = 1
    alpha: Annotated[float, Option("The update is scaled by alpha / rank.", gt=0)] = 27.0
    targets: Annotated[tuple[str, ...], Option("Suffixes of module paths.")] = PAPER_TARGETS
    steps: Annotated[int, Option("AdamW steps.", ge=1)] = 800
    batch: Annotated[int, Option("Images per model in each step.", ge=1)] = 1
    lr: Annotated[float, Option("Learning rate.", gt=0)] = 1e-4
    weight_decay: Annotated[float, Option("Of AdamW.", ge=0, remedy="0.01 is the paper's")] = 1e-2
    clip: Annotated[float, Option("Largest gradient norm of one model.", gt=0)] = 1.0
    schedule: Annotated[
        str,
        Option(
            "Of the learning rate: constant as in the paper, or cosine to zero, for short runs.",
            choices=("constant", "cosine"),
        ),
    ] = "constant"
    seed: Annotated[
        int,
        Option(
            "Of the common initialisation and, with the subject's number, of its random numbers.",
        ),
    ] = 0
    weighting: Annotated[
        str,
        Option(
            "Of the loss: uniform as in the paper, on the network's own output, or debiased, by "
            "1 / sqrt(SNR) up to 4 (Yu et al. 2023), as for the portraits model.",
            choices=("uniform", "debiased"),
            details="debiased weights the error in eps for any prediction type, so that a flow's "
            "velocity has weight s (1 - s), small at both ends.",
        ),
    ] = "uniform"

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))
        super().__post_init__()
