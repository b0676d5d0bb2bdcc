"""Blocks mixed and read in one operator, and queries as their own keys in another: against ordinary operators."""

import pytest
import torch
from torch import Tensor

from anyformer.ops import bucket_keys, bucket_sorted
from anyformer.ops.bucket_keys import as_keys, keys_forward
from anyformer.ops.bucket_sorted import composite, sorted_forward

TIGHT = {"rtol": 1e-10, "atol": 1e-12}
SCALE = 0.4


def drawn(causal: bool) -> list[Tensor]:
    """7 blocks of 3 queries of 4 heads, of keys and values of 2, and weights whose rows sum to 1, the first when causal to 0."""
    sizes = ((4, 7, 3, 6), (2, 7, 3, 6), (2, 7, 3, 5), (2, 7, 7))
    q, k, v, scores = (torch.randn(2, *size, dtype=torch.float64) for size in sizes)
    weights = scores.softmax(-1).tril(-1) if causal else scores.softmax(-1)
    return [x.requires_grad_() for x in (q, k, v, weights)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("at_once", "rows"), [(2, 3), (7, 64), (3, 1)])
def test_equals_ordinary_operators(causal: bool, at_once: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_sorted, "tiles_at_once", lambda scores, threads: at_once)
    monkeypatch.setattr(bucket_sorted, "_ROWS", rows)
    inputs = drawn(causal)
    out, truth = sorted_forward(*inputs, causal, SCALE)[0], composite(*inputs, causal, SCALE)
    torch.testing.assert_close(out, truth, **TIGHT)
    upstream = torch.randn_like(truth)
    found, right = (torch.autograd.grad(y, inputs, upstream) for y in (out, truth))
    for one, other in zip(found[:3], right[:3], strict=True):
        torch.testing.assert_close(one, other, **TIGHT)
    lower = (lambda x: x.tril(-1)) if causal else (lambda x: x)
    torch.testing.assert_close(lower(found[3]), lower(right[3]), **TIGHT)


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_worked_out_one_by_one(causal: bool) -> None:
    q, k, v, weights = drawn(causal)
    out = sorted_forward(q, k, v, weights, causal, SCALE)[0]
    for b, h, i, s in ((0, 0, 0, 0), (0, 3, 2, 1), (1, 1, 6, 2), (1, 2, 3, 0)):
        own = slice(s + 1) if causal else slice(None)
        keys, values = (x[b, h // 2, i, own] for x in (k, v))
        if i or not causal:
            mixed = ((weights[b, h // 2, i, :, None, None] * x[b, h // 2]).sum(0) for x in (k, v))
            keys, values = (torch.cat(pair) for pair in zip(mixed, (keys, values), strict=True))
        expected = torch.softmax(SCALE * keys @ q[b, h, i, s], 0) @ values
        torch.testing.assert_close(out[b, h, i, s], expected, **TIGHT)


@pytest.mark.parametrize("causal", [False, True])
def test_can_be_differentiated_twice(causal: bool) -> None:
    def function(*inputs: Tensor) -> Tensor:
        lower = inputs[3].tril(-1) if causal else inputs[3]
        return sorted_forward(*inputs[:3], lower, causal, SCALE)[0]

    assert torch.autograd.gradcheck(function, drawn(causal), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, drawn(causal), fast_mode=True)


def test_are_proper_operators() -> None:
    inputs = [x.detach().float().requires_grad_() for x in drawn(False)]
    torch.library.opcheck(sorted_forward, (*inputs, False, SCALE))
    torch.library.opcheck(keys_forward, (torch.randn(2, 3, 9, 6, requires_grad=True),))


@pytest.mark.parametrize("at_once", [1, 4, 99])
def test_queries_as_their_own_keys(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_keys, "tiles_at_once", lambda scores, threads: at_once)
    q = torch.randn(2, 3, 9, 6, dtype=torch.float64)
    q[0, 1, 4] = 0.0
    q.requires_grad_()
    got, truth = as_keys(q), bucket_keys.composite(q)
    torch.testing.assert_close(got, truth, **TIGHT)
    upstream = torch.randn_like(truth)
    upstream[0, 1, 4] = 0.0
    torch.testing.assert_close(*(torch.autograd.grad(y, q, upstream)[0] for y in (got, truth)), **TIGHT)
    assert torch.autograd.gradgradcheck(as_keys, (torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True),))


def test_keep_the_precision_of_their_dtype() -> None:
    def results(dtype: torch.dtype, more: torch.dtype, inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
        q, k, v, weights = (x.detach().to(dtype).to(more).requires_grad_() for x in inputs)
        out = sorted_forward(q, k, v, weights, True, SCALE)[0]
        keys = as_keys(q[:, :, 0])
        grads = torch.autograd.grad((out * upstream).sum() + (keys * upstream[0, 0, 0, 0, 0]).sum(), (q, k, v, weights))
        return [out.detach(), keys.detach(), *grads]

    inputs, upstream = drawn(True), torch.randn(2, 4, 7, 3, 5, dtype=torch.float64)
    for dtype, most in ((torch.float32, 2e-6), (torch.bfloat16, 2**-6)):
        given = inputs, upstream
        for one, other in zip(results(dtype, dtype, *given), results(dtype, torch.float64, *given), strict=True):
            assert float((one.double() - other).abs().max() / other.abs().max()) < most
