"""Load packs with ComfyUI's own loader in this fresh process; print what that did, as one line of JSON.

``python fresh.py COMFYUI PACK [PACK ...]``
"""

import asyncio
import collections
import importlib.util
import json
import logging
import sys
import time
from pathlib import Path


def _start(comfyui):
    """ComfyUI as far as it is before it loads custom nodes."""
    import transformers.utils.import_utils  # noqa: F401  as in launch.py

    spec = importlib.util.spec_from_file_location("vitrine_comfy_launch", Path(__file__).parent / "launch.py")
    launch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(launch)
    launch.install_stand_ins()
    sys.path[0] = comfyui
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    logging.disable(logging.INFO)
    import execution  # noqa: F401
    import server  # noqa: F401

    import nodes

    return nodes


def _load(nodes, pack):
    before, start = set(sys.modules), time.process_time()
    loaded = asyncio.run(nodes.load_custom_node(pack))
    seconds = time.process_time() - start  # of this process alone: others on the machine do not count
    new = {name for name in set(sys.modules) - before if not Path(name).is_absolute()}  # the pack itself: by its path
    return {"loaded": loaded, "seconds": seconds, "modules": sorted(m for m in new if m.split(".")[0] != "vitrine")}


def _identity(nodes, pack):
    """Each of the pack's files under one module name, each node class the one its module holds."""
    names = collections.defaultdict(set)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).is_relative_to(pack):
            names[str(Path(file).relative_to(pack))].add(name)
    ours = {k: v for k, v in nodes.NODE_CLASS_MAPPINGS.items() if k.startswith("Vitrine")}
    same = [getattr(sys.modules[c.__module__], c.__name__) is c for c in ours.values()]
    modules = sorted({c.__module__ for c in ours.values()})
    return {"files": {f: sorted(n) for f, n in names.items()}, "nodes": len(ours), "same": all(same), "in": modules}


if __name__ == "__main__":
    core = _start(sys.argv[1])
    own = time.process_time()
    packs = sys.argv[2:]
    found = [_load(core, pack) for pack in packs]
    sys.stdout.write(json.dumps({"own seconds": own, "packs": found, "identity": _identity(core, packs[-1])}) + "\n")
