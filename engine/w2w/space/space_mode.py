"""Chooses the mode of a space, factors or products, by what a folder's LoRAs have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...errors import VitrineError, refuse
from ...io.lora_layer import LoraLayer
from ..loras.adapters import Entry
from ..loras.gauge import Gauge
from ..loras.lora_files import LoraFile, read_lora
from ..loras.lora_folders import FolderScan

_COMPARED = 48
"""Most LoRAs whose factors are compared to choose the mode."""


def unlike(scan: FolderScan) -> str:
    """Why the factors do not form a matrix, or empty."""
    first = scan.good[0].entries
    for file in scan.good[1:]:
        if file.entries is first:
            continue
        if set(file.entries) != set(first):
            return f"{file.name} has {len(file.entries)} layers, {scan.good[0].name} {len(first)}"
        odd = next((p for p, e in file.entries.items() if (e.down, e.up) != (first[p].down, first[p].up)), None)
        if odd:
            ranks = file.entries[odd].down[0], first[odd].down[0]
            return f"{file.name} has rank {ranks[0]}, {scan.good[0].name} rank {ranks[1]}"
    return ""


def choose_mode(requested: str, mixed: str, gauge: Gauge) -> tuple[str, str]:
    """(mode, reason); ``mixed`` is the result of :func:`unlike`."""
    if requested == "delta":
        return "delta", "as requested"
    if mixed:
        if requested == "factors":
            raise refuse("mode", f"factors, but {mixed}", "one set of layers and one rank", "use delta or auto")
        return "delta", mixed
    if requested == "factors" and not gauge.shared:
        advice = "if people look wrong, build it again with mode delta"
        return "factors", f"as requested, although {gauge.reason()}: {advice}"
    return ("factors" if gauge.shared else "delta"), gauge.reason()


def some_readable(files: Sequence[LoraFile], memory: int) -> list[dict[str, LoraLayer]]:
    """LoRAs evenly sampled from the folder, as many as fit into a part of the memory, without unreadable ones."""
    largest = max(_bytes(entries) for entries in {id(f.entries): f.entries for f in files}.values())
    most = max(2, min(_COMPARED, memory // 4 // largest))
    picked = sorted({int(i) for i in np.linspace(0, len(files) - 1, min(most, len(files))).round()})
    loras = [lora for lora in (read_or_problem(files[i])[0] for i in picked) if lora is not None]
    if not loras:
        raise refuse("folder", "no readable LoRA", "two or more", "download the files again")
    return loras


def read_or_problem(file: LoraFile) -> tuple[dict[str, LoraLayer] | None, str]:
    """(LoRA, "") or (None, problem)."""
    try:
        return read_lora(file), ""
    except VitrineError as error:
        return None, str(error)


def _bytes(entries: dict[str, Entry]) -> int:
    """Bytes of a LoRA in float32."""
    return 4 * sum(math.prod(e.down) + math.prod(e.up) for e in entries.values())
