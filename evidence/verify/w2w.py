"""weights2weights on its published space and base: a model from one photo, and how like the person its pictures are."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...engine.activations.picture_latents import to_pixels
from ...engine.errors import refuse
from ...engine.io.files import open_artefact
from ...engine.io.picture_files import PICTURES, open_picture, pictures_in
from ...engine.io.table_on_disk import RowFile
from ...engine.jobs.digests import digest
from ...engine.w2w import Space, W2WModel, load_space
from ...engine.w2w.space.manifest import Manifest
from ...engine.w2w.space.official_files import import_official, official_manifest
from ...engine.w2w.space.space import KIND, LINKED_VERSION, WeightSpace
from ..intervals import mean_interval
from .context import SETTINGS, Context
from .estimate import ENCODING
from .judge import Judge, face_descriptor, pixels
from .protocol import check
from .records import Estimate, Figure, Measured, Need, Published

PAPER = "weights2weights (Dravid et al., NeurIPS 2024)"
SPACE = Need(
    "weights2weights",
    "folder with mean.pt, std.pt, V.pt and weight_dimensions.pt of the published space (4 GB)",
    "huggingface.co/Snapchat/weights2weights, files/",
    "non-commercial, academic use: see its page",
    ("*.w2w.safetensors",),
)
PHOTOS = Need(
    "faces",
    "photos of one face each; the paper took 100 of FFHQ",
    "github.com/NVlabs/ffhq-dataset",
    "CC BY-NC-SA 4.0, and each photo its own",
)
FACE = Need(
    "facenet.torchscript.pt",
    "a face recogniser, which the published identities are",
    "github.com/timesler/facenet-pytorch, traced by you",
    "code MIT; weights trained on VGGFace2: see its page",
    optional=True,
    option="face",
)
BASE, DATA = "RealisticVision 5.1 (SD1.5), 10,000 components", "100 FFHQ photos"
_OPEN = (
    "The paper crops faces by MTCNN and does not name FaceNet's weights, its prompts or the number of its pictures; "
    "here whole pictures are squeezed to what the recogniser takes."
)
_RERUN = "A fork's log of the official inversion; range over photos 0.004 to 0.843. The error is given as +-."
PUBLISHED = (
    Published("w2w.face.identity", "identity of models from one photo", 0.64, 0.01, BASE, DATA,
              "weights2weights, Tables 2 and 4", _OPEN),
    Published("w2w.face.identity.again", "the same, rerun by others", 0.557, 0.017, BASE, DATA,
              "github.com/fzmautner/weights2weights-", _RERUN),
    Published("w2w.face.lora", "a LoRA trained on the one photo", 0.43, 0.03, BASE, DATA,
              "weights2weights, Tables 2 and 4"),
)  # fmt: skip


def fits(context: Context) -> str:
    """Why the space is of another model than this; empty where it fits, or is not there yet."""
    path = context.path(SPACE)
    if path is None:
        return ""
    manifest = _manifest(path)
    if manifest is None:
        return f"{path.name} is a space of whole weights; the published one, and this claim, are of a LoRA's factors"
    shapes = {name: tuple(p.shape) for name, p in context.network.named_parameters()}
    for layer in manifest:
        shape = shapes.get(f"{layer.path}.weight")
        if shape is None or shape[:2] != (layer.up[0], layer.down[1]):
            has = "no such layer" if shape is None else f"{shape[0]} x {shape[1]}"
            return f"{path.name} is a space of another base ({layer.path}: {layer.up[0]} x {layer.down[1]}, here {has})"
    return ""


def prepare(context: Context) -> Estimate:
    """An inversion of each photo, a row forward and two backward, and the pictures of its model."""
    settings, pace = context.settings.inversion, context.pace
    invert, path = settings.invert, context.path(SPACE)
    photos = len(_photos(context)[0]) if context.path(PHOTOS) else len(context.chosen(settings.photos))
    held = 0 if path is None else 2 * sum(f.stat().st_size for f in _files(path))
    rows = photos * (3 * invert.steps * invert.batch + 8 * (invert.steps // invert.check_every) + ENCODING)
    pictures = (photos + 1) * settings.pictures
    why = f"{photos} photos, {invert.steps} steps each and {settings.pictures} pictures of each model; with gradients"
    made = pace.sampling(rows, pictures, settings.steps, context.budget, why)
    return Estimate(made.rows, made.seconds, max(made.bytes, 4 * invert.batch * pace.row) + held, why)


@check(
    "w2w.inversion",
    paper=PAPER,
    families=("SD",),
    needs=(SPACE, PHOTOS, FACE, SETTINGS),
    published=PUBLISHED,
    prepare=prepare,
    fits=fits,
)
def inversion(context: Context) -> Measured:
    """Photos inverted one by one, pictures of the models, and their likeness to the photo, to others', and without."""
    settings, judge = context.settings.inversion, _judge(context)
    paths, whole = _photos(context)
    space = _space(context)
    rows = _inverted(context, space, paths)
    made = _drawn(context, judge, space, torch.cat([rows, torch.zeros(1, rows.shape[1])]))
    of_photos = torch.stack([judge.describe(_photo(context, path))[0] for path in paths])
    usual = made[-1]  # of the mean model

    def alike(pictures: torch.Tensor, shift: int = 0) -> torch.Tensor:
        photos = of_photos.roll(-shift, 0)
        pairs = zip(pictures, photos, strict=True)
        return torch.stack([judge.similarity(each, photo[None], usual).mean() for each, photo in pairs])

    own, mean = alike(made[:-1]), alike(usual.expand(len(paths), -1, -1))
    values = {
        "identity": ("models from one photo", own),
        "mean": ("the space's mean model", mean),
        "stranger": ("models from one photo, against another person's", alike(made[:-1], 1)),
        "gain": ("models from one photo, less the mean model", own - mean),
    }
    figures = {f"w2w.{judge.key}.{k}": _figure(f"{judge.name}, {words}", v) for k, (words, v) in values.items()}
    missing = {"w2w.face.lora": "no LoRA is trained here"}
    if judge.key == "face":
        figures["w2w.face.identity.again"] = figures["w2w.face.identity"]
    else:
        missing |= {p.key: f"needs {FACE.short}" for p in PUBLISHED[:2]}
    notes = [
        "a model is compared with the photo it was made from, as published, without cropping",
        f"computed in {context.dtype} with coefficients in float32, the authors all in bfloat16",
    ]
    notes += [f"a space of {space.dimension} components"] if space.dimension != settings.invert.components else []
    notes += context.usual_notes("inversion", autocast=False)
    differs = [*context.subset_note(len(paths), whole, "photos"), *notes]
    return Measured(figures, tuple(differs), missing, {"judge": judge.name, "pictures of each model": made.shape[1]})


