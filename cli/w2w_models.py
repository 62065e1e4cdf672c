"""`vitrine w2w sample | edit | invert | export | slider | pairs`: models of a space, and sliders."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from ..engine.errors import refuse
from ..engine.io.file_names import as_name
from ..engine.pipelines.loading import LoadConfig
from ..engine.settings.setting_checks import Count, FileName, OutFolder, Side, Writes
from ..engine.settings.w2w_options import EditConfig, InvertConfig, PairConfig, SampleConfig, preset
from .options import Load, OutSpace, flags, overrides
from .w2w_arguments import example_of, model_of, space_at, tail_of

CUSTOM = overrides(InvertConfig, "steps", "lr", "components", "prior", "posterior", "seed", of="the preset's")


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
    wanted: tuple[str, ...] = ()
    """Scores of the models before sliders, in deviations, such as 'glasses=-1'."""
    sampling: Annotated[dict[str, Any], overrides(SampleConfig, of="the space's")] = field(default_factory=dict)
    files: Files = Writing()

    def run(self) -> int:
        """0 on success."""
        from ..engine.w2w import W2WModel, conditioned, edit, edit_step, sample, sliders_of, usual_sampling

        space, strengths, wanted = space_at(self.space), sliders_of(self.edits, "="), sliders_of(self.wanted, "=")
        config = usual_sampling(space, **self.sampling)
        drawn = conditioned(space, sample(space, self.seeds, config), wanted)
        editing = EditConfig(self.protect)
        rows, moved = edit(space, drawn, strengths, editing), edit_step(strengths, editing)
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
    editing: Annotated[EditConfig, flags(EditConfig(), "mode")] = EditConfig()
    files: Files = Writing()

    def run(self) -> int:
        """0 on success."""
        from ..engine.w2w import edit, edit_step, sliders_of

        space, strengths = space_at(self.space), sliders_of(self.edits, "=")
        if not strengths:
            raise refuse("edits", "none", "one or more sliders", f"write --edits '{example_of(space)}=2'")
        for source in self.models:
            model, name = model_of(space, source)
            config = replace(self.editing, protect=self.protect)
            rows = edit(space, model.coefficients, strengths, config)
            moved = model.moved_to(rows, **edit_step(strengths, config))
            self.files.write(space, moved, _named(name + tail_of(strengths), len(rows)))
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
    custom: Annotated[dict[str, Any], CUSTOM] = field(default_factory=dict)
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
        side = self.size or max(pipe._adapter.trained_size())
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

    def _config(self) -> InvertConfig:
        return replace(preset(self.preset), together=self.together, **self.custom)

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
class Export:
    """Write models of a space as LoRA files of a chosen rank, precision and key format."""

    space: Positional[Annotated[Path, arg(metavar="SPACE")]]
    """The space file."""
    models: Positional[Annotated[tuple[str, ...], arg(metavar="MODELS ...")]]
    """.w2wmodel files, w2wmodel.pt of the published code, or names of training models."""
    files: Files = Writing()

    def run(self) -> int:
        """0 on success."""
        space = space_at(self.space)
        for source in self.models:
            model, name = model_of(space, source)
            self.files.write(space, model, _named(name, len(model)))
        return 0


@dataclass(frozen=True)
class SliderLora:
    """Write an edit as a separate LoRA, which any tool loads with a person's LoRA at strength -1 .. 1."""

    space: Positional[Annotated[Path, arg(metavar="SPACE")]]
    """The space file."""
    edits: tuple[str, ...] = ()
    """The edit at strength 1, such as 'beard=2' (deviations of the training models); several are combined."""
    around: str | None = None
    """The model to edit, a .w2wmodel file or a training model's name; none: the mean. In factors mode it suits
    this model best, in delta mode all models equally."""
    protect: tuple[str, ...] = ()
    """Labels whose scores are kept."""
    one_sided: bool = False
    """Exact at strength 1, instead of even from -1 to 1; factors mode only."""
    rank: Count | None = None
    """Largest rank per layer; none: exact."""
    dialect: str = "auto"
    """auto (what most programs load), kohya, diffusers or peft."""
    save_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Dtype of the LoRA's factors."""
    out: Annotated[Path | None, Writes("either")] = None
    """The LoRA file (for peft the folder); none: slider-LABEL.safetensors."""

    def run(self) -> int:
        """0 on success."""
        import torch

        from ..engine.w2w import edit, slider_lora, sliders_of, write_lora

        space, strengths = space_at(self.space), sliders_of(self.edits, "=")
        if not strengths:
            raise refuse("edits", "none", "one or more sliders", f"write --edits '{example_of(space)}=2'")
        before = model_of(space, self.around)[0].only(space) if self.around else torch.zeros(space.dimension)
        after = edit(space, before, strengths, EditConfig(self.protect))
        slider = slider_lora(space, before, after, self.rank, self.one_sided)
        out = self.out or Path(
            as_name(f"slider{tail_of(strengths)}") + ("" if self.dialect == "peft" else ".safetensors")
        )
        path = write_lora(out, slider.lora, self.dialect, dtype=getattr(torch, self.save_dtype))
        print(f"{path}: {slider.summary()}")
        return 0


