"""The components of a pipeline as inputs of a job that resumes."""

from __future__ import annotations

from typing import Any

_TEXT = ("text_encoder", "tokenizer")


def components_of(pipe: Any, without: tuple[str, ...] = ()) -> dict[str, object]:
    """Name -> network, scheduler, tokenizer or processor, for a :class:`~vitrine.engine.run.Run`.

    Args:
        without: names, or how they begin, of what the job's numbers do not depend on.
    """
    parts = {name: part for name, part in pipe.components.items() if part is not None}
    flags = {k: v for k, v in pipe.config.items() if k not in pipe.components and not k.startswith("_")}
    chosen = {name.replace("_", " "): part for name, part in parts.items() if not name.startswith(without or ("/",))}
    return chosen | {"pipeline": flags}


def text_parts_of(pipe: Any) -> dict[str, object]:
    """Text encoders and tokenizers alone: what the states of a prompt depend on."""
    parts = {name: part for name, part in pipe.components.items() if part is not None}
    return {name.replace("_", " "): part for name, part in parts.items() if name.startswith(_TEXT)}
