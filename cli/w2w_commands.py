"""`vitrine w2w train-loras | look | build | label | import-official`: spaces of models."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from ..engine.errors import refuse
from ..engine.pipelines.loading import LoadConfig
from ..engine.settings.option import Option
from ..engine.settings.setting_checks import Count, OutFile, OutFolder
from ..engine.settings.w2w_options import BuildConfig, LoraTrainConfig
from .options import Load, OutSpace, flags
from .w2w_arguments import space_at, weights_at
from .w2w_map import Map
from .w2w_models import Edit, Export, Invert, PairSlider, Sample, SliderLora

RECIPE = flags(LoraTrainConfig(), "steps", "batch", "rank", "lr")


@dataclass(frozen=True)
class TrainLoras:
    """Train one LoRA per subject, many at once; the same command resumes.

    FOLDER has one folder of pictures per subject; without one, people of a portraits model are trained, with a
    separate recipe.
    Processes divide the subjects: `--workers` on this machine's cores, or those that `torchrun` or
    `accelerate launch` starts.
    """

    folder: Positional[Annotated[Path | None, arg(metavar="[FOLDER]")]] = None
    """Folder of folders with pictures; none: the portraits dataset."""
    out: OutFolder = Path("w2w-loras")
    """Folder for the LoRA files, one per subject."""
    model: str = "portraits"
    """A Stable Diffusion 1.x / 2.x folder or hub id; without FOLDER portraits, flow (the 128 px ones), or a folder of
    such a model."""
    prompt: str = "sks person"
    """Prompt of every picture."""
    people: Count = 520
    """Number of people of the portraits dataset."""
    together: Count = 16
    """Models trained in one batch; increase on a larger GPU."""
    workers: Count | None = None
    """Processes of one thread, each with a copy of the model; none: one, and for portraits on the CPU one per core."""
    training: Annotated[LoraTrainConfig, RECIPE] = LoraTrainConfig()
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 when all are trained."""
        from ..engine.runtime.processes import cores, launched, side_by_side, world_size

        self._refuse_unread()
        small = self.folder is None or self.model == "portraits"
        count = (cores() if small else 1) if self.workers is None else self.workers
        if count < 1:
            raise refuse("workers", count, "1 or more", "leave it out for the default")
        if count > 1 and world_size() > 1:
            raise refuse("workers", count, "1 under torchrun or accelerate", "let one of the two start processes")
        trained = side_by_side(self._train, count) if count > 1 else [self._train()]
        launched().meet()  # other processes may still be training
        if not launched().index:
            print(f"{trained[0]} LoRAs in {self.out}")
        return 0

    def _refuse_unread(self) -> None:
        """Raises for settings that the portraits recipes do not use."""
        usual = TrainLoras()
        changed = [name for name in ("prompt", "load") if getattr(self, name) != getattr(usual, name)]
        mine, theirs = self.training.to_dict(), usual.training.to_dict()
        changed[1:1] = [name for name in mine if mine[name] != theirs[name]]
        if self.folder is None and changed:
            shown = f"{', '.join(changed)} without a folder of pictures"
            raise refuse("settings", shown, "out, model, people, together, workers", "give FOLDER, or leave them out")

    def _train(self, worker: int = 0, workers: int = 1) -> int:
        from ..engine.portraits.flow import FLOW_WEIGHTS
        from ..engine.runtime.processes import launched
        from ..engine.runtime.progress import TqdmProgress
        from ..engine.w2w import train_loras
        from ..evidence.w2w.people import train_people

        part = (worker, workers) if workers > 1 else (launched().index, launched().count)
        label = f"training, worker 1 of {part[1]}" if part[1] > 1 else "training"
        options: dict[str, Any] = {"together": self.together, "part": part}
        options["progress"] = TqdmProgress(label, not part[0])
        if self.folder is None:
            folder = {"portraits": None, "flow": str(FLOW_WEIGHTS)}.get(self.model, self.model)
            return len(train_people(self.out, self.people, model=folder, **options))
        from ..engine.pipelines.w2w_training import subjects_in

        denoiser, names, makers = subjects_in(self.folder, self.model, self.prompt, load=self.load)
        return len(train_loras(denoiser, makers, names, self.out, self.training, **options))


