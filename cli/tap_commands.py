"""`vitrine taps rank`: ranks a model's sites on your pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from ..engine.errors import refuse
from ..engine.pipelines.loading import LoadConfig
from ..engine.settings.ranking_options import RankingConfig
from ..engine.settings.setting_checks import Count, OutFile, OutFolder, Side
from .options import Load, flags


@dataclass(frozen=True)
class Rank:
    """Filter a model's sites by noise, granularity and locality, compare the rest, write a preset file.

    They are compared on masks, or on keypoints.

    Under `torchrun` or `accelerate launch` processes divide the pictures.
    """

    pictures: Positional[Annotated[Path, arg(metavar="PICTURES")]]
    """Folder of pictures; four or more."""
    masks: Path | None = None
    """Folder of masks with the same file names (grey values are class indices, 255 unknown). Without it, only the
    filter runs."""
    classes: Count = 2
    """Number of classes in the masks."""
    keypoints: Path | None = None
    """Instead of masks, a JSON table: picture's file name -> [[x, y], null, ...], fractions of width and height, the
    same points in the same order for each; null if hidden."""
    model: str = "portraits"
    """Pipeline folder, hub id or file of a supported model."""
    prompt: str = ""
    """One plain prompt for all pictures."""
    size: Side | None = None
    """Side to which pictures are resized; 512 for SD1.5. None takes the model's default."""
    ranking: Annotated[RankingConfig, flags(RankingConfig(), "timestep", "budget", "most", "split", "folds")] = (
        RankingConfig()
    )
    out: OutFile = Path("feature-preset.json")
    """The preset file."""
    state: OutFolder | None = None
    """Folder for finished scores and for activations; the same command resumes from it. Several processes need it."""
    memory: str = "4GB"
    """Memory in addition to the model and one forward; more is stored in the state's folder."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 on success."""
        from ..engine.pipelines import ActivationTapPipeline
        from ..engine.pipelines.loading import load_pipeline
        from ..engine.runtime.processes import launched
        from ..engine.runtime.progress import TqdmProgress

        if not self.pictures.is_dir():
            raise refuse("pictures", str(self.pictures), "a folder of pictures", "check the path")
        pictures, workers = self._pictures(), launched()
        points = None if self.keypoints is None else self._points(pictures)
        pipe = load_pipeline(self.model, ActivationTapPipeline, self.load)
        ranking = pipe.rank(
            pictures,
            prompt=self.prompt,
            keypoints=points,
            config=self.ranking,
            size=self.size,
            state=self.state,
            memory=self.memory,
            progress=TqdmProgress("ranking", not workers.index),
            workers=workers,
        )
        if not workers.index:
            ranking.preset(self.out.stem, pipe._network, self.ranking.timestep).save(self.out)
            print(ranking.summary())
            print(f"preset -> {self.out}")
        return 0

    def _pictures(self) -> Any:
        """The folder with its masks, or the files."""
        from ..engine.activations.ranked_pictures import read_masks
        from ..engine.io.picture_files import pictures_in

        if self.masks is not None and self.keypoints is not None:
            raise refuse("--keypoints", "and --masks", "one of them", "rank by each, and compare")
        if self.masks is not None:
            return read_masks(self.pictures, self.masks, self.classes)
        files = pictures_in(self.pictures)
        if len(files) < 2:
            raise refuse("pictures", f"{len(files)} in {self.pictures.name}", "two or more", "choose another folder")
        return files

    def _points(self, files: list[Path]) -> list[list[list[float]]]:
        """(B, K, 2) from the JSON table."""
        from ..engine.io.files import named, parse_table

        assert self.keypoints is not None
        hidden = [float("nan")] * 2
        with named(self.keypoints, "keypoints", "a JSON table: file name -> [[x, y], null, ...]", "see --help"):
            table = parse_table(self.keypoints.read_text(encoding="utf-8"))
            rows = {name: [hidden if p is None else [float(p[0]), float(p[1])] for p in table[name]] for name in table}
        missing = [f.name for f in files if f.name not in rows]
        if missing or len({len(rows[f.name]) for f in files}) > 1:
            shown = f"without {missing[:3]}" if missing else "rows of several lengths"
            raise refuse("keypoints", shown, "the same number of points per picture", "null if hidden")
        return [rows[f.name] for f in files]


COMMANDS: dict[str, type] = {"rank": Rank}
