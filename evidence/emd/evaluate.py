"""A student compared with its teacher on the user's prompts, at equal seeds: ``vitrine emd evaluate``."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...engine.diffusion.coverage import precision_recall
from ...engine.diffusion.denoiser import Denoiser
from ...engine.diffusion.noise import seeded_noise
from ...engine.diffusion.sampling import sample
from ...engine.emd import StudentPreset, mean_distance, vendi_score
from ...engine.emd.networks import GENERATOR
from ...engine.emd.targets import part_of
from ...engine.errors import refuse
from ...engine.pipelines.emd import EMDOneStepPipeline
from ...engine.runtime.compat_diffusers import execution_device
from ...engine.runtime.progress import Progress, silent
from ..metrics import frechet_distance
from .clip_score import Clip, clip_scores
from .mixture_claims import spread

Features = Callable[[torch.Tensor], torch.Tensor]
"""(B, 3, H, W) pictures in [0, 1] to (B, D)."""


@dataclass(frozen=True)
class Protocol:
    """The samples of an evaluation.

    Attributes:
        prompts: of the list.
        seeds: of each prompt.
        steps, guidance: of the teacher.
        batch: samples at once.
        size: (height, width) in pixels; by default the size of the teacher's pipeline.
    """

    prompts: Sequence[str]
    seeds: int = 4
    steps: int = 30
    guidance: float = 3.0
    batch: int = 8
    size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        count = len(self.prompts) * self.seeds
        if count < 5:
            raise refuse("pictures", count, "5 or more, prompts times seeds", "give more prompts, or more seeds")

    def rows(self, shift: int = 0) -> list[tuple[str, int]]:
        """(prompt, seed) of each picture; every prompt has the same seeds."""
        return [(prompt, shift + k) for prompt in self.prompts for k in range(self.seeds)]


class Judges(NamedTuple):
    """The networks that evaluate pictures.

    Attributes:
        features: the feature network of distances, precision and recall.
        clip: for a CLIP score, or None.
    """

    features: Features
    clip: Clip | None = None


class _Seen(NamedTuple):
    """Features (N, D) of pictures, and CLIP's unit vectors of them."""

    features: torch.Tensor
    clip: torch.Tensor | None


