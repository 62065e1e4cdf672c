"""Every call of every pipeline, and the engine's entry points, on the small models of :mod:`.stock`.

``CALLS`` holds them by name. A call makes its own pipeline from a stock one of each family it serves, and runs it to a
list of tensors, the same numbers each time: so a test may place the pipeline as a user would, run, and compare.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vitrine.engine.activations import TapConfig, tap_latents, tap_steps
from vitrine.engine.activations.ranking import RankingConfig
from vitrine.engine.control import (
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
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.nemo import NeuronSet, ProbeConfig, SearchConfig
from vitrine.engine.network.condition import Condition
from vitrine.engine.pipelines import (
    ActivationTapPipeline,
    ControlConditionedPipeline,
    CorrespondencePipeline,
    EMDOneStepPipeline,
    NEMOPipeline,
    ResolutionTransferPipeline,
    SegmentationPipeline,
    W2WPipeline,
)
from vitrine.engine.pipelines.joined import TaskPipeline
from vitrine.engine.pipelines.nemo_jobs import verify_blocking
from vitrine.engine.portraits import caption, plants, render, sample_scenes
from vitrine.engine.portraits.shipped import PEOPLE_SPACE
from vitrine.engine.resolution import ResolutionTransferConfig
from vitrine.engine.settings.ranking_options import FilterRule
from vitrine.engine.tracing.hooks import edit
from vitrine.engine.w2w import EditConfig, InvertConfig, WeightSpace

from .stock import backbone, stock, used, valid_for
from .training import control_training, emd_training, lora_training

PROMPT = "a smiling pale face with curly red hair glasses navy shirt on yellow"
RESIDUAL = "up-level0-repeat0-res-increment"
PLACES = [RESIDUAL, "up-level0-repeat0-vit-block0-cross-q", "up-level0-repeat0-vit-block0-cross-map"]
VALUES = "down-level1-repeat0-vit-block0-cross-v"
PROBE = ProbeConfig(seeds=3, timestep_index=15)

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        name: as in the tables.
        kinds: family -> the pipeline's class; None leaves the stock pipeline.
        run: pipeline -> the tensors it made, from any device.
        steps: how many steps it does unless told otherwise; 0 where there is no such number. ``run`` takes ``steps``.
        trains: a training: of models that are loaded whole.
        slow: takes seconds; run with ``VITRINE_MACHINE=full`` alone.
        lent: the stock pipeline is kept and gone around; ``pipe.__dict__["family"]`` says which it is.
    """

    name: str
    kinds: dict[str, type | None]
    run: Callable[..., Tensors]
    steps: int = 0
    trains: bool = False
    slow: bool = False
    lent: bool = False

    def pipeline(self, family: str) -> Any:
        """A fresh pipeline, float32 on the CPU, as the user would load it."""
        pipe = stock(family)
        kind = self.kinds[family]
        if self.lent:
            made = kind.from_pipe(pipe, **self._size(kind, family))
            made.set_progress_bar_config(disable=True)
            made.__dict__["family"] = family
            return made
        return pipe if kind is None else around(kind, pipe)

    @staticmethod
    def _size(kind: Any, family: str) -> dict[str, tuple[int, int]]:
        """What NEMO scores at: small, where Flux's own 1024 px would take minutes. PixArt is built for 128 px."""
        return {"size": (128, 128) if family.startswith("pixart") else (64, 64)} if kind is NEMOPipeline else {}


def around(kind: type[TaskPipeline], pipe: Any) -> Any:
    """A task on a pipeline, without its bar."""
    made = kind.from_pipe(pipe)
    made.set_progress_bar_config(disable=True)
    return made


CALLS: dict[str, Call] = {}


def entered(name: str, kinds: dict[str, type | None], steps: int = 0, **facts: bool) -> Callable:
    """Enters a call into the table."""

    def keep(run: Callable[..., Tensors]) -> Callable[..., Tensors]:
        CALLS[name] = Call(name, kinds, run, steps, **facts)
        return run

    return keep


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@functools.cache
def drawn() -> Any:
    """Four portraits with their parts and key points."""
    return render(sample_scenes(range(7_000_000, 7_000_004)))


