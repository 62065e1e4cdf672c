"""The shipped workflows by kind: on a model that ships with the pack, and on the user's own, to be run as they are."""

import json
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "workflows"
ALL = sorted(FOLDER.glob("*.json"))
ON_YOUR_MODEL = [
    p for p in ALL if any(n["type"] == "CheckpointLoaderSimple" for n in json.loads(p.read_text("utf-8"))["nodes"])
]
SHIPPED = [p for p in ALL if p not in ON_YOUR_MODEL]
"""Those of them whose pictures the pack's own models draw."""