def paired_names(before: Path, after: Path) -> list[str]:
    """Names of the picture files that both folders have."""
    from ..engine.io.picture_files import pictures_in

    sides = [{p.name for p in pictures_in(folder)} for folder in (before, after)]
    if not sides[0] or sides[0] != sides[1]:
        shown = sorted(sides[0] ^ sides[1])[:3] or "no pictures"
        raise refuse("pictures", shown, "two folders with files of the same names", "give pairs the same names")
    return sorted(sides[0])


@dataclass(frozen=True)
class PairSlider:
    """Train a slider from pictures before and after: two folders with files of the same names; stored in the space.

    Everything else in the pictures is kept: training penalises other changes.
    """

    space: Positional[Annotated[Path, arg(metavar="SPACE")]]
    """The space file to which the direction is added."""
    before: Positional[Annotated[Path, arg(metavar="BEFORE")]]
    """Folder of pictures without the attribute."""
    after: Positional[Annotated[Path, arg(metavar="AFTER")]]
    """Folder of the same pictures with it."""
    label: FileName = "my slider"
    """Name of the slider."""
    shown: str | None = None
    """Who is in the pictures: a .w2wmodel file or a training model's name; none: the mean model."""
    model: str = "portraits"
    """The base model of the space: a Stable Diffusion 1.x / 2.x folder or hub id."""
    prompt: str = "sks person"
    """The prompt that the LoRAs were trained with, or a description of the pictures without subject and attribute."""
    training: Annotated[PairConfig, flags(PairConfig(), "steps", "start_timestep")] = PairConfig()
    size: Side | None = None
    """Side in pixels; none: the base model's."""
    out: OutSpace = None
    """The space with the slider; none: overwrites SPACE."""
    save_dtype: str = "float16"
    """Of components in the file: float32, float16 or bfloat16."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 on success; the same command resumes."""
        import shutil

        import torch

        from ..engine.activations.picture_latents import to_pixels
        from ..engine.io.picture_files import open_rgb
        from ..engine.pipelines import W2WPipeline
        from ..engine.pipelines.loading import load_pipeline
        from ..engine.runtime.progress import TqdmProgress
        from ..engine.w2w import with_pair_slider

        space, names = space_at(self.space), paired_names(self.before, self.after)
        rows = model_of(space, self.shown)[0].coefficients[:1] if self.shown else torch.zeros(1, space.dimension)
        pipe = load_pipeline(self.model, W2WPipeline, self.load)
        side = self.size or int(pipe.unet.config.sample_size) * pipe.vae_scale_factor
        sides = [
            torch.cat([to_pixels(open_rgb(folder / name).resize((side, side)), side) for name in names])
            for folder in (self.before, self.after)
        ]
        target = self.out or self.space
        work = target.with_name(f".{target.name}.{self.label.replace(' ', '_')}.work")
        bar = TqdmProgress("training")
        change = pipe.train_pair_slider(space, sides[0], sides[1], self.prompt, rows, self.training, work, bar)
        space = with_pair_slider(space, self.label, change)
        saved = space.save(target, self.save_dtype)
        shutil.rmtree(work, ignore_errors=True)
        print(f"{saved}: {self.label} reproduces the pairs at strength {space.info['pair_sliders'][self.label]:.2f}")
        return 0


def _named(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}-{i}" for i in range(count)]


def _square(picture: Any) -> Any:
    side = min(picture.size)
    left, top = ((length - side) // 2 for length in picture.size)
    return picture.crop((left, top, left + side, top + side))


def _lowest(losses: list[tuple[int, list[float]]]) -> list[float]:
    return [min(values) for values in zip(*(row for _, row in losses), strict=True)]
