"""Facts from a LoRA file's header: trainer, training settings, trigger words, licence."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import VitrineError, printable
from ...families.header_names import base_in_header
from ...io.files import KEY, named
from ...io.number_checks import integer
from .base_models import families_of
from .base_weights import BaseWeights
from .lora_files import LoraFile, name_of, read_header
from .lora_settings import SETTINGS

COMMON = 0.8
"""A tag of at least this fraction of the training images may be a trigger word."""
_TRIGGERS = (
    "modelspec.trigger_phrase",
    "trigger_phrase",
    "trigger_word",
    "trigger_words",
    "instance_prompt",
    "activation text",
    "ss_trigger_words",
)
_LICENCES = ("modelspec.license", "license", "licence")
_TRAINING = {
    "ss_steps": "steps",
    "ss_max_train_steps": "steps planned",
    "ss_num_epochs": "epochs",
    "ss_num_train_images": "pictures with repeats",
    "ss_learning_rate": "learning rate",
    "ss_unet_lr": "rate of the UNet",
    "ss_text_encoder_lr": "rate of the text encoder",
    "ss_network_dim": "rank",
    "ss_resolution": "resolution",
    "ss_optimizer": "optimizer",
    "ss_network_args": "network",
    "ss_caption_dropout_rate": "caption dropout",
    "modelspec.date": "date",
    "modelspec.author": "author",
    "modelspec.title": "title",
}
"""Keys of kohya's and Stability's headers -> display names."""


@dataclass(frozen=True)
class LoraFacts:
    """Facts from a LoRA file's header.

    Attributes:
        path: the file.
        bytes: its size.
        file: its layers; None if the file is refused.
        problem: why it is refused, or empty.
        trainer: the program that wrote it, and the evidence for that.
        training: known training settings, by name.
        licence: as stated in the file, or empty.
        triggers: trigger words; empty if the file has none.
        trigger_source: their key in the file.
        tags: caption tag -> number of images, most frequent first, from kohya's header.
    """

    path: Path
    bytes: int
    file: LoraFile | None
    problem: str
    trainer: str
    training: Mapping[str, str] = field(default_factory=dict)
    licence: str = ""
    triggers: tuple[str, ...] = ()
    trigger_source: str = ""
    tags: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As :func:`name_of`."""
        return name_of(self.path)

    @property
    def not_known(self) -> list[tuple[str, str]]:
        """What the file does not say or contradicts, as (what, what to do)."""
        known = self.file
        notes: list[tuple[str, str]] = []
        if known is None:
            return []
        if not families_of(tuple(known.entries)):
            sentence = "Its layers are no modules of an image model known here."
            notes.append((sentence, "Is it an image model's? Give its base model to load it."))
        named = base_in_header(known.said_base)
        if named and known.shaped_base and named not in known.shaped_base:
            sentence = f"Its header names {known.said_base}, its layers are of {known.shaped_base}."
            notes.append((sentence, "Choose the base model by its layers, or ask who made it."))
        rank = self.training.get("rank", "")
        plain = all(entry.kind == "LoRA" and not entry.decomposed for entry in known.entries.values())
        if plain and rank.isdecimal() and int(rank) not in known.ranks:
            sentence = f"Its header names rank {rank}, its layers have {', '.join(map(str, known.ranks))}."
            notes.append((sentence, "The layers count: its header may be of another file."))
        alone = self.path.stem == "adapter_model" or known.dialect == "PEFT"
        if alone and any(entry.alpha is None for entry in known.entries.values()):
            several = self.path.with_name(SETTINGS).is_file()
            which = f"{SETTINGS} is next to several files" if several else f"Its {SETTINGS} is missing"
            sentence = f"{which}: alpha is not known, and the rank is taken for it."
            notes.append((sentence, f"Put {SETTINGS} next to it, in a folder of their own."))
        return notes

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        known = self.file
        facts: dict[str, Any] = {
            "name": self.name,
            "file": printable(self.path.name),
            "bytes": self.bytes,
            "trainer": self.trainer,
            "training": dict(self.training),
            "licence": self.licence,
            "trigger_words": list(self.triggers),
            "trigger_words_from": self.trigger_source,
            "tags": dict(list(self.tags.items())[:20]),
            "refused": self.problem,
            "not_known": [sentence for sentence, _ in self.not_known],
        }
        if known is not None:
            alphas = sorted({entry.alpha for entry in known.entries.values() if entry.alpha is not None})
            kinds = Counter("DoRA" if e.decomposed else e.kind for e in known.entries.values())
            facts |= {
                "spelling": known.dialect,
                "layers": len(known.entries),
                "text_encoder_layers": known.text_layers,
                "ranks": known.ranks,
                "alphas": alphas,
                "no_alpha": any(entry.alpha is None for entry in known.entries.values()),
                "dtypes": list(known.dtypes),
                "kinds": dict(kinds),
                "left_out": list(known.dropped),
                "base_by_layers": known.shaped_base,
                "base_by_header": known.said_base,
            }
        return facts


