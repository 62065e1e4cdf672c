"""`vitrine w2w map`: all models of a space on one page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from ..engine.errors import refuse
from ..engine.settings.setting_checks import OutFile
from .w2w_arguments import space_at

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Map:
    """Show all models of a space on one self-contained HTML page: points or thumbnails, coloured by a
    selectable label, with neighbours and distances."""

    space: Positional[Annotated[Path | None, arg(metavar="[SPACE]")]] = None
    """A space file; none: the shipped people."""
    out: OutFile = Path("map.html")
    """The page."""
    thumbnails: Path | None = None
    """A folder of pictures with the models' names, such as anna.png."""
    labels: Path | None = None
    """CSV: model name, then one column per label, in addition to the space's directions."""
    method: str = "auto"
    """auto (the map in the file, else neighbours up to 3,000 models), neighbours (t-SNE), or components (the first
    two)."""
    seed: int = 0
    """Seed of the layout by neighbours."""
    store: bool = False
    """Also write coordinates and labels into the space file."""
    dtype: str = "float16"
    """With store, dtype of components in the file: float32, float16 or bfloat16."""

    def run(self) -> int:
        """0 on success."""
        from ..engine.runtime.progress import TqdmProgress
        from ..engine.w2w import map_of, map_page, member_names, with_map
        from ..engine.w2w.space.labels import read_table

        if self.store and self.space is None:
            raise refuse("store", "the shipped space", "a space file of your own", "name it, or leave --store out")
        space = space_at(self.space)
        names = member_names(space)
        labels = read_table(self.labels, names) if self.labels else {}
        drawn = map_of(space, labels, self.method, self.seed, TqdmProgress("laying out"))
        pictures = _pictures(self.thumbnails, names)
        page = map_page(space, drawn, pictures)
        print(
            f"{page.write(self.out)}: {len(names)} models, {len(pictures)} thumbnails, "
            f"{drawn.kept:.0%} of neighbours kept (by chance {drawn.chance:.0%})"
        )
        if self.store and self.space is not None:
            print(f"space: {with_map(space, drawn, labels).save(self.space, self.dtype)}")
        return 0


def _pictures(folder: Path | None, names: Any) -> dict[str, Image]:
    """Model name -> its picture, 48 pixels; by the full name or its last part."""
    from ..engine.io.picture_files import open_rgb, pictures_in

    if folder is None:
        return {}
    if not folder.is_dir():
        raise refuse("thumbnails", folder.name, "a folder of pictures with the models' names", "check the path")
    files = {path.stem: path for path in pictures_in(folder)}
    matched = {name: files.get(name, files.get(Path(name).name)) for name in names}
    return {name: open_rgb(path).resize((48, 48)) for name, path in matched.items() if path is not None}