# --- activations --------------------------------------------------------------------------------------------------
TAPS = {"sd": ActivationTapPipeline, "sdxl": ActivationTapPipeline}
TRANSFORMERS = dict.fromkeys(("pixart-1024", "sd3", "flux"), ActivationTapPipeline)
MATCHING: dict[str, type | None] = {"sd": CorrespondencePipeline, "sdxl": CorrespondencePipeline}
MATCHING |= dict.fromkeys(("flux", "sd3", "pixart-1024"), CorrespondencePipeline)
LABELS: dict[str, type | None] = {"sd": SegmentationPipeline, "sdxl": SegmentationPipeline}
RANKED = LABELS | {"flux": SegmentationPipeline}
LABELS |= dict.fromkeys(("flux", "sd3", "pixart-1024"), SegmentationPipeline)


def _place(pipe: Any) -> str:
    """One whose activations differ from position to position."""
    return RESIDUAL if type(backbone(pipe)).__name__.startswith("UNet") else "vit-block1-out"


@entered("tap", TAPS)
def tap(pipe: Any) -> Tensors:
    out = pipe.tap(drawn().images[:2], ["a face", "a hat"], addresses=PLACES, seeds=[0, 1], output_type="none")
    return [a.tensor for a in out.activations.values()]


@entered("tap.transformer", TRANSFORMERS)
def tap_transformer(pipe: Any) -> Tensors:
    """Prompts are encoded by the pipeline that it was made from."""
    out = pipe.tap(drawn().images[:2], ["a face", "a hat"], "vit-block1-out", seeds=[0, 1], output_type="none")
    return [a.tensor for a in out.activations.values()]


@entered("tap.pictures", {"sd": ActivationTapPipeline})
def tap_pictures(pipe: Any) -> Tensors:
    out = pipe.tap(drawn().images[:1], addresses=RESIDUAL, generator=generator(), posterior="sample", size=32)
    assert len(out.pictures) == 1
    return [a.tensor for a in out.activations.values()]


@entered("tap.latents", {"sd": None, "pixart": None, "sd3": None, "flux": None})
def tap_of_latents(pipe: Any) -> Tensors:
    """The engine's function, on every family."""
    net, place = backbone(pipe), _place(pipe)
    pooled = {"FluxTransformer2DModel": 64, "SD3Transformer2DModel": 128}.get(type(net).__name__)
    width = 128 if pooled == 128 else 64
    g = generator(3)
    text = torch.randn(1, 7, width, generator=g)
    cond = Condition(text, None if pooled is None else torch.randn(1, pooled, generator=g))
    latents = torch.randn(2, 4, 16, 16, generator=g)
    with used(pipe):
        return [a.tensor for a in tap_latents(Denoiser.from_diffusers(pipe), latents, cond, TapConfig(place)).values()]


@entered("tap_steps", {"sd": None}, steps=2)
def tap_while_sampling(pipe: Any, steps: int = 2) -> Tensors:
    with tap_steps(pipe.unet, RESIDUAL, steps=(1,), rows=("uncond", "cond")) as record:
        images = pipe(PROMPT, num_inference_steps=steps, generator=generator(), output_type="latent").images
    return [images, record[1]["cond"][RESIDUAL].tensor, record.contrast(1)[RESIDUAL]]


@entered("edit", {"sd": None}, steps=2)
def edit_while_sampling(pipe: Any, steps: int = 2) -> Tensors:
    with edit(pipe.unet, {VALUES: lambda values: values * 0.5}):
        return [pipe(PROMPT, num_inference_steps=steps, generator=generator(), output_type="latent").images]


@entered("correspondence", MATCHING)
def correspondence(pipe: Any) -> Tensors:
    pictures = drawn().images
    found = pipe.match(pictures[:1], pictures[1:3], drawn().keypoints[0, :3], addresses=_place(pipe), flip=True)
    return [t for m in found for t in (m.points, m.similarity)]


