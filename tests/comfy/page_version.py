"""Which version of ComfyUI's page the tests open.

``VITRINE_PAGE=1.58.1`` takes that one instead of the installed one, ``VITRINE_PAGE=newest`` the newest: pip fetches the
package into a folder that goes when the tests have ended, and nothing else changes.
"""

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import distributions, version
from pathlib import Path

PACKAGE = "comfyui-frontend-package"


@functools.cache
def page_to_test():
    """(its version, flags of main.py that make the server serve it)."""
    wanted = os.environ.get("VITRINE_PAGE", "")
    if not wanted:
        return version(PACKAGE), []
    folder = Path(tempfile.mkdtemp(prefix="vitrine-page-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    pinned = PACKAGE if wanted == "newest" else f"{PACKAGE}=={wanted}"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), pinned]
    subprocess.run(pip, check=True)
    served = next(distributions(path=[str(folder)])).version
    return served, ["--front-end-root", str(folder / PACKAGE.replace("-", "_") / "static")]
