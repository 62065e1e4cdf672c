"""Arguments of the W2W commands: a space, a model of it, sliders, a base model's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..engine.io.file_names import as_name
from ..engine.io.folders import has_ending


def space_at(path: Path | None) -> Any:
    """The space in a file; none: the shipped people. A linked space's LoRAs may be below the working directory."""
    from ..engine.portraits.shipped import PEOPLE_SPACE
    from ..engine.w2w import load_space

    return load_space(path or PEOPLE_SPACE, [Path.cwd()])


def model_of(space: Any, source: str) -> tuple[Any, str]:
    """(saved model or training model by name, name for its files)."""
    from ..engine.w2w import W2WModel, member, official_model

    if has_ending(source, ".pt"):
        return official_model(Path(source), space), Path(source).stem
    if has_ending(source, ".safetensors"):
        return W2WModel.load(source).belongs(space), Path(source).name.removesuffix(".w2wmodel.safetensors")
    return member(space, source).model, as_name(source)


def tail_of(strengths: dict[str, float]) -> str:
    """The suffix of a file name that describes an edit."""
    return "".join(f"-{k.replace(' ', '_')}{v:+g}" for k, v in strengths.items())


def example_of(space: Any) -> str:
    """A label that can be edited."""
    return next(iter(space.directions), "beard")


def weights_at(path: Path | None) -> Any:
    """A base model's weights by layer; None without a path."""
    from ..engine.w2w import BaseWeights

    return None if path is None else BaseWeights.of_file(path)
