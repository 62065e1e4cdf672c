"""``docs/api``: every public signature with its docstring, a page for each method, read from the source."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "api"
METHODS = {
    "pipelines": "diffusers pipelines, one for each node",
    "activations": "taps, matching, which layers to read (GDF)",
    "nemo": "memorized prompts and the neurons behind them (NeMo)",
    "copies": "which pictures a model or a LoRA gives back",
    "w2w": "spaces of models (weights2weights)",
    "control": "sizes weighted by the noise level (Berrada et al.)",
    "resolution": "sampling away from the training size (Berrada et al.)",
    "emd": "one-step students (EM Distillation)",
    "portraits": "the toy models that ship with the pack",
    "families": "what differs between model families",
}
CORE = (
    "diffusion.denoiser",
    "diffusion.schedule",
    "tracing.addresses",
    "tracing.hooks",
    "diffusion.sampling",
    "diffusion.guidance",
    "diffusion.noise",
    "network.condition",
    "runtime.progress",
    "errors",
)
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples):$")
ENTRY = re.compile(r"^    (\*{0,2}[\w`.]+(?:, \*{0,2}[\w`.]+)*): (.*)$")


def pages() -> dict[str, str]:
    """File name -> what it says."""
    made = {f"{method}.md": _page(f"vitrine.engine.{method}", about) for method, about in METHODS.items()}
    core = [_page(f"vitrine.engine.{name}", "").replace("# ", "## ", 1) for name in CORE]
    made["core.md"] = "# What all methods use\n\n" + "\n".join(core)
    links = [f"- [{name}]({name}.md): {about}" for name, about in {**METHODS, "core": "what all methods use"}.items()]
    command = "VITRINE_WRITE_DOCS=1 pytest tests/docs/test_api.py"
    head = f"# Every public name\n\nWritten from the docstrings by `{command}`.\n\n"
    return made | {"README.md": head + "\n".join(links) + "\n"}


def _page(name: str, about: str) -> str:
    module = importlib.import_module(name)
    public = getattr(module, "__all__", None) or _defined(module)
    entries = [_entry(export, getattr(module, export)) for export in sorted(public, key=str.lower)]
    return "\n".join([f"# {name}", "", about or _sentence(module), "", *filter(None, entries)])


def _defined(module: ModuleType) -> list[str]:
    """Public classes and functions of a module that lists none."""
    own = [n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__]
    return [n for n in own if not n.startswith("_") and callable(getattr(module, n))]


def _sentence(module: ModuleType) -> str:
    return prose((module.__doc__ or "").strip().splitlines()[0]).strip()


def _entry(name: str, value: Any) -> str:
    if inspect.isclass(value):
        return _class(name, value)
    if inspect.isfunction(inspect.unwrap(value)):
        return f"### {name}\n\n{_function(name, value)}\n"
    return ""  # a constant: its name says it, its module explains it


def _class(name: str, value: type) -> str:
    node = _parsed(value)
    assert isinstance(node, ast.ClassDef)
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    fields = [ast.unparse(_typed(n)) for n in node.body if isinstance(n, ast.AnnAssign) and not _private(n.target)]
    head = f"class {name}({bases}):" if bases else f"class {name}:"
    code = "\n".join([head, *(f"    {line}" for line in fields)] if fields else [head.rstrip(":")])
    methods = [f"#### {name}.{key}\n\n{_function(key, method)}\n" for key, method in _methods(value)]
    return "\n".join([f"### {name}", "", f"```python\n{code}\n```", "", prose(value.__doc__), *methods])


def _typed(field: ast.AnnAssign) -> ast.AnnAssign:
    """A field with its type alone: what ``Annotated`` adds stands among the attributes."""
    if isinstance(field.annotation, ast.Subscript) and ast.unparse(field.annotation.value) == "Annotated":
        inner = field.annotation.slice
        field.annotation = inner.elts[0] if isinstance(inner, ast.Tuple) else inner
    return field


def _methods(value: type) -> list[tuple[str, Any]]:
    """Its own public methods and its constructor, with those of our private base classes, and a pipeline's call."""
    methods: dict[str, Any] = {}
    for base in value.__mro__:
        ours = base.__module__.startswith("vitrine.")
        whole = base is value or (ours and base.__name__.startswith(("_", "Shared", "Wrapping", "FromParts")))
        for key, method in vars(base).items() if ours else ():
            if not whole and key not in ("__call__", "from_pipe"):
                continue
            method = getattr(method, "__func__", getattr(method, "fget", method))
            wanted = not key.startswith("_") and key != "to_json_string" or key in ("__call__", "__init__")
            if wanted and inspect.isfunction(inspect.unwrap(method)) and _in_source(inspect.unwrap(method)):
                methods.setdefault(key, method)
    return [(key, method) for key, method in methods.items() if inspect.getdoc(method)]


def _in_source(method: Any) -> bool:
    """Whether it was written here: a dataclass writes its own constructor, diffusers its ``encode_prompt``."""
    return method.__module__.startswith("vitrine.") and not method.__code__.co_filename.startswith("<")


def _private(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id.startswith("_")


def _parsed(value: Any) -> ast.stmt:
    return ast.parse(inspect.cleandoc("\n" + inspect.getsource(value))).body[0]


def _function(name: str, value: Any) -> str:
    node = _parsed(inspect.unwrap(value))
    assert isinstance(node, ast.FunctionDef)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    arguments = [a for a in ast.unparse(node.args).split(", ") if a not in ("self", "cls")]
    flat = f"{name}({', '.join(arguments)}){returns}"
    code = flat if len(flat) <= 100 else f"{name}(\n{_wrapped(node.args)}\n){returns}"
    return f"```python\n{code}\n```\n\n{prose(value.__doc__)}".rstrip()


def _wrapped(arguments: ast.arguments) -> str:
    """One argument a line."""
    lines, depth, current = [], 0, ""
    for char in ast.unparse(arguments) + ", ":
        depth += (char in "[({") - (char in "])}")
        if char == "," and not depth:
            lines.append(current.strip())
            current = ""
        else:
            current += char
    return "\n".join(f"    {line}," for line in lines if line not in ("self", "cls", ""))


def prose(doc: str | None) -> str:
    """A docstring in Markdown: sections as bold words, their entries as lists, examples as code."""
    lines, out, section = inspect.cleandoc(doc or "").splitlines(), [], ""
    for line in lines:
        if match := SECTION.match(line):
            section = match[1]
            out += [f"**{section}**", "", *(["```python"] if section.startswith("Example") else [])]
        elif section.startswith("Example"):
            if line and not line.startswith("    "):
                out, section = [*out, "```", "", line], ""
            else:
                out.append(line[4:])
        elif section and (match := ENTRY.match(line)):
            out.append(f"- `{match[1]}`: {match[2]}")
        else:
            out.append(line.strip() if section and out[-1].startswith("**") else (line[4:] if section else line))
    if section.startswith("Example"):
        out.append("```")
    text = re.sub(r":(?:func|class|mod|data|meth|attr):`~?([^`]+)`", r"`\1`", "\n".join(out))
    return re.sub("(?<!`)``(?!`)", "`", text).rstrip() + "\n"


def write() -> None:
    """Write all pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