def _judge(context: Context) -> Judge:
    """The user's face recogniser, the embedded dataset's own classifier, or else pixels."""
    if (path := context.path(FACE)) is not None:
        return Judge("face", "identity (cosine of the face recogniser's)", 0.0, False, face_descriptor(path))
    if context.asked.world:
        return Judge("readout", "identity (cosine of the classifier's)", 0.0, False, _features)
    return pixels()


def _features(pictures: torch.Tensor) -> torch.Tensor:
    """(n, 24) of (n, 3, 64, 64), by the classifier that ships for the embedded dataset."""
    from ..portraits.classifier import load_classifier, read
    from ..portraits.identities import identity_features

    return identity_features(read(load_classifier(), pictures))


# --- the data -----------------------------------------------------------------------------------------------------
def _files(path: Path) -> list[Path]:
    return [f for f in sorted(path.rglob("*")) if f.is_file()] if path.is_dir() else [path]


def _folder(path: Path) -> Path:
    """The folder with the published tensors, also in a clone of the page's repository."""
    return path / "files" if (path / "files" / "V.pt").is_file() else path


def _manifest(path: Path) -> Manifest | None:
    """Of the space, without its tensors; None of one that has none."""
    if path.is_dir():
        return official_manifest(_folder(path))
    header = open_artefact(path, KIND, LINKED_VERSION)[1]
    return Manifest.from_json(header["manifest"]) if header.get("mode") == WeightSpace.mode else None


