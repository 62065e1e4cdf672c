"""`vitrine w2w slider | blend`: an edit as a LoRA, and blends of models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from ..engine.errors import refuse
from ..engine.io.file_names import as_name
from ..engine.io.files import named, parse_table
from ..engine.settings.setting_checks import Count, OutFile, Writes
from .w2w_arguments import example_of, model_of, space_at, tail_of
from .w2w_models import Files, Writing


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
    calibrated: bool = False
    """Edits are positions 0 .. 1 of the space's maps instead of deviations."""
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

        from ..engine.w2w import EditConfig, edit, slider_lora, sliders_of, write_lora

        space, strengths = space_at(self.space), sliders_of(self.edits, "=")
        if not strengths:
            raise refuse("edits", "none", "one or more sliders", f"write --edits '{example_of(space)}=2'")
        before = model_of(space, self.around)[0].only(space) if self.around else torch.zeros(space.dimension)
        after = edit(space, before, strengths, EditConfig(self.protect, calibrated=self.calibrated))
        slider = slider_lora(space, before, after, self.rank, self.one_sided)
        out = self.out or Path(
            as_name(f"slider{tail_of(strengths)}") + ("" if self.dialect == "peft" else ".safetensors")
        )
        path = write_lora(out, slider.lora, self.dialect, dtype=getattr(torch, self.save_dtype))
        print(f"{path}: {slider.summary()}")
        return 0


@dataclass(frozen=True)
class Blend:
    """Write a model between others of a space: a child of two people."""

    space: Positional[Annotated[Path, arg(metavar="SPACE")]]
    """The space file."""
    models: Positional[Annotated[tuple[str, ...], arg(metavar="MODELS ...")]]
    """.w2wmodel files (their first model), or names of training models."""
    weights: tuple[float, ...] = ()
    """A weight per model; none: equal weights."""
    name: str = "blend"
    """Name of the files."""
    files: Files = Writing()

    def run(self) -> int:
        """0 on success."""
        from ..engine.w2w import W2WModel, blend

        space = space_at(self.space)
        rows = [model_of(space, source)[0].only(space) for source in self.models]
        mixed = blend(rows, self.weights or None)
        step = {"blend": {"models": list(self.models), "weights": list(self.weights)}}
        self.files.write(space, W2WModel(mixed[None], space.identity, (step,)), [self.name])
        return 0


@dataclass(frozen=True)
class Sheet:
    """Render sliders of the portraits dataset at five positions on held-out people, as
    one picture with classifier readings; about two minutes on one core per slider, or with --table for all."""

    out: OutFile = Path("sliders.jpg")
    """The picture, .jpg or .png."""
    labels: tuple[str, ...] = ()
    """Which sliders; none: all thirteen."""
    people: Count = 6
    """How many people."""
    calibrated: bool = False
    """Perceptually even positions, by maps fitted on other people, instead of even strengths."""
    table: Path | None = None
    """results/w2w.sliders.json, with the ends and maps of the sliders; none: they are measured
    on other people."""
    flow: bool = False
    """People of the flow portraits, 128 px; sliders end where they stop rising on other people."""

    def run(self) -> int:
        """0 on success."""
        from ..engine.runtime.progress import TqdmProgress
        from ..evidence.w2w.people import LABELS
        from ..evidence.w2w.sheet import Sheet as Drawn

        unknown = sorted(set(self.labels) - set(LABELS))
        if unknown or self.people < 1:
            shown = f"{', '.join(unknown) or 'all'} on {self.people} people"
            raise refuse("sliders", shown, f"{', '.join(LABELS)}, on 1 person or more", "leave --labels out for all")
        if self.flow and self.calibrated:
            raise refuse("calibrated", "with --flow", "even strengths there", "leave one of the two out")
        bar, labels = TqdmProgress("drawing"), self.labels or tuple(LABELS)
        if self.flow:
            drawn = Drawn.draw_flow(labels, self.people, progress=bar)
        else:
            drawn = Drawn.draw(labels, self.people, self.calibrated, progress=bar, table=self._measured())
        print(drawn.write(self.out))
        for label in drawn.pictures:
            print(f"{label}: {drawn.shown(label)}")
        return 0

    def _measured(self) -> dict[str, Any] | None:
        if self.table is None:
            return None
        with named(self.table, "table", "results/w2w.sliders.json", "leave it out"):
            return dict(parse_table(self.table.read_text(encoding="utf-8"))["details"])