def facts_of(path: str | Path, base: BaseWeights | None = None) -> LoraFacts:
    """The facts of one file; ``problem`` has the error for a file that is not a LoRA.

    Args:
        base: weights of the base model, which a DoRA needs.
    """
    path = Path(path)
    with named(path, "LoRA file", "a .safetensors file", "check the path"):
        size = path.stat().st_size
    try:
        known, problem = read_header(path, base=base), ""
    except VitrineError as error:
        known, problem = None, str(error)
    header = _metadata(path) if path.is_file() else {}  # a pipe would be waited for
    tags = _tags(header)
    words, source = _triggers(header, tags)
    training = {label: printable(header[key])[:120] for key, label in _TRAINING.items() if _said(header, key)}
    licence = next((printable(header[key])[:120] for key in _LICENCES if _said(header, key)), "")
    return LoraFacts(
        path,
        size,
        known,
        problem,
        _trainer(header, known, path),
        training | _pictures(header),
        licence,
        words,
        source,
        tags,
    )


def _metadata(path: Path) -> dict[str, str]:
    """The header's texts; {} if the file is damaged, which :func:`read_header` refuses."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as opened:
            return dict(opened.metadata() or {})
    except (OSError, SafetensorError, ValueError):
        return {}


def _said(header: Mapping[str, str], key: str) -> bool:
    return header.get(key, "None") not in ("", "None", "null", "{}")


def _trainer(header: Mapping[str, str], known: LoraFile | None, path: Path) -> str:
    """By the header, else by the key format, which several programs may share."""
    if KEY in header:
        return "Vitrine (header)"
    if "ai-toolkit" in header.get("software", ""):
        return "AI Toolkit (header)"
    if any(key.startswith("ot_") for key in header):
        return "OneTrainer (header)"
    module = header.get("ss_network_module", "")
    if module:
        kind = "LyCORIS on kohya's scripts" if "lycoris" in module else "kohya's scripts"
        return f"{kind} (header: {printable(module)[:40]})"
    if "lora_adapter_metadata" in header:
        return "diffusers (header)"
    if path.with_name("adapter_config.json").is_file() and path.stem == "adapter_model":
        return "PEFT (adapter_config.json in its folder)"
    if known is None:
        return "not known"
    return f"not stated; the keys have {known.dialect}'s format"


def _tags(header: Mapping[str, str]) -> dict[str, int]:
    """kohya's counts of caption tags, over all image folders."""
    counts: Counter[str] = Counter()
    for folder in _table(header.get("ss_tag_frequency")).values():
        for tag, count in folder.items() if isinstance(folder, dict) else ():
            with suppress(VitrineError):
                counts[printable(str(tag)).strip()[:200]] += integer(count, "tag count")
    return dict(counts.most_common(200))


def _table(text: str | None) -> dict[str, Any]:
    try:
        table = json.loads(text or "{}")
    except (ValueError, RecursionError):  # also numbers of more than 4,300 digits
        return {}
    return table if isinstance(table, dict) else {}


def _folders(header: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """kohya's image folders: name without its repeats -> (repeats, images)."""
    folders: dict[str, tuple[int, int]] = {}
    for name, facts in _table(header.get("ss_dataset_dirs")).items():
        table = facts if isinstance(facts, dict) else {}
        with suppress(VitrineError):
            counts = integer(table.get("n_repeats"), "repeats"), integer(table.get("img_count"), "pictures")
            folders[re.sub(r"^\d+_", "", printable(str(name)))] = counts
    return folders


def _pictures(header: Mapping[str, str]) -> dict[str, str]:
    folders = _folders(header).values()
    return {"pictures": f"{sum(n for _, n in folders)}, repeated {max(r for r, _ in folders)} times"} if folders else {}


def _triggers(header: Mapping[str, str], tags: Mapping[str, int]) -> tuple[tuple[str, ...], str]:
    """Trigger words and their key."""
    for key in _TRIGGERS:
        if _said(header, key):
            return tuple(part.strip() for part in printable(header[key])[:200].split(",") if part.strip()), key
    pictures = sum(count for _, count in _folders(header).values())
    common = [tag for tag, count in tags.items() if pictures and count >= COMMON * pictures and len(tag) < 60]
    if common:
        return tuple(common[:3]), "ss_tag_frequency: tags of nearly every picture"
    names = [name for name in _folders(header) if name and not name.isdigit()]
    return (tuple(names[:3]), "ss_dataset_dirs: the folder's name") if names else ((), "")
