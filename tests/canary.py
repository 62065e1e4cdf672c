"""The suite on the newest versions of what the pack stands on, before they reach its users.

    python tests/canary.py                        # newest diffusers, transformers, peft, accelerate, ComfyUI and page
    python tests/canary.py peft -- tests/engine   # one library, and what pytest runs

A fresh environment on top of this one gets the newest version of each; nothing else changes and nothing is kept. First
it is asked for the private names that the pack uses (``engine/runtime/missing_names.py``), then pytest runs. For
ComfyUI, comfy-import-guard compares the names and the calls of the pack with those of the checkout, and of its
``origin/master`` where there is one. Exit status 1 if a name is gone or a test fails.
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
GUARD = "comfy-import-guard==1.3.0"
LIBRARIES = ("diffusers", "transformers", "peft", "accelerate")
PAGE = "page"
CORE = "ComfyUI"
COMFYUI = Path(os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI")).expanduser()
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


def gone_from_comfyui(python: Path, folder: Path) -> int:
    """Exit status of comfy-import-guard on what users get of the pack: 1 if ComfyUI lacks a name or a parameter."""
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", GUARD], check=True)
    pack = folder / "custom_nodes" / "vitrine"
    pack.mkdir(parents=True)
    files = subprocess.run(
        ["git", "-C", str(ROOT), "archive", "HEAD", "__init__.py", "engine", "nodes"], capture_output=True, check=True
    )
    subprocess.run(["tar", "-x", "-C", str(pack)], input=files.stdout, check=True)
    git = ["git", "-C", str(COMFYUI), "rev-parse", "--verify", "--quiet", "origin/master"]
    newest = not subprocess.run(git, capture_output=True).returncode
    status = 0
    for target in ("HEAD", "origin/master")[: 1 + newest]:
        # the guard looks for a checkout that is called ComfyUI
        asked = ["--offline", "--cache-dir", str(COMFYUI.parent), "check", "--no-update", "--comfy-dir", str(folder)]
        command = [python, "-m", "comfy_import_guard.cli", *asked, "--target", target]
        status |= subprocess.run(command).returncode
    return status


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("newest", nargs="*", help=f"of {', '.join((*LIBRARIES, CORE, PAGE))}; all by default")
    given = sys.argv[1:] if arguments is None else arguments
    cut = given.index("--") if "--" in given else len(given)
    newest, tests = parser.parse_args(given[:cut]).newest or [*LIBRARIES, CORE, PAGE], given[cut + 1 :]
    unknown = set(newest) - {*LIBRARIES, CORE, PAGE}
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
        if CORE in newest:
            status |= gone_from_comfyui(python, Path(folder))
        if PAGE in newest:
            chosen = tests or [f"tests/comfy/test_{name}.py" for name in PAGES]
            environ = os.environ | {"VITRINE_PAGE": "newest"}
            status |= subprocess.run([python, "-m", "pytest", "-q", *chosen], cwd=ROOT, env=environ).returncode
    return int(bool(status))


if __name__ == "__main__":
    sys.exit(main())
