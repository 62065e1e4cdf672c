"""Attention of narrow heads against PyTorch's own, in double precision; and when it must not step in."""

import pytest
import torch
from torch.nn import functional
from vitrine.engine.network import narrow_heads
from vitrine.engine.network.narrow_heads import NarrowHeads

pytestmark = pytest.mark.rounding


def operands(lead, queries, keys, width, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = [(*lead, queries, width), (*lead, keys, width), (*lead, keys, width), (*lead, queries, width)]
    return [torch.randn(s, generator=g).to(dtype) for s in shapes]


def run(q, k, v, g, learnt="qkv", **told):
    leaves = {n: x.clone().requires_grad_(n in learnt) for n, x in zip("qkv", (q, k, v), strict=True)}
    out = functional.scaled_dot_product_attention(leaves["q"], leaves["k"], leaves["v"], **told)
    return out.detach(), *torch.autograd.grad(out, [leaves[n] for n in learnt], g)


@pytest.fixture
def calls(monkeypatch):
    """How often the products were used."""
    made, plain = [], narrow_heads._Attention.apply
    monkeypatch.setattr(narrow_heads._Attention, "apply", lambda *a: made.append(a) or plain(*a))
    return made


@pytest.mark.parametrize("piece", [2**17, 100, 3000])
@pytest.mark.parametrize(
    ("lead", "queries", "keys", "width", "scale"),
    [((8, 4), 64, 64, 8, None), ((8, 4), 30, 7, 24, 0.3), ((33,), 16, 40, 1, None), ((2, 5, 4), 1, 1, 3, None)],
)
def test_output_and_gradients_are_as_exact_as_the_fused_kernels(
    calls, monkeypatch, piece, lead, queries, keys, width, scale
):
    monkeypatch.setattr(narrow_heads, "PIECE", piece)
    given = operands(lead, queries, keys, width)
    exact = run(*(x.double() for x in given), scale=scale)
    with NarrowHeads():
        found = run(*given, scale=scale)
    assert len(calls) == 1
    for ours, true in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), true, atol=2e-6, rtol=1e-5)


def test_only_wanted_gradients_are_made_and_layouts_do_not_matter(calls):
    q, k, v, g = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in operands((8, 4), 20, 9, 8))
    for learnt in ("v", "qv", "k"):
        exact = run(*(x.double() for x in (q, k, v, g)), learnt)
        with NarrowHeads():
            found = run(q, k, v, g, learnt)
        for ours, true in zip(found, exact, strict=True):
            torch.testing.assert_close(ours.double(), true, atol=2e-6, rtol=1e-5)
    assert len(calls) == 3


def test_keywords_are_understood(calls):
    q, k, v, _ = operands((8, 4), 20, 9, 8)
    q.requires_grad_()
    with NarrowHeads():
        found = functional.scaled_dot_product_attention(query=q, key=k, value=v)
    torch.testing.assert_close(found, functional.scaled_dot_product_attention(q, k, v), atol=1e-5, rtol=1e-5)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        (((8, 4), 16, 16, 8), {"attn_mask": torch.zeros(16, 16)}),
        (((8, 4), 16, 16, 8), {"is_causal": True}),
        (((8, 4), 16, 16, narrow_heads.WIDEST + 1), {}),
        (((2, 4), 16, 16, 8), {}),
        (((8, 4), 300, 300, 8), {}),
    ],
)
def test_other_calls_go_to_the_fused_kernel_untouched(calls, shape, told):
    given = operands(*shape)
    plain = run(*given, **told)
    with NarrowHeads():
        found = run(*given, **told)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True)) and not calls


def test_without_gradients_or_in_half_precision_nothing_changes(calls):
    q, k, v, _ = operands((8, 4), 16, 16, 8)
    half = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    with NarrowHeads():
        assert torch.equal(functional.scaled_dot_product_attention(q, k, v), torch_own(q, k, v))
        with torch.no_grad():
            functional.scaled_dot_product_attention(q.requires_grad_(), k, v)
        functional.scaled_dot_product_attention(*half)
    assert not calls


def torch_own(q, k, v):
    with torch._C.DisableTorchFunction():
        return functional.scaled_dot_product_attention(q, k, v)