def _space(context: Context) -> Space:
    path = context.path(SPACE)
    assert path is not None  # a check does not run without what it needs
    return (
        import_official(_folder(path), context.settings.inversion.invert.components)
        if path.is_dir()
        else (load_space(path))
    )


def _photos(context: Context) -> tuple[list[Path], int]:
    """The subset of the photos, and how many there are."""
    folder = context.path(PHOTOS)
    assert folder is not None
    paths = pictures_in(folder, deep=True)
    if len(paths) < 2:
        raise refuse(
            PHOTOS.file, f"{len(paths)} pictures", "two or more, " + ", ".join(PICTURES), PHOTOS.where_published
        )
    order = [paths[i] for i in context.chosen(len(paths))]
    return order[: context.settings.inversion.photos], len(paths)


def _photo(context: Context, path: Path) -> torch.Tensor:
    """(1, 3, S, S) in [0, 1], squeezed to the model's own size."""
    side = max(context.w2w._adapter.trained_size())
    return (to_pixels(open_picture(path), side) + 1) / 2


# --- the work -----------------------------------------------------------------------------------------------------
def _facts(context: Context, space: Space, paths: Sequence[Path]) -> list[Any]:
    settings = context.settings.inversion
    return [settings.invert.to_dict(), settings.prompt, digest(space), [context.sums.of(path) for path in paths]]


def _inverted(context: Context, space: Space, paths: Sequence[Path]) -> torch.Tensor:
    """(N, K) coefficients; a kill costs the steps since an inversion's last check."""
    facts, settings, bar = _facts(context, space, paths), context.settings.inversion, context.bar("inversions")
    folder = context.state("inversions", facts)
    with RowFile(folder, (len(paths), space.dimension)) as table:
        for i, path in enumerate(paths):
            if not table.done[i]:
                unfinished = folder / f"photo-{i:04d}"
                model, _ = context.w2w.invert_image(
                    space, _photo(context, path), settings.prompt, settings.invert, folder=unfinished
                )
                table.write(i, model.coefficients)
                shutil.rmtree(unfinished, ignore_errors=True)
            bar(i + 1, len(paths), None)
        return table.rows(range(len(paths)))


def _drawn(context: Context, judge: Judge, space: Space, rows: torch.Tensor) -> torch.Tensor:
    """(M, S, D) descriptors of the pictures of M models (M, K), kept model by model."""
    settings, bar = context.settings.inversion, context.bar("pictures")
    sampling = [settings.prompt, settings.pictures, settings.steps, settings.guidance, digest(space)]
    facts = [judge.key, *context.data_sums_of("face"), sampling, rows]
    width = judge.describe(torch.zeros(1, 3, 64, 64)).shape[1]
    with RowFile(context.state("models", facts), (len(rows), settings.pictures * width)) as table:
        for i in range(len(rows)):
            if not table.done[i]:
                table.write(i, judge.describe(_pictures(context, space, rows[i : i + 1])).flatten()[None])
            bar(i + 1, len(rows), None)
        return table.rows(range(len(rows))).view(len(rows), settings.pictures, width)


def _pictures(context: Context, space: Space, row: torch.Tensor) -> torch.Tensor:
    """(S, 3, H, W) in [0, 1] of one model, as many together as the budget allows."""
    settings, images = context.settings.inversion, []
    together = context.pace.pictures_within(context.budget, settings.pictures)
    for start in range(0, settings.pictures, together):
        seeds = list(range(start, min(start + together, settings.pictures)))
        images.append(context.w2w(
            settings.prompt, space=space, model=W2WModel(row, space.identity, ()), seeds=seeds, output_type="pt",
            num_inference_steps=settings.steps, guidance_scale=settings.guidance,
        ).images.float().cpu().clamp(0, 1))  # fmt: skip
    return torch.cat(images)


def _figure(what: str, values: torch.Tensor) -> Figure:
    """Mean over photos, drawn anew for its interval, and its standard error, as the paper seems to print it."""
    error = round(float(values.std() / len(values) ** 0.5), 4)
    return Figure(what, round(float(values.mean()), 4), mean_interval(values), len(values), error)
