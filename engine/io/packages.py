"""This distribution's name, version and install commands; reads metadata only, imports no package."""

from __future__ import annotations

import platform
import re
from pathlib import Path

DISTRIBUTION = "vitrine-diffusion"
"""The name on the package index, where ``vitrine`` is another project; the import name is ``vitrine``."""
_ROOT = Path(__file__).parents[2]


def install(extra: str, *more: str) -> str:
    """The pip command that installs one of this distribution's extras, and further packages, in a clone.

    Example:
        >>> install("demo", "torch")
        "pip install torch '.[demo]' in the folder of the clone"
    """
    return " ".join(["pip install", *more, f"'.[{extra}]' in the folder of the clone"])


def version() -> str:
    """This pack's version: from ``pyproject.toml`` in a checkout, else from the installed distribution.

    The file comes first: ComfyUI may run a clone while another copy is installed. "0" if there is neither.
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
    """The output of ``vitrine --version``: this pack and the libraries that results depend on, one per line."""
    lines = [f"{DISTRIBUTION} {version()}", f"Python {platform.python_version()}"]
    lines += [f"{name} {installed(name) or 'not installed'}" for name in ("torch", "diffusers", "transformers")]
    return "\n".join(lines)
