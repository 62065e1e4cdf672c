"""A stand-in for the model compiler of newer ComfyUI versions (``comfy.model_prefetch``), which runs without a GPU.

Each block of a network runs twice as it is, and the second time its operations are recorded. From then on they are
replayed on the same memory, as a CUDA graph does, and no Python runs: no hook, no ``forward``. Nothing is replayed in a
forward whose ``prefetch_dynamic_vbars`` is False. Tensors that a block allocates while the recorder is not paused, and
that outlive it, are counted as rogues, and so are values that the host reads inside it.
"""

import traceback
from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)


class _Operations(TorchDispatchMode):
    """Notes the operations of a block."""

    def __init__(self, compiler):
        super().__init__()
        self.compiler, self.noted, self.allocated = compiler, [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in READS:
            self.compiler.read.append("".join(traceback.format_stack(limit=12)))
        out = func(*args, **(kwargs or {}))
        self.noted.append((func, args, kwargs or {}, out))
        if not self.compiler.paused:
            known = {t.untyped_storage()._cdata for t in tensors((args, kwargs))}  # a view of them is no allocation
            new = [t for t in tensors(out) if t.untyped_storage()._cdata not in known]
            self.allocated += [(StorageWeakRef(t.untyped_storage()), f"{func} {tuple(t.shape)}") for t in new]
        return out


class _Graph:
    """The recorded operations of a block, to be run on other inputs of the same shapes."""

    def __init__(self, inputs, noted, out):
        self.inputs, self.noted, self.out = inputs, noted, out

    def replay(self, inputs):
        for own, new in zip(self.inputs, inputs, strict=True):
            own.copy_(new)
        for func, args, kwargs, out in self.noted:
            again = func(*args, **kwargs)
            for old, new in zip(tensors(out), tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():  # else it is a view, or was written in place
                    old.copy_(new)
        return tree_map_only(torch.Tensor, torch.Tensor.clone, self.out)


def tensors(tree):
    """The tensors in nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Compiler:
    """Replays the blocks of one network.

    Attributes:
        replays: blocks that were replayed.
        rogues: operations whose results outlived the block that allocated them.
        read: stacks in which the host read a value inside a block.
        stubborn: replay even where the forward says not to.
    """

    def __init__(self, network, blocks, stubborn=False):
        self.network, self.blocks, self.stubborn = network, set(blocks), stubborn
        self.replays, self.rogues, self.read, self.paused = 0, [], [], 0
        self._graphs, self._runs, self._options, self._inside = {}, {}, {}, False

    @contextmanager
    def pause_malloc_graph(self, sync=False):
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def cleanup_malloc_graph(self):
        self._inside = False

    def call(self, module, plain, args, kwargs):
        """What calling a module does."""
        if module is self.network:
            self._options = kwargs.get("transformer_options") or {}
            self._options["prefetch_dynamic_vbars"] = True
        if module not in self.blocks or self._inside:
            return plain(module, *args, **kwargs)
        self._inside = True
        try:
            return self._block(module, plain, args, kwargs)
        finally:
            self._inside = False

    def _block(self, module, plain, args, kwargs):
        allowed = self.stubborn or self._options.get("prefetch_dynamic_vbars", False)
        leaves, spec = tree_flatten((args, kwargs), is_leaf=lambda tree: isinstance(tree, dict) and tree is not kwargs)
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        key = (module, *(tuple(t.shape) for t in inputs))
        if allowed and key in self._graphs:
            self.replays += 1
            return self._graphs[key].replay(inputs)
        self._runs[key] = self._runs.get(key, 0) + 1
        capturing = allowed and self._runs[key] == 2
        if capturing:  # into memory of the graph
            inputs = [t.clone() for t in inputs]
            fresh = iter(inputs)
            leaves = [next(fresh) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, named = spec.unflatten(leaves)
        with _Operations(self) as operations:
            out = plain(module, *args, **named)
        if capturing:
            self._graphs[key] = _Graph(inputs, operations.noted, out)
            return tree_map_only(torch.Tensor, torch.Tensor.clone, out)
        operations.noted.clear()
        returned = {t.untyped_storage()._cdata for t in tensors(out)}
        alive = [(ref, what) for ref, what in operations.allocated if not ref.expired()]
        self.rogues += [what for ref, what in alive if ref.cdata not in returned]
        return out


@contextmanager
def compiled(network, blocks, stubborn=False):
    """Inside, the blocks are recorded and replayed; yields the :class:`Compiler`."""
    import comfy.model_prefetch
    from vitrine.nodes.comfy.python_forwards import guard_hooks

    compiler, plain = Compiler(network, blocks, stubborn), torch.nn.Module.__call__
    names = ("pause_malloc_graph", "cleanup_malloc_graph")
    before = {name: getattr(comfy.model_prefetch, name, None) for name in names}
    for name in names:
        setattr(comfy.model_prefetch, name, getattr(compiler, name))
    torch.nn.Module.__call__ = lambda self, *args, **kwargs: compiler.call(self, plain, args, kwargs)
    unguard = guard_hooks()
    try:
        yield compiler
    finally:
        unguard()
        torch.nn.Module.__call__ = plain
        for name, value in before.items():
            delattr(comfy.model_prefetch, name) if value is None else setattr(comfy.model_prefetch, name, value)
