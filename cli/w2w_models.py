"""`vitrine w2w sample | edit | invert | encode | export`: models of a space."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from ..engine.errors import refuse
from ..engine.io.file_names import as_name
from ..engine.io.folders import has_ending
from ..engine.pipelines.loading import LoadConfig
from ..engine.settings.setting_checks import Count, OutFolder, Side
from .options import Load
from .w2w_arguments import example_of, model_of, space_at, tail_of, weights_at


@dataclass(frozen=True)
class Writing:
    """Output of models: a LoRA file and a .w2wmodel file of the same name per model."""

    out: OutFolder = Path("w2w-models")
    """Folder for the files."""
    dialect: str = "auto"
    """auto (what most programs load), kohya, diffusers or peft."""
    rank: Count | None = None
    """Largest rank per layer; none: exact."""
    save_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Dtype of the LoRA's factors."""

    def write(self, space: Any, model: Any, names: list[str]) -> None:
        """Writes a pair of files and prints a line for each model of a W2WModel."""
        import torch

        from ..engine.w2w import change_kept, materialise, nearest, write_lora

        for i, name in enumerate(map(as_name, names)):
            lora = materialise(space, model.coefficients[i], self.rank)
            path = self.out / (name if self.dialect == "peft" else f"{name}.safetensors")
            path = write_lora(path, lora, self.dialect, dtype=getattr(torch, self.save_dtype))
            model[i].save(self.out / f"{name}.w2wmodel.safetensors")
            fraction = change_kept(space, model.coefficients[i], lora) if self.rank else 1.0
            kept = f"  rank {self.rank} keeps {fraction:.1%} of the change" if self.rank else ""
            near = nearest(space, model.coefficients[i : i + 1])[0]
            print(f"{path}{kept}", *(f" nearest training model {n.name}, cosine {n.cosine:.2f}" for n in near))


Files = Annotated[Writing, arg(name="")]
"""`--out`, `--dialect`, `--rank` and `--save-dtype`."""


@dataclass(frozen=True)
class Sample:
    """Sample new models of a space as LoRA files, by default with the sampling settings of the space."""

    space: Positional[Annotated[Path | None, arg(metavar="[SPACE]")]] = None
    """A space file; none: the shipped people."""
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    """One model per seed."""
    edits: tuple[str, ...] = ()
    """Sliders such as 'beard=2'."""
    protect: tuple[str, ...] = ()
    """Labels that the sliders must not change."""
    calibrated: bool = False
    """Sliders are perceptually even positions 0 .. 1 of the space's maps, instead of deviations."""
    wanted: tuple[str, ...] = ()
    """Scores of the models before sliders, in deviations, such as 'glasses=-1'."""
    factor: float | None = None
    """Spread of the models: 1 varies as the training models do, 0 is their mean."""
    components: Count | None = None
    """Number of leading components to sample."""
    truncation: float | None = None
    """Sample numbers beyond this many deviations again."""
    rng: str | None = None
    """vector, or official: one by one, as in the published code."""
    attributes: str | None = None
    """auto, joined (along the directions as one training model is) or gaussian (the paper's)."""
    emphasis: float | None = None
    """joined: factor on the training model's part; 1.5 was best for the shipped people."""
    inherit: float | None = None
    """joined: correlation of the rest with the training model's, 0 to 1; 0.4 was best for the shipped people."""
    files: Files = Writing()

    def run(self) -> int:
        """0 on success."""
        from ..engine.w2w import EditConfig, W2WModel, conditioned, edit, edit_step, sample, sliders_of, usual_sampling

        space, strengths, wanted = space_at(self.space), sliders_of(self.edits, "="), sliders_of(self.wanted, "=")
        config = usual_sampling(
            space, factor=self.factor, components=self.components, truncation=self.truncation, rng=self.rng,
            attributes=self.attributes, emphasis=self.emphasis, inherit=self.inherit,
        )  # fmt: skip
        drawn = conditioned(space, sample(space, self.seeds, config), wanted)
        editing = EditConfig(self.protect, calibrated=self.calibrated)
        rows, moved = edit(space, drawn, strengths, editing), edit_step(space, strengths, editing)
        history: list[dict[str, Any]] = [{"sample": {"seeds": list(self.seeds), **config.to_dict()}}]
        history += [{"conditioned": wanted}] * bool(wanted) + [moved] * bool(strengths)
        names = [f"model-{seed:04d}{tail_of(strengths)}" for seed in self.seeds]
        self.files.write(space, W2WModel(rows, space.identity, tuple(history)), names)
        return 0


@dataclass(frozen=True)
class Edit:
    """Move models along sliders: the same person with a beard."""

    space: Positional[Annotated[Path, arg(metavar="SPACE")]]
    """The space file."""
    models: Positional[Annotated[tuple[str, ...], arg(metavar="MODELS ...")]]
    """.w2wmodel files, or names of training models."""
    edits: tuple[str, ...] = ()
    """Sliders such as 'beard=2', in deviations of the training models."""
    protect: tuple[str, ...] = ()
    """Labels whose scores are kept."""
    mode: str = "joint"
    """How they are protected: joint, or official_sequential."""
    calibrated: bool = False
    """Sliders are perceptually even positions 0 .. 1 of the space's maps, instead of deviations."""
    files: Files = Writing()

    def run(self) -> int:
        """0 on success."""
        from ..engine.w2w import EditConfig, edit, edit_step, sliders_of

        space, strengths = space_at(self.space), sliders_of(self.edits, "=")
        if not strengths:
            raise refuse("edits", "none", "one or more sliders", f"write --edits '{example_of(space)}=2'")
        for source in self.models:
            model, name = model_of(space, source)
            config = EditConfig(self.protect, self.mode, calibrated=self.calibrated)
            rows = edit(space, model.coefficients, strengths, config)
            moved = model.moved_to(rows, **edit_step(space, strengths, config))
            self.files.write(space, moved, _named(name + tail_of(strengths), len(rows)))
            if moved.start < 1000:
                print(f"calibrated as a late model, from timestep {moved.start:g} on")
        return 0


@dataclass(frozen=True)
class Invert:
    """Find the model of a space that fits a picture. Ctrl-C keeps the best so far; the same command resumes, also after
    a kill."""

    space: Positional[Annotated[Path, arg(metavar="SPACE")]]
    """The space file."""
    pictures: Positional[Annotated[tuple[Path, ...], arg(metavar="PICTURES ...")]]
    """One model per picture, unless together; they are cropped to squares."""
    masks: tuple[Path, ...] = ()
    """Masks, white on the subject, one per picture and of its size."""
    together: bool = False
    """All pictures show one subject: one model for all of them."""
    model: str = "portraits"
    """The base model of the space: a Stable Diffusion 1.x / 2.x folder or hub id."""
    prompt: str = "sks person"
    """The prompt that the LoRAs were trained with, or a description of the pictures without the subject."""
    preset: str = "quick"
    """photo and out_of_distribution are the paper's; quick: fewer steps, larger batches."""
    steps: Count | None = None
    """Adam steps, instead of the preset's."""
    lr: float | None = None
    """Learning rate, instead of the preset's."""
    components: Count | None = None
    """Number of components, instead of the preset's."""
    prior: float | None = None
    """Regularisation towards the mean model; for drawings or hidden faces try 0.001."""
    posterior: Literal["mean", "sample"] = "mean"
    """Latents for training: the VAE's mean, or a new sample in each step, as in the published code."""
    seed: int = 0
    """Seed of noise levels and noise."""
    size: Side | None = None
    """Side in pixels; none: the base model's."""
    load: Load = LoadConfig()
    files: Files = Writing()

    def run(self) -> int:
        """0 on success, 130 after Ctrl-C."""
        import torch

        from ..engine.activations.picture_latents import to_pixels
        from ..engine.io.picture_files import open_picture
        from ..engine.pipelines import W2WPipeline
        from ..engine.pipelines.loading import load_pipeline
        from ..engine.runtime.progress import TqdmProgress
        from ..engine.w2w import W2WModel, described, partial_inversion

        space, config = space_at(self.space), self._config()
        pipe = W2WPipeline.from_pipe(load_pipeline(self.model, None, self.load))
        side = self.size or pipe.own_size()
        images = torch.cat([to_pixels(_square(open_picture(p)), side) for p in self.pictures])
        names = [f"{p.stem}-inverted" for p in self.pictures[: 1 if self.together else None]]
        masks, bar = self._masks(side), TqdmProgress("inverting")
        work = self.files.out / f".{names[0]}.work"
        try:
            model, inversion = pipe.invert_image(space, images, self.prompt, config, masks, bar, work)
        except KeyboardInterrupt as error:
            partial = partial_inversion(error)
            if partial is not None and partial.steps:
                step = {"invert": {"steps": partial.steps, "interrupted": True}}
                self.files.write(space, W2WModel(partial.coefficients, space.identity, (step,)), names)
            raise
        for (picture, first), last in zip(enumerate(inversion.losses[0][1]), _lowest(inversion.losses), strict=True):
            print(f"{names[picture]}: held-out loss {first:.4f} -> {last:.4f}")
        self.files.write(space, model, names)
        shutil.rmtree(work, ignore_errors=True)
        print(described(space, model.coefficients))
        return 0

    def _config(self) -> Any:
        from dataclasses import replace

        from ..engine.w2w.edit.invert_config import preset

        names = ("steps", "lr", "components", "prior")
        chosen = {name: value for name in names if (value := getattr(self, name)) is not None}
        settings: dict[str, Any] = {"seed": self.seed, "together": self.together, "posterior": self.posterior}
        return replace(preset(self.preset), **settings, **chosen)

    def _masks(self, side: int) -> Any:
        """(B, side, side) in [0, 1], cropped like the pictures; None without masks."""
        import torch

        from ..engine.activations.picture_latents import to_pixels
        from ..engine.io.picture_files import soft_mask, stored

        if not self.masks:
            return None
        if len(self.masks) != len(self.pictures):
            raise refuse("masks", len(self.masks), f"{len(self.pictures)}, one per picture", "or leave them out")
        masks = []
        for path, picture in zip(self.masks, self.pictures, strict=True):
            mask, size = soft_mask(path, picture), stored(picture).size[::-1]
            if mask.size != size:
                raise refuse("mask size", f"{path.name} {mask.size}", size, "crop picture and mask together")
            pixels = to_pixels(_square(mask.convert("RGB")), side).mean(1)
            masks.append(((pixels + 1) / 2).clamp(0, 1))
        return torch.cat(masks)