def evaluate(
    pipe: Any, students: Sequence[Path], judges: Judges, protocol: Protocol, base: str = "",
    progress: Progress = silent,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Metrics of each student, of the teacher's single step, and of the teacher on other seeds.

    Each is compared with the teacher's pictures of the same prompts and seeds: Frechet distance, precision and recall,
    mean 1 - cosine between the two pictures of a seed; and the distance between seeds. The teacher on other seeds
    is the level of chance: a student cannot be expected to come nearer. With a CLIP, the CLIP score of each and its
    difference from the teacher's at the same seeds (mean, 95 % interval over prompts); the teacher's own, and that
    of its pictures with the next prompt's text, the score of pictures that show something else.

    Args:
        pipe: the teacher, of any family that supports one-step sampling.
        students: LoRAs or whole networks, with a student preset or a published student's name.
    """
    fast: Any = EMDOneStepPipeline.from_pipe(pipe)
    base_network, (height, width) = fast.network, protocol.size or (None, None)
    total, done = len(students) + 3, 0

    def drawn(sample: Callable[[list[str], list[int]], torch.Tensor], rows: list[tuple[str, int]]) -> _Seen:
        nonlocal done
        parts = [rows[i : i + protocol.batch] for i in range(0, len(rows), protocol.batch)]
        seen = [_look(sample([p for p, _ in part], [s for _, s in part]), judges) for part in parts]
        done += 1
        progress(done, total, None)
        clips = [clip for _, clip in seen if clip is not None]
        return _Seen(torch.cat([features for features, _ in seen]), torch.cat(clips) if clips else None)

    def single(preset: StudentPreset | None) -> Callable[[list[str], list[int]], torch.Tensor]:
        how = {"output_type": "pt", "height": height, "width": width}
        return lambda prompts, seeds: fast(prompts, seeds, preset, **how).images.float().cpu()

    pipe.set_progress_bar_config(disable=True)
    teacher = _teacher(pipe, fast, protocol)
    reference = drawn(teacher, protocol.rows())
    texts = None if judges.clip is None else judges.clip.texts([prompt for prompt, _ in protocol.rows()])
    rows = {} if texts is None else _teachers_scores(reference, texts, protocol.seeds)

    def row(seen: _Seen) -> dict[str, float]:
        return _row(seen.features, reference.features, protocol.seeds) | _scores(seen, reference, texts, protocol.seeds)

    rows["teacher, other seeds"] = row(drawn(teacher, protocol.rows(10_000)))
    rows["teacher, 1 step"] = row(drawn(single(None), protocol.rows()))
    for path in students:
        preset = fast.load_student(path, base=base, adapter_name="evaluated")
        rows[str(path)] = row(drawn(single(preset), protocol.rows()))
        fast.unload_student(base_network)
    return rows


def _teacher(pipe: Any, fast: Any, protocol: Protocol) -> Callable[[list[str], list[int]], torch.Tensor]:
    """The teacher's sampler from seeded noise: its pipeline, or for a transformer Euler's method on its schedule."""
    shape = fast.latent_shape(*(protocol.size or ()))
    if part_of(fast.network) == "transformer":
        return partial(_euler, fast, protocol, shape)
    how = {"num_inference_steps": protocol.steps, "guidance_scale": protocol.guidance, "output_type": "pt"}
    how |= dict(zip(("height", "width"), protocol.size or (), strict=False))

    def draw(prompts: list[str], seeds: list[int]) -> torch.Tensor:
        z = seeded_noise(seeds, shape).to(execution_device(pipe), pipe.unet.dtype)
        return pipe(prompts, latents=z, **how).images.float().cpu()

    return draw


@torch.no_grad()
def _euler(
    fast: Any, protocol: Protocol, shape: tuple[int, ...], prompts: list[str], seeds: list[int]
) -> torch.Tensor:  # fmt: skip
    """Pipelines of transformers pack latents differently; the engine's sampling loop does not pack them."""
    pixels = (shape[1] * fast.vae_scale_factor, shape[2] * fast.vae_scale_factor)
    null = None if protocol.guidance == 1 else fast.unprompted(pixels)
    z = seeded_noise(seeds, shape).to(fast.network.device)
    cond, net = fast.prompted(prompts, pixels), Denoiser.from_diffusers(fast)
    scheduler = _without_dynamic_shift(fast.scheduler, shape, fast._adapter.latent.patch)
    x0 = sample(net, z, scheduler, protocol.steps, cond, null=null, guidance=protocol.guidance)
    pictures: torch.Tensor = fast.decoded(x0, "pt")
    return pictures.float().cpu()


def _without_dynamic_shift(scheduler: Any, shape: tuple[int, ...], patch: int) -> Any:
    """A copy whose shift is the number that diffusers' pipelines compute from the number of tokens."""
    config = scheduler.config
    if not config.get("use_dynamic_shifting"):
        return copy.deepcopy(scheduler)
    tokens = shape[1] * shape[2] / patch**2
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    mu = config.base_shift + slope * (tokens - config.base_image_seq_len)
    linear = config.get("time_shift_type", "exponential") == "linear"
    return type(scheduler).from_config(config, use_dynamic_shifting=False, shift=mu if linear else math.exp(mu))


def _look(images: torch.Tensor, judges: Judges) -> _Seen:
    return _Seen(judges.features(images), None if judges.clip is None else judges.clip.pictures(images))


def _teachers_scores(seen: _Seen, texts: torch.Tensor, seeds: int) -> dict[str, dict[str, float]]:
    assert seen.clip is not None
    rows = {"teacher": {"CLIP score": round(float(clip_scores(seen.clip, texts).mean()), 3)}}
    if len(texts) > seeds:
        others = clip_scores(seen.clip, texts.roll(-seeds, 0))
        rows["teacher, the next prompt's text"] = {"CLIP score": round(float(others.mean()), 3)}
    return rows


def _scores(seen: _Seen, reference: _Seen, texts: torch.Tensor | None, seeds: int) -> dict[str, float]:
    """The interval is over prompts: pictures of one prompt are correlated."""
    if texts is None or seen.clip is None or reference.clip is None:
        return {}
    scores = clip_scores(seen.clip, texts)
    over = (scores - clip_scores(reference.clip, texts)).view(-1, seeds).mean(1)
    row = {"CLIP score": round(float(scores.mean()), 3), "CLIP score over the teacher's": round(float(over.mean()), 3)}
    return row | ({"+- (95 %)": spread(over.tolist())["+-"]} if len(over) > 1 else {})


def _row(features: torch.Tensor, reference: torch.Tensor, seeds: int) -> dict[str, float]:
    precision, recall = precision_recall(reference, features)
    cosine = torch.nn.functional.cosine_similarity(features.double(), reference.double())
    row = {
        "Frechet distance": round(frechet_distance(features, reference), 4),
        "precision": round(precision, 4),
        "recall": round(recall, 4),
        "from the teacher's picture": round(float((1 - cosine).mean()), 4),
    }
    if seeds > 1:
        each = [group for group in features.split(seeds)]
        row["between seeds"] = round(sum(mean_distance(g) for g in each) / len(each), 4)
        row["Vendi"] = round(sum(vendi_score(g) for g in each) / len(each), 3)
    return row


_FILES = ("kohya", "diffusers", "unet", "transformer")
"""A LoRA of a UNet or of a transformer, a whole UNet or transformer."""


def checkpoints(path: Path) -> list[Path]:
    """A student file, or those of a run's folder ``checkpoints``, in the order of their steps."""
    if path.is_file():
        return [path]
    folders = sorted(path.glob("step_*"), key=lambda p: int(p.name.removeprefix("step_")))
    kinds = [[folder / f"{GENERATOR}_{kind}.safetensors" for kind in _FILES] for folder in folders]
    files = [next(file for file in own if file.is_file()) for own in kinds if any(map(Path.is_file, own))]
    if not files:
        remedy = "give a student's file, or OUT/checkpoints of a run with keep = 3, say"
        raise refuse("student", str(path), "a file, or a folder of checkpoints", remedy)
    return files


def best(rows: dict[str, dict[str, float]], students: Sequence[Path]) -> Path:
    """The student of the smallest Frechet distance."""
    return min(students, key=lambda path: rows[str(path)]["Frechet distance"])


def features_of(name: str) -> Features:
    """``readout`` (the portraits' attribute classifier), or a transformers folder of CLIP, SigLIP or DINOv2."""
    if name == "readout":
        from ..portraits.classifier import load_classifier, read

        net = load_classifier()
        return lambda images: read(net, images).features
    from transformers import AutoImageProcessor, AutoModel

    from ...engine.io.files import named

    with named(name, "feature network", "readout, or a transformers folder with preprocessor_config.json", "check it"):
        encoder = AutoModel.from_pretrained(name, local_files_only=True).eval()
        prepare = AutoImageProcessor.from_pretrained(name, local_files_only=True)

    @torch.no_grad()
    def encode(images: torch.Tensor) -> torch.Tensor:
        pixels = prepare(images=list(images), do_rescale=False, return_tensors="pt")["pixel_values"]
        if hasattr(encoder, "get_image_features"):
            out = encoder.get_image_features(pixel_values=pixels)
            return (out if isinstance(out, torch.Tensor) else out.pooler_output).float()
        out = encoder(pixel_values=pixels)
        pooled = getattr(out, "pooler_output", None)
        return (out.last_hidden_state.mean(1) if pooled is None else pooled).float()

    return encode
