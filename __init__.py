"""Vitrine: open a diffusion model like a display case.

This file is the ComfyUI door and nothing else. ComfyUI imports it under a name made from its absolute path; the entry
point loads the same folder once more under its real name, ``vitrine``, so that classes have one identity whichever door
they come through, and saved pipelines never record a path.
"""

WEB_DIRECTORY = "./nodes/web"


def _under_its_own_name():
    """Import ``vitrine.nodes`` from this very folder, whatever other copy was imported before."""
    import importlib
    import importlib.util
    import logging
    import os
    import sys

    here = os.path.dirname(os.path.abspath(__file__))
    known = getattr(sys.modules.get("vitrine"), "__file__", None) or os.devnull
    if os.path.realpath(os.path.dirname(known)) != os.path.realpath(here):
        others = [name for name in sys.modules if name.startswith("vitrine.")]
        for name in others:
            del sys.modules[name]  # half of each copy would be worse than either
        if others:
            logging.getLogger("vitrine").warning("%s was imported before; from now on it is %s", known, here)
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
