"""The nodes' names and tooltips for ComfyUI's page in several languages, from one source: their schemas.

``locales/<language>.json`` maps each English string to its translation. From schemas and tables :func:`files` makes
what ComfyUI serves: ``locales/<language>/nodeDefs.json`` and ``main.json`` (names of the menu's folders). The tables do
not stand in a folder of their own, because ComfyUI takes every folder in ``locales`` for a language.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from comfy_api.latest import io

FOLDER = Path(__file__).parents[1] / "locales"
TRANSLATED = ("zh", "ja", "ko")
"""Languages with a table; English comes from the schemas."""

PACK, TEMPLATES = "vitrine", "Vitrine: look inside, edit, be sure"
"""The folder that the registry installs the pack in, and what its templates are called in the browser."""

Nodes = Sequence[type[io.ComfyNode]]


def definitions(nodes: Nodes) -> dict[str, Any]:
    """Node id -> its English display name, description, inputs and outputs, as in nodeDefs.json."""
    return {schema.node_id: _definition(schema) for schema in (node.define_schema() for node in nodes)}


def _definition(schema: io.Schema) -> dict[str, Any]:
    inputs = {key: _entry(i.display_name or i.id, i.tooltip) for key, i in _inputs(schema.inputs)}
    outputs = {str(n): _entry(o.display_name or o.id, o.tooltip) for n, o in enumerate(schema.outputs)}
    named = {"display_name": schema.display_name or schema.node_id, "description": schema.description}
    return named | {"inputs": inputs, "outputs": outputs}


def _entry(name: str, tooltip: str | None) -> dict[str, str]:
    return {"name": name} | ({"tooltip": tooltip} if tooltip else {})


def _inputs(inputs: Iterable[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key on the page, input); inside a dynamic combo ``combo_input``, as the page turns dots into underscores."""
    for entry in inputs:
        key = prefix + entry.id
        yield key.replace(".", "_"), entry
        seen: set[str] = set()
        for option in getattr(entry, "options", None) or ():
            nested = [i for i in getattr(option, "inputs", ()) if i.id not in seen]
            seen.update(i.id for i in nested)
            yield from _inputs(nested, f"{key}.")


def folders(nodes: Nodes) -> dict[str, str]:
    """The menu folders the nodes stand in."""
    parts = (part for node in nodes for part in (node.define_schema().category or "").split("/") if part)
    return {part.replace(".", "_"): part for part in parts}


def strings(nodes: Nodes) -> list[str]:
    """Every English string once, in the order of the menu."""
    return list(dict.fromkeys([*_leaves(definitions(nodes)), *_leaves(folders(nodes)), TEMPLATES]))


def _leaves(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _leaves(value)
    elif tree:
        yield tree


def table(language: str) -> dict[str, str]:
    """English string -> translation."""
    return json.loads((FOLDER / f"{language}.json").read_text(encoding="utf-8"))


def files(nodes: Nodes) -> dict[Path, str]:
    """What the locale files must hold: path -> text. A string without a translation stays English."""
    texts = {}
    for language in ("en", *TRANSLATED):
        words = table(language) if language in TRANSLATED else {}
        templates = {PACK: _plain(words.get(TEMPLATES, TEMPLATES))}
        main = {"nodeCategories": _translated(folders(nodes), words), "templateWorkflows": {"category": templates}}
        for name, tree in (("main.json", main), ("nodeDefs.json", _translated(definitions(nodes), words))):
            text = json.dumps(tree, ensure_ascii=False, indent=1) + "\n"
            texts[FOLDER / language / name] = text
    return texts


def _translated(tree: Any, words: dict[str, str]) -> Any:
    if isinstance(tree, dict):
        return {key: _translated(value, words) for key, value in tree.items()}
    return _plain(words.get(tree, tree))


def _plain(text: str) -> str:
    """The page's message syntax gives these characters a meaning; a literal in braces has none."""
    return "".join(f"{{'{c}'}}" if c in "{}@|" else c for c in text or "")


def write(nodes: Nodes) -> list[Path]:
    """Write the files that differ from what they must hold; returns their paths."""
    changed = []
    for path, text in files(nodes).items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed
