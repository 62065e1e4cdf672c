"""Encoded prompts of a long list, encoded in chunks into a file and read on demand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..errors import refuse
from ..io.table_on_disk import RowFile
from ..network.condition import Condition
from ..runtime.processes import ALONE, Workers
from ..runtime.progress import Progress, silent
from .run import Run

CHUNK = 64
"""Prompts encoded together. The number is fixed, so that a text's states do not depend on its chunk or process."""

Encode = Callable[[Sequence[str]], Condition]
"""n texts -> a condition of n rows."""


class StoredText:
    """A lazily read :class:`Condition` for lists of prompts that are too large for memory.

    Attributes:
        count: how many prompts.
        inputs: the digest of the prompts and what encoded them.
    """

    def __init__(self, table: RowFile, row: Condition, inputs: str = "") -> None:
        self._table, self._one, self.count, self.inputs = table, row, table.shape[0], inputs

    def take(self, rows: torch.Tensor) -> Condition:
        """Batch rows by index, with repetition."""
        parts = dict(_parts(self._one))
        columns = self._table.rows(rows.tolist()).split([math.prod(p.shape[1:]) for p in parts.values()], 1)
        tensors = {
            name: values.reshape(-1, *part.shape[1:]).to(part.dtype)
            for (name, part), values in zip(parts.items(), columns, strict=True)
        }
        return Condition(tensors.pop("text", None), tensors.pop("pooled", None), tensors)

    @classmethod
    def encoded(
        cls,
        texts: Sequence[str],
        encode: Encode,
        folder: str | Path,
        identity: object,
        progress: Progress = silent,
        workers: Workers = ALONE,
    ) -> StoredText:
        """Encodes the texts that are not in the folder yet; resumes after an interruption or a kill.

        Args:
            identity: what the states depend on in addition to the texts: text encoders and their settings.
            workers: processes that share the chunks and see the folder.
        """
        row = encode(texts[:1]).to("cpu")
        inputs = {"prompts": list(texts), "text encoders": identity}
        with Run(folder, "text states", inputs, ("rows.json",), workers) as run:
            # float32 represents every narrower dtype exactly
            table = RowFile(folder, (len(texts), sum(p.numel() for _, p in _parts(row))))
            starts = range(0, len(texts), CHUNK)
            own = [starts[i] for i in workers.part(len(starts))]
            for number, start in enumerate(own):
                chunk = texts[start : start + CHUNK]
                if not table.done[start : start + len(chunk)].all():
                    cond = encode(chunk)
                    if not cond.alike(row):
                        shown = "text states of unequal length"
                        raise refuse("prompts", shown, "states of one length in a folder", "allow more memory")
                    parts = [part.to("cpu").float().flatten(1) for _, part in _parts(cond)]
                    table.write(start, torch.cat(parts, 1))
                progress(number + 1, len(own))
            workers.meet()
        return cls(table, row, run.mark)


@dataclass(frozen=True)
class KnownText(Condition):
    """A condition that records its inputs, since encoding again may round differently.

    Attributes:
        inputs: prompts and text encoders, by name.
    """

    inputs: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, cond: Condition, inputs: Mapping[str, object]) -> KnownText:
        """The same condition with its inputs recorded."""
        return cls(cond.text, cond.pooled, cond.extra, cond.fixed, inputs)


def in_memory(texts: Sequence[str], encode: Encode) -> Condition:
    """Encodes all texts at once, to the same numbers as :meth:`StoredText.encoded`.

    Pipelines that encode prompts at different lengths also read a padding mask, so shorter chunks are padded.
    """
    chunks = [encode(texts[i : i + CHUNK]).to("cpu") for i in range(0, len(texts), CHUNK)]
    if all(chunk.alike(chunks[0]) for chunk in chunks):
        return Condition.batch(chunks)
    length = max(chunk.text.shape[1] for chunk in chunks if chunk.text is not None)
    return Condition.batch([chunk.padded(length) for chunk in chunks])


def row_bytes(row: Condition) -> int:
    """Bytes of a condition with one batch row."""
    return sum(part.nbytes for _, part in _parts(row))


def _parts(cond: Condition) -> list[tuple[str, torch.Tensor]]:
    """Every tensor of a condition by name."""
    pairs = {"text": cond.text, "pooled": cond.pooled} | cond.extra
    return [(name, value) for name, value in pairs.items() if value is not None]
