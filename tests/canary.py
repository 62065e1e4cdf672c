"""The suite on the newest versions of what the pack stands on, before they reach its users.

    python tests/canary.py                        # newest diffusers, transformers, peft, accelerate and ComfyUI page
    python tests/canary.py peft -- tests/engine   # one library, and what pytest runs

A fresh environment on top of this one gets the newest version of each; nothing else changes and nothing is kept. First
it is asked for the private names that the pack uses (``engine/runtime/missing_names.py``), then pytest runs. Exit
status 1 if a name is gone or a test fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from nightly import PAGES

ROOT = Path(__file__).parents[1]
LIBRARIES = ("diffusers", "transformers", "peft", "accelerate")
PAGE = "page"
NAMES = """
import sys
import diffusers.pipelines.pipeline_utils
from vitrine.engine.runtime.missing_names import missing_names
sys.exit("; ".join(missing_names()) or 0)
"""
VERSIONS = "import importlib.metadata as m, sys; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep='\\n')"


def environment(folder: Path, libraries: list[str]) -> Path:
    """The Python of a new environment: everything that is installed here, and the newest of these on top."""
    venv.create(folder, with_pip=False)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    asked = [python, "-c", "import site; print(site.getsitepackages()[0])"]
    own = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    folders = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    lines = [f"import site; site.addsitedir({path!r})" for path in folders]  # editable installs, too
    Path(own, "beneath.pth").write_text("\n".join(lines))
    if libraries:
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--upgrade", "--no-deps"]
        subprocess.run([*pip, *libraries], check=True)
    return python


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("newest", nargs="*", help=f"of {', '.join((*LIBRARIES, PAGE))}; all by default")
    given = sys.argv[1:] if arguments is None else arguments
    cut = given.index("--") if "--" in given else len(given)
    newest, tests = parser.parse_args(given[:cut]).newest or [*LIBRARIES, PAGE], given[cut + 1 :]
    unknown = set(newest) - {*LIBRARIES, PAGE}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    libraries = [name for name in newest if name in LIBRARIES]
    with tempfile.TemporaryDirectory(prefix="vitrine-canary-") as folder:
        python = environment(Path(folder), libraries)
        subprocess.run([python, "-c", VERSIONS, *libraries], cwd=ROOT, check=True)
        status = subprocess.run([python, "-c", NAMES], cwd=ROOT).returncode
        if libraries:
            chosen = tests or ["tests"]
            status |= subprocess.run([python, "-m", "pytest", "-q", *chosen], cwd=ROOT).returncode
        if PAGE in newest:
            chosen = tests or PAGES
            environ = os.environ | {"VITRINE_PAGE": "newest"}
            status |= subprocess.run([python, "-m", "pytest", "-q", *chosen], cwd=ROOT, env=environ).returncode
    return int(bool(status))


if __name__ == "__main__":
    sys.exit(main())