@entered("segmentation", LABELS)
def segmentation(pipe: Any) -> Tensors:
    pictures, masks = drawn().images, (drawn().parts == 0).long()
    return [pipe.segment(pictures[:2], masks[:2], pictures[2:], addresses=_place(pipe)).float()]


@entered("rank", RANKED)
def rank(pipe: Any) -> Tensors:
    masks = (drawn().parts == 0).long()
    rule = FilterRule(None, None, (None, None))
    unet = type(backbone(pipe)).__name__.startswith("UNet")
    place = "up-level0-repeat0-vit-block0-ffn-out" if unet else "vit-block1-ffn-out"
    ranking = pipe.rank(drawn().images, masks, PROMPT, config=RankingConfig(place, rule=rule, most=2))
    assert ranking.search is not None
    scores = [[p.noise, p.granularity, p.locality] for p in ranking.properties.values()]
    return [torch.tensor(scores), torch.tensor([ranking.search.singles[a] for a in ranking.properties])]


# --- NEMO ---------------------------------------------------------------------------------------------------------
NEMO: dict[str, type | None] = {"sd": NEMOPipeline}


@functools.cache
def _captions(count: int) -> list[str]:
    return caption(sample_scenes(range(100, 100 + count)))


@functools.cache
def _statistics() -> Any:
    """Gathered on the float32 model on the CPU, as a file that a user was given."""
    pipe = around(NEMOPipeline, stock("sd"))
    return pipe.calibrate(_captions(24), ["statistics"])


@functools.cache
def _neurons() -> NeuronSet:
    return NeuronSet({VALUES: tuple(range(40))}, _statistics().statistics.fingerprint)


@entered("nemo.statistics", NEMO)
def nemo_statistics(pipe: Any) -> Tensors:
    made = pipe.calibrate(_captions(24), ["statistics"]).statistics
    return [t for table in (made.means, made.stds) for t in table.values()]


@entered("nemo.score", NEMO)
def nemo_score(pipe: Any) -> Tensors:
    prompts = [plants()[2].captions[0], _captions(1)[0]]
    return [torch.tensor([s.value for s in pipe.detect(prompts, None, "one step", PROBE)])]


@entered("nemo.calibrate", NEMO)
def nemo_calibrate(pipe: Any) -> Tensors:
    return [torch.tensor([pipe.calibrate(_captions(4), ["score"], probe=PROBE).score.tau])]


@entered("nemo.find", NEMO)
def nemo_find(pipe: Any) -> Tensors:
    config = SearchConfig(tau=0.3, effect_fraction=0.05, theta=4.0, theta_step=3.0)
    (found,) = pipe.find([plants()[2].captions[0]], valid_for(pipe, _statistics()), config, PROBE)
    assert found.search is not None and found.after is not None
    return [torch.tensor([found.before.value, found.after.value])]


@entered("nemo.verify", NEMO)
def nemo_verify(pipe: Any) -> Tensors:
    found = verify_blocking(pipe, plants()[2].captions[0], _neurons(), 0.5, None, PROBE)
    return [torch.tensor([found.untouched.value, found.blocked.value])]


@entered("nemo.attack", NEMO, slow=True)
def nemo_attack(pipe: Any) -> Tensors:
    """Verification with a picture: 50 steps of gradients through the network, and the VAE."""
    found = verify_blocking(pipe, plants()[2].captions[0], _neurons(), 0.5, drawn().images[:1], PROBE)
    assert found.attacked is not None
    return [torch.tensor([found.untouched.value, found.blocked.value, found.attacked.value])]


@entered("nemo.call", NEMO, steps=2)
def nemo_call(pipe: Any, steps: int = 2) -> Tensors:
    told = {"num_inference_steps": steps, "generator": generator(), "output_type": "latent"}
    return [pipe(PROMPT, neurons=_neurons(), **told).images]


# --- W2W ----------------------------------------------------------------------------------------------------------
W2W: dict[str, type | None] = {"sd": W2WPipeline}


@functools.cache
def _space() -> WeightSpace:
    return WeightSpace.load(PEOPLE_SPACE)


