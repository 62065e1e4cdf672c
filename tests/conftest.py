"""Tests run against the installed package, or against this folder when nothing is installed."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("vitrine") is None:
    root = Path(__file__).parents[1]
    where = {"submodule_search_locations": [str(root)]}
    spec = importlib.util.spec_from_file_location("vitrine", root / "__init__.py", **where)
    sys.modules["vitrine"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["vitrine"])
