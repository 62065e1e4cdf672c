"""Run ComfyUI's main.py where torchvision and torchaudio cannot be imported, as beside a CPU build of torch.

ComfyUI imports both at start-up but calls neither on the way to an SD-shaped model, so empty stand-ins are enough.
Where the real packages import, they are used. ``python launch.py COMFYUI_FOLDER [arguments of main.py]``.
"""

import importlib
import importlib.abc
import importlib.machinery
import runpy
import sys
import types


class _StandIn(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *a, **k: None})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root):
        self.root = root

    def find_spec(self, name, path=None, target=None):
        if name == self.root or name.startswith(self.root + "."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module):
        module.__version__ = "0"


def install_stand_ins():
    """Give torchvision and torchaudio a stand-in where the real one does not import. Returns the names replaced."""
    replaced = []
    for root in ("torchvision", "torchaudio"):
        try:
            importlib.import_module(root)
        except (ImportError, OSError, RuntimeError):
            for name in [n for n in sys.modules if n == root or n.startswith(root + ".")]:
                del sys.modules[name]
            sys.meta_path.insert(0, _Finder(root))
            replaced.append(root)
    return replaced


if __name__ == "__main__":
    folder = sys.argv[1]
    import transformers.utils.import_utils  # noqa: F401  decides what is installed before a stand-in could mislead it

    install_stand_ins()
    sys.path[0] = folder
    sys.argv = [folder + "/main.py", *sys.argv[2:]]
    runpy.run_path(sys.argv[0], run_name="__main__")
