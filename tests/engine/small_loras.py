"""LoRAs of three layers for the tests of files and spaces."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vitrine.engine.w2w import (
    LoraLayer,
)

SHAPES = {
    "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q": (32, 32),
    "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_v": (32, 64),
    "mid_block.attentions.0.transformer_blocks.0.attn1.to_out.0": (96, 96),
}


def lora(seed, rank=1, alpha=27.0, shapes=SHAPES, start=None, strength=0.05):
    """A LoRA whose A begins at seed ``start`` and moves a little with its own seed."""
    first, own = (torch.Generator().manual_seed(s) for s in (start if start is not None else seed + 1000, seed))
    out = {}
    for path, (height, width) in shapes.items():
        a = torch.rand(rank, width, generator=first) * 2 - 1
        moved = a / width**0.5 + torch.randn(rank, width, generator=own) * 0.2 * strength
        out[path] = LoraLayer(moved, torch.randn(height, rank, generator=own) * strength, alpha)
    return out


def deltas(found):
    return {path: layer.delta() for path, layer in found.items()}


def same(a, b, atol=1e-6):
    return a.keys() == b.keys() and all(torch.allclose(a[k], b[k], atol=atol) for k in a)


class Held(TorchDispatchMode):
    """Bytes of all tensors that are alive, and the most there ever were, counted by their storages."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            storage = out.untyped_storage()
            views, _ = self.alive.get(storage.data_ptr(), ([], 0))
            self.alive[storage.data_ptr()] = ([*views, weakref.ref(out)], storage.nbytes())
        living = {k: ([v for v in views if v() is not None], size) for k, (views, size) in self.alive.items()}
        self.alive = {k: (views, size) for k, (views, size) in living.items() if views}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return out