@dataclass(frozen=True)
class Look:
    """Inspect a folder of LoRAs before building: files, base models, ranks, copies, what is left out and why,
    and how similar the LoRAs are."""

    folder: Positional[Annotated[Path, arg(metavar="FOLDER")]]
    """LoRA files of any key format."""
    headers: bool = False
    """Read headers only: fast for large folders, but without copies, variance and mode."""
    memory_gb: float = 1.0
    """Memory for samples of the files; less makes the estimates coarser."""
    json: OutFile | None = None
    """Also write the report as JSON to this file."""
    base_weights: Path | None = None
    """As in build."""

    def run(self) -> int:
        """0 on success, also if no file is usable."""
        from ..engine.io.files import write_json
        from ..engine.runtime.progress import TqdmProgress
        from ..engine.w2w import look_at_folder

        bar, memory = TqdmProgress("reading"), int(self.memory_gb * 2**30)
        weights = weights_at(self.base_weights)
        look = look_at_folder(self.folder, memory=memory, progress=bar, headers_only=self.headers, base=weights)
        print(look.text())
        if self.json is not None:
            print(f"as JSON: {write_json(self.json, look.to_dict())}")
        return 0


@dataclass(frozen=True)
class Build:
    """Build a space from a folder of LoRA files, and directions from a table of labels. The same command resumes.

    Under `torchrun` or `accelerate launch` processes divide the work of factors mode.
    """

    folder: Positional[Annotated[Path, arg(metavar="FOLDER")]]
    """LoRA files of one kind and one base model."""
    out: OutFile = Path("space.w2w.safetensors")
    """The space."""
    labels: Path | None = None
    """CSV: model name, then one column per label."""
    method: str = "least_squares"
    """Of directions: least_squares (the paper's), logistic or means, each label separately; or joint, which keeps
    correlated labels constant and suits edits better."""
    exclusive: tuple[str, ...] = ()
    """Joint only: mutually exclusive labels, such as 'bald,long hair'."""
    portraits: bool = False
    """The folder has people of the portraits dataset: use their known labels."""
    how: Annotated[BuildConfig, flags(BuildConfig(), "mode", "components", "linked")] = BuildConfig()
    memory_gb: float = 2.0
    """Memory in addition to the space; larger folders use a work folder next to the space."""
    dtype: str = "float16"
    """Of components in the file: float32, float16 or bfloat16."""
    base_weights: Path | None = None
    """The base model's safetensors file, or diffusers' unet folder: with it DoRAs are also read."""

    def run(self) -> int:
        """0 on success; bad files are listed and left out."""
        from ..engine.runtime.processes import launched
        from ..engine.w2w import mapped
        from ..engine.w2w.space.linked_factors import linked_file, relative_path

        if self.how.linked:  # raises now, not after hours
            linked_file(self.out, relative_path(self.out, self.folder / "a.safetensors"), [Path.cwd()])
        work = self.out.with_name(self.out.name + ".work")
        space = self._space(work, launched())
        if space is None:
            return 0  # the first process continues
        if self.labels is not None:
            space = _labelled(space, self.labels, self.method, self.exclusive)
        print(f"space: {mapped(space).save(self.out, self.dtype)}")
        shutil.rmtree(work, ignore_errors=True)
        return 0

    def _space(self, work: Path, workers: Any) -> Any:
        """The space without directions from labels; None in all but the first process."""
        from ..engine.runtime.progress import TqdmProgress
        from ..engine.w2w import build_space
        from ..evidence.w2w.people import build_people

        bar = TqdmProgress("space", not workers.index)
        if self.portraits:
            if workers.index:
                return None
            space = build_people(self.folder, self.how.components or 300, bar)
            print(f"{space.count} people, directions {', '.join(space.directions)}")
            return space
        config = replace(self.how, memory=int(self.memory_gb * 2**30))
        weights = weights_at(self.base_weights)
        built = build_space(self.folder, config, bar, work, workers=workers, base=weights)
        if workers.index:
            return None
        print(built.summary())
        return built.space


