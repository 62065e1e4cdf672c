"""Each method of each pipeline once on a full-size checkpoint that diffusers read from the single file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
from vitrine.engine import pipelines
from vitrine.engine.activations.ranking import RankingConfig
from vitrine.engine.control import (
    ControlCheckpoint,
    ControlEmbedder,
    ControlMetadata,
    ControlSpec,
    GammaConfig,
    GuidanceConfig,
    SizeCondition,
    control_width,
    load_control,
    save_control,
)
from vitrine.engine.nemo import NeuronSet, ProbeConfig, SearchConfig
from vitrine.engine.pipelines.loading import LoadConfig, load_pipeline
from vitrine.engine.pipelines.nemo_jobs import verify_blocking
from vitrine.engine.resolution import ResolutionTransferConfig
from vitrine.engine.settings.ranking_options import FilterRule
from vitrine.engine.w2w import BuildConfig, EditConfig, InvertConfig, WeightSpace, build_space, with_directions
from vitrine_tests.full_size.material import CLASSES, checkpoint, configuration, loras, pictures
from vitrine_tests.full_size.scene import CAPTIONS, PLACE, PROMPT, SELECTION, VALUES

Tensors = list[torch.Tensor]
CASES: dict[tuple[str, str], Callable[[Loaded], Tensors]] = {}
"""(pipeline or method, family) -> run."""


def case(name: str, families: tuple[str, ...] = ("sd15",)) -> Callable:
    """Keeps a run for its families under the name of the pipeline's class or method."""

    def keep(run: Callable[[Loaded], Tensors]) -> Callable[[Loaded], Tensors]:
        for family in families:
            CASES[name, family] = run
        return run

    return keep


class Loaded:
    """A checkpoint as ``from_single_file`` gives it, without a hub."""

    def __init__(self, family: str, folder: Path, side: int) -> None:
        self.family, self.folder, self.side = family, folder, side
        settings = LoadConfig(device="cpu", dtype="float16", config=str(configuration(family)))
        self.pipe = load_pipeline(str(checkpoint(family)), getattr(diffusers, CLASSES[family]), settings)
        for name, part in self.pipe.components.items():
            if isinstance(part, torch.nn.Module) and (family == "sd15" or name != "unet"):
                part.float()
        if family == "sdxl":
            store_in_half(self.pipe.unet)
        self.pipe.unet.register_to_config(sample_size=side // 8)  # what methods that are told no size draw
        self.pipe.set_progress_bar_config(disable=True)
        images, self.masks = pictures(4, side)
        self.images = images.permute(0, 3, 1, 2)

    def of(self, name: str) -> Any:
        """A pipeline of the pack around the loaded models."""
        around = name == "NEMO" and self.family == "sdxl"
        size = {"size": (self.side, self.side)} if around else {}  # of scores; SDXL's own is 1024 px
        made = getattr(pipelines, f"{name}Pipeline").from_pipe(self.pipe, **size)
        made.set_progress_bar_config(disable=True)
        return made

    @property
    def told(self) -> dict[str, Any]:
        """Two small steps to a latent."""
        size = {"height": self.side, "width": self.side}
        return {"num_inference_steps": 2, "output_type": "latent", **size}

    @functools.cached_property
    def statistics(self) -> Any:
        return self.of("NEMO").calibrate(CAPTIONS.splitlines(), ["statistics"])

    @functools.cached_property
    def neurons(self) -> NeuronSet:
        return NeuronSet({VALUES: tuple(range(40))}, self.statistics.statistics.fingerprint)

    @functools.cached_property
    def space(self) -> WeightSpace:
        loras(self.family, self.folder / "people")
        space = build_space(self.folder / "people", BuildConfig(), work=self.folder / "work").space
        return with_directions(space, {"slider": torch.ones(space.components.shape[0]) / 2})


def store_in_half(unet: Any) -> None:
    """Weights in float16, computing in float32, by diffusers' own hooks; it leaves the norms as they are."""
    for module in unet.modules():
        if isinstance(module, (torch.nn.GroupNorm, torch.nn.LayerNorm)):
            module.float()
    unet.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)


@contextmanager
def in_bfloat16(pipe: Any) -> Iterator[None]:
    """Inside, a UNet that hooks keep in half precision is a copy in bfloat16: gradients need weights that stay."""
    hooked = pipe.unet
    if not any(hasattr(m, "_diffusers_hook") for m in hooked.modules()):
        yield
        return
    with torch.device("meta"):
        plain = type(hooked).from_config(hooked.config)
    weights = {name: value.to(torch.bfloat16) for name, value in hooked.state_dict().items()}
    plain.load_state_dict(weights, assign=True)
    pipe.unet = plain.eval().requires_grad_(False)
    try:
        yield
    finally:
        pipe.unet = hooked


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


BOTH = ("sd15", "sdxl")


# --- activations --------------------------------------------------------------------------------------------------
@case("ActivationTapPipeline", families=BOTH)
def tap(s: Loaded) -> Tensors:
    out = s.of("ActivationTap").tap(s.images[:2], PROMPT, preset=SELECTION[s.family], output_type="none")
    return [a.tensor for a in out.activations.values()]


@case("CorrespondencePipeline", families=BOTH)
def correspondence(s: Loaded) -> Tensors:
    (found,) = s.of("Correspondence").match(
        s.images[:1], s.images[1:2], [[0.5, 0.5], [0.2, 0.7]], PROMPT, addresses=PLACE
    )
    return [found.points, found.similarity]


