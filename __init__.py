"""Vitrine: open a diffusion model like a display case.

This file is the ComfyUI door and nothing else. ComfyUI imports it under a name made from its absolute path; the entry
point loads the same folder once more under its real name, ``vitrine``, so that classes have one identity whichever door
they come through, and saved pipelines never record a path.
"""

WEB_DIRECTORY = "./nodes/web"


def _under_its_own_name():
    """Import ``vitrine.nodes`` from this very folder."""
    import importlib
    import importlib.util
    import os
    import sys

    here = os.path.dirname(os.path.abspath(__file__))
    known = sys.modules.get("vitrine")
    if known is None or os.path.dirname(os.path.abspath(known.__file__ or "")) != here:
        path = os.path.join(here, "__init__.py")
        spec = importlib.util.spec_from_file_location("vitrine", path, submodule_search_locations=[here])
        sys.modules["vitrine"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["vitrine"])
    return importlib.import_module("vitrine.nodes")


async def comfy_entrypoint():
    """ComfyUI's V3 entry point. ComfyUI logs a failure as one line, so the traceback is logged here."""
    import logging

    try:
        return _under_its_own_name().VitrineExtension()
    except Exception:
        logging.getLogger("vitrine").exception("Vitrine could not be loaded")
        raise
