"""This distribution's name and version, and how to install what it needs; reads metadata only, imports no package."""

from __future__ import annotations

import platform
import re
from pathlib import Path

DISTRIBUTION = "vitrine-diffusion"
"""The name on the package index. ``vitrine``, the name to import, is another project's distribution there."""
_ROOT = Path(__file__).parents[1]


def install(extra: str, *more: str) -> str:
    """The pip command that installs one of this distribution's extras, and further packages.

    Example:
        >>> install("demo", "torch")
        "pip install torch 'vitrine-diffusion[demo]'"
    """
    return " ".join(["pip install", *more, f"'{DISTRIBUTION}[{extra}]'"])


def version() -> str:
    """This pack's version: of the ``pyproject.toml`` beside it in a checkout, else of the installed distribution.

    The file comes first: ComfyUI may run a clone while another copy is installed. "0" where there is neither.
    """
    project = _ROOT / "pyproject.toml"
    if project.is_file():
        text = project.read_text(encoding="utf-8")
        match = re.search(r'^version = "(.+)"$', text, re.M)
        if match and f'name = "{DISTRIBUTION}"' in text:
            return match[1]
    return installed(DISTRIBUTION) or "0"


def installed(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def versions() -> str:
    """What ``vitrine --version`` prints: name and version of this pack, and what results depend on, one a line."""
    lines = [f"{DISTRIBUTION} {version()}", f"Python {platform.python_version()}"]
    lines += [f"{name} {installed(name) or 'not installed'}" for name in ("torch", "diffusers", "transformers")]
    return "\n".join(lines)