@case("SegmentationPipeline", families=BOTH)
def segmentation(s: Loaded) -> Tensors:
    masks = s.masks[:2].long()
    return [s.of("Segmentation").segment(s.images[:2], masks, s.images[2:], PROMPT, addresses=PLACE).float()]


@case("SegmentationPipeline.rank", families=BOTH)
def rank(s: Loaded) -> Tensors:
    places = "up-level1-repeat0-vit-block0-*"
    rule = FilterRule(None, None, (None, None))  # random weights have no better and worse places
    ranking = s.of("Segmentation").rank(
        s.images, s.masks.long(), PROMPT, config=RankingConfig(places, rule=rule, most=2)
    )
    return [torch.tensor([[p.noise, p.granularity, p.locality] for p in ranking.properties.values()])]


# --- NEMO ---------------------------------------------------------------------------------------------------------
PROBE = ProbeConfig(seeds=4)  # of fewer, random weights make none agree


@case("NEMOPipeline", families=BOTH)
def nemo_call(s: Loaded) -> Tensors:
    return [s.of("NEMO")(PROMPT, neurons=s.neurons, generator=generator(), **s.told).images]


@case("NEMOPipeline.detect", families=BOTH)
def nemo_score(s: Loaded) -> Tensors:
    return [torch.tensor([x.value for x in s.of("NEMO").detect([PROMPT, "a hat"], None, "one step", PROBE)])]


@case("NEMOPipeline.calibrate")
def nemo_calibrate(s: Loaded) -> Tensors:
    made = s.of("NEMO").calibrate(CAPTIONS.splitlines()[:2], ["statistics", "score"], probe=PROBE)
    return [*made.statistics.means.values(), torch.tensor(made.score.tau)]


@case("NEMOPipeline.find")
def nemo_find(s: Loaded) -> Tensors:
    config = SearchConfig(tau=0.01, effect_fraction=0.001, k_step=50, mode="fast")
    (found,) = s.of("NEMO").find([PROMPT], s.statistics, config, PROBE)
    return [torch.tensor(found.before.value)]


@case("nemo_jobs.verify_blocking")
def nemo_verify(s: Loaded) -> Tensors:
    found = verify_blocking(s.of("NEMO"), PROMPT, s.neurons, 0.5, None, PROBE)
    return [torch.tensor([found.untouched.value, found.blocked.value])]


# --- W2W ----------------------------------------------------------------------------------------------------------
@case("W2WPipeline", families=BOTH)
def w2w_call(s: Loaded) -> Tensors:
    pipe = s.of("W2W")
    told = {"space": s.space, "model": pipe.sample_models(s.space, [0]), "edits": {"slider": 2.0}}
    return [pipe(PROMPT, **told, edit_config=EditConfig(start_timestep=600), seeds=[3], **s.told).images]


@case("W2WPipeline.models")
def w2w_models(s: Loaded) -> Tensors:
    pipe = s.of("W2W")
    person = pipe.sample_models(s.space, [0])
    edited = pipe.edit_model(s.space, person, {"slider": 1.0})
    return [edited.coefficients, pipe.blend_models(s.space, [person, edited]).coefficients]


@case("W2WPipeline.invert_image", families=BOTH)
def w2w_invert(s: Loaded) -> Tensors:
    small, _ = pictures(1, 128)
    config = InvertConfig(steps=2, batch=1, check_every=1000)
    with in_bfloat16(s.pipe):
        model, _ = s.of("W2W").invert_image(s.space, small.permute(0, 3, 1, 2), PROMPT, config)
    return [model.coefficients]


# --- EMD ----------------------------------------------------------------------------------------------------------
@case("EMDOneStepPipeline", families=BOTH)
def emd_one_step(s: Loaded) -> Tensors:
    return [s.of("EMDOneStep")(PROMPT, [0], output_type="latent").images]


# --- control, resolution ------------------------------------------------------------------------------------------
def _checkpoint(s: Loaded) -> ControlCheckpoint:
    torch.manual_seed(3)
    made = ControlEmbedder(ControlSpec(), control_width(s.pipe.unet), zero_init=False)
    about = ControlMetadata("UNet2DConditionModel", made.dim, gamma=GammaConfig(alpha=2.0))
    return load_control(save_control(s.folder / "control.safetensors", made.state_dict(), about))


@case("ControlConditionedPipeline", families=BOTH)
def control(s: Loaded) -> Tensors:
    own = {"checkpoint": _checkpoint(s)} if s.family == "sd15" else {"gamma": GammaConfig()}
    sizes = {"size_condition": SizeCondition(original=(256, 384), crop=(8, 4)), "guidance": GuidanceConfig(3.0)}
    return [s.of("ControlConditioned")(PROMPT, seeds=[0], **sizes, **own, **s.told).images]


@case("ResolutionTransferPipeline", families=BOTH)
def resolution(s: Loaded) -> Tensors:
    """From half the side to the side."""
    plan = ResolutionTransferConfig((s.side, s.side), (s.side // 2, s.side // 2))
    return [
        pipelines.ResolutionTransferPipeline.from_pipe(s.pipe, plan)(PROMPT, generator=generator(), **s.told).images
    ]