@dataclass(frozen=True)
class Label:
    """Add directions from a table of labels, such as the published one, and default sampling settings to a space."""

    space: Positional[Annotated[Path, arg(metavar="SPACE")]]
    """A space file with the coefficients of its models."""
    labels: Positional[Annotated[Path | None, arg(metavar="[LABELS]")]] = None
    """CSV: model name, then one column per label. Models of a space without names are called 0, 1, 2 .."""
    sampling: tuple[str, ...] = ()
    """Default sampling settings in every interface, such as 'emphasis=1.5' 'inherit=0.4'; the names are
    the options of sample."""
    out: OutSpace = None
    """The space with directions; none: overwrites SPACE."""
    method: str = "least_squares"
    """As in build."""
    exclusive: tuple[str, ...] = ()
    """As in build."""
    dtype: str = "float16"
    """Of components in the file: float32, float16 or bfloat16."""

    def run(self) -> int:
        """0 on success."""
        from ..engine.w2w import usual_sampling, with_sampling

        if self.labels is None and not self.sampling:
            raise refuse("labels", "none", "a CSV file, or --sampling", "give one of the two")
        space = space_at(self.space)
        if self.labels is not None:
            space = _labelled(space, self.labels, self.method, self.exclusive)
        if self.sampling:
            space = with_sampling(space, usual_sampling(space, **dict(map(_setting, self.sampling))))
        print(f"space: {space.save(self.out or self.space, self.dtype)}")
        return 0


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    known = ("spread", "components", "truncation", "rng", "attributes", "emphasis", "inherit")
    try:
        kinds = {"components": int, "rng": str, "attributes": str}
        return known[known.index(name)], kinds.get(name, float)(value)
    except ValueError:
        raise refuse("sampling", text, f"{', '.join(known)}, each with a value", "write 'emphasis=1.5'") from None


def _labelled(space: Any, labels: Path, method: str, exclusive: tuple[str, ...]) -> Any:
    """The space with a direction per label; prints their accuracy."""
    from ..engine.w2w import mapped, member_names, quality, with_directions
    from ..engine.w2w.space.labels import read_table

    table = read_table(labels, member_names(space))
    space = mapped(with_directions(space, _directions(space, table, method, exclusive)), table)
    reader = "least_squares" if method == "joint" else method  # joint is for edits, not for reading
    for label, value in quality(space, table, reader).balanced.items():
        print(f"{label}: held-out accuracy {value:.1%} by {reader}, both classes equally")
    return space


def _directions(space: Any, table: dict[str, Any], method: str, exclusive: tuple[str, ...]) -> dict[str, Any]:
    from ..engine.w2w import direction, joint_directions

    if method != "joint":
        if exclusive:
            raise refuse("exclusive", exclusive, "--method joint", "add it, or leave exclusive out")
        return {k: direction(space, y, method) for k, y in table.items()}
    groups = [tuple(map(str.strip, group.split(","))) for group in exclusive]
    unknown = {label for group in groups for label in group} - set(table)
    if unknown:
        raise refuse("exclusive", sorted(unknown), sorted(table), "use the columns' names")
    return joint_directions(space, table, groups)


@dataclass(frozen=True)
class ImportOfficial:
    """Import the published weights2weights files, which you have downloaded, as a space. Nothing is unpickled."""

    folder: Positional[Annotated[Path, arg(metavar="FOLDER")]]
    """Folder with mean.pt, std.pt, V.pt, weight_dimensions.pt, optionally proj_1000pc.pt or all_weights.pt, and
    labels.csv, the converted table of labels, which are needed for sampling and labels."""
    out: OutFile = Path("official.w2w.safetensors")
    """The space; its licence is non-commercial, like that of the files."""
    components: Annotated[int, Option(ge=0)] = 1000
    """Columns of V to use; 0 uses all 10,000."""

    def run(self) -> int:
        """0 on success."""
        from ..engine.w2w import contents
        from ..engine.w2w.space.official_files import import_official

        space = import_official(self.folder, self.components or None)
        print(contents(space))
        if note := space.info.get("note"):
            print(note)
        print(f"space: {space.save(self.out, 'bfloat16')}")
        return 0


COMMANDS: dict[str, type] = {
    "train-loras": TrainLoras, "look": Look, "build": Build, "label": Label, "sample": Sample, "edit": Edit,
    "invert": Invert, "export": Export, "map": Map, "slider": SliderLora, "pairs": PairSlider,
    "import-official": ImportOfficial,
}  # fmt: skip