@dataclass(frozen=True)
class Encode:
    """Project a LoRA, or a training model by name, into a space; prints the fraction that the space captures."""

    space: Positional[Annotated[Path, arg(metavar="SPACE")]]
    """The space file."""
    loras: Positional[Annotated[tuple[str, ...], arg(metavar="LORAS ...")]]
    """LoRA files, names of training models, or w2wmodel.pt of the published code."""
    out: OutFolder = Path("w2w-models")
    """Folder for the .w2wmodel files; vitrine w2w export turns them into LoRAs."""
    base_weights: Path | None = None
    """The base model's safetensors file, or diffusers' unet folder, for a DoRA."""

    def run(self) -> int:
        """0 on success."""
        from ..engine.w2w import described, encode, layer_sizes, member, official_model, read_lora

        space, weights = space_at(self.space), weights_at(self.base_weights)
        for source in self.loras:
            path = Path(source)
            if has_ending(path, ".pt"):
                model = official_model(path, space)
                summary = described(space, model.coefficients)
            else:
                if has_ending(path, ".safetensors"):
                    lora = read_lora(path, base=weights, sizes=layer_sizes(space))
                    encoding = encode(space, lora, path.stem)
                else:
                    encoding = member(space, source)
                model, summary = encoding.model, encoding.summary(space)
            name = as_name(path.stem if path.suffix else source)
            print(f"{model.save(self.out / f'{name}.w2wmodel.safetensors')}: {summary}")
        return 0


@dataclass(frozen=True)
class Export:
    """Write models of a space as LoRA files of a chosen rank, precision and key format."""

    space: Positional[Annotated[Path, arg(metavar="SPACE")]]
    """The space file."""
    models: Positional[Annotated[tuple[str, ...], arg(metavar="MODELS ...")]]
    """.w2wmodel files, or names of training models."""
    files: Files = Writing()

    def run(self) -> int:
        """0 on success."""
        space = space_at(self.space)
        for source in self.models:
            model, name = model_of(space, source)
            self.files.write(space, model, _named(name, len(model)))
        return 0


def _named(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}-{i}" for i in range(count)]


def _square(picture: Any) -> Any:
    side = min(picture.size)
    left, top = ((length - side) // 2 for length in picture.size)
    return picture.crop((left, top, left + side, top + side))


def _lowest(losses: list[tuple[int, list[float]]]) -> list[float]:
    return [min(values) for values in zip(*(row for _, row in losses), strict=True)]