@entered("w2w.call", W2W, steps=2)
def w2w_call(pipe: Any, steps: int = 2) -> Tensors:
    person = pipe.sample_models(_space(), [0, 1])
    told = {"num_inference_steps": steps, "output_type": "latent", "seeds": [3, 4]}
    edits = {"edits": {"beard": 2.0}, "edit_config": EditConfig(start_timestep=600)}
    return [pipe(PROMPT, space=_space(), model=person, **edits, **told).images]


@entered("w2w.sample_models", W2W)
def w2w_models(pipe: Any) -> Tensors:
    person = pipe.sample_models(_space(), [0])
    edited = pipe.edit_model(_space(), person, {"beard": 1.0})
    return [person.coefficients, edited.coefficients, pipe.blend_models(_space(), [person, edited]).coefficients]


@entered("w2w.invert_image", W2W, steps=2)
def w2w_invert(pipe: Any, steps: int = 2) -> Tensors:
    config = InvertConfig(steps=steps, check_every=1000)
    model, _ = pipe.invert_image(_space(), drawn().images[:2], PROMPT, config, mask=torch.ones(2, 64, 64))
    return [model.coefficients]


# --- control ------------------------------------------------------------------------------------------------------
FAR = SizeCondition(original=(16, 24), crop=(8, 4))


def _controlled(pipe: Any, steps: int, **more: Any) -> Tensors:
    told = {"num_inference_steps": steps, "output_type": "latent", "seeds": [0], "size_condition": FAR}
    return [pipe(PROMPT, guidance=GuidanceConfig(3.0), height=64, width=64, **told, **more).images]


@entered("control", {"sdxl": ControlConditionedPipeline, "pixart-1024": ControlConditionedPipeline}, steps=2)
def control(pipe: Any, steps: int = 2) -> Tensors:
    return _controlled(pipe, steps, gamma=GammaConfig())


@functools.cache
def _checkpoint_file() -> Path:
    net = stock("sd").unet
    torch.manual_seed(3)
    made = ControlEmbedder(ControlSpec(), control_width(net), zero_init=False)
    about = ControlMetadata("UNet2DConditionModel", made.dim, gamma=GammaConfig(alpha=2.0))
    folder = Path(tempfile.mkdtemp(prefix="vitrine-machine-"))
    return save_control(folder / "control.safetensors", made.state_dict(), about)


@entered("control.checkpoint", {"sd": ControlConditionedPipeline}, steps=2)
def control_with_checkpoint(pipe: Any, steps: int = 2) -> Tensors:
    return _controlled(pipe, steps, checkpoint=load_control(_checkpoint_file()))


# --- EMD ----------------------------------------------------------------------------------------------------------
EMD: dict[str, type | None] = {"sd": EMDOneStepPipeline, "sdxl": EMDOneStepPipeline}


@entered("emd.one_step", EMD)
def emd_one_step(pipe: Any) -> Tensors:
    return [pipe(PROMPT, [0, 1], output_type="pt").images]


# --- resolution ---------------------------------------------------------------------------------------------------
@entered("resolution", dict.fromkeys(("sd", "sdxl", "pixart", "sd3", "flux")), steps=2)
def resolution(pipe: Any, steps: int = 2) -> Tensors:
    wide = ResolutionTransferPipeline.from_pipe(pipe, ResolutionTransferConfig((96, 64), (64, 64)))
    return [wide(PROMPT, num_inference_steps=steps, generator=generator(), output_type="latent").images]


# --- training -----------------------------------------------------------------------------------------------------
@entered("emd.train", {"sd": None}, steps=1, trains=True)
def train_emd(pipe: Any, steps: int = 1) -> Tensors:
    return emd_training(pipe, PROMPT, steps)


@entered("w2w.train", {"sd": None}, steps=1, trains=True)
def train_loras(pipe: Any, steps: int = 1) -> Tensors:
    return lora_training(pipe, PROMPT, steps)


@entered("control.train", {"sd": None}, steps=1, trains=True)
def train_control(pipe: Any, steps: int = 1) -> Tensors:
    return control_training(pipe, PROMPT, steps)
