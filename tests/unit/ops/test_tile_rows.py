"""Rows that see every key beside a window."""

import math

import pytest
import torch

from anyformer.ops.rows import with_full_rows
from anyformer.ops.softmax import dense
from anyformer.ops.window import window_attention


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("want_lse", [True, False])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_global_columns_and_rows_equal_the_mask(want_lse, softcap):
    n, tokens = 50, torch.tensor([[0, 20, -1], [3, 4, 49]])
    q, k, v = random(2, 4, n, 4), random(2, 2, n, 4), random(2, 2, n, 3)
    keep, documents = torch.rand(2, n) < 0.9, (torch.arange(n) > 30).long().expand(2, n)
    shared = {"keep": keep, "documents": documents, "scale": 0.5, "softcap": softcap}
    result = window_attention(q, k, v, left=5, right=2, global_keys=tokens, want_lse=want_lse, **shared)
    out, lse = with_full_rows(*result, q, k, v, rows=tokens, **shared)

    is_global = torch.zeros(2, n + 1, dtype=torch.bool).scatter(1, tokens.where(tokens >= 0, n), True)[:, :n]
    offset = torch.arange(n) - torch.arange(n)[:, None]
    pairs = ((offset >= -5) & (offset <= 2)) | is_global[:, None] | is_global[:, :, None]
    pairs = pairs & keep[:, None] & (documents[:, None] == documents[:, :, None])
    expected, expected_lse = dense(q, k, v, allowed=pairs[:, None], scale=0.5, softcap=softcap)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    if want_lse:
        torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-12)
    else:
        assert lse.shape == (2, 4, 0)
    probe = torch.randn_like(expected)
    found, wanted = (torch.autograd.grad(x, (q, k, v), probe) for x in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


def test_what_the_layout_computed_there_moves_nothing():
    q, k, v = random(1, 1, 4, 2), random(1, 1, 4, 2), random(1, 1, 4, 2)
    out, lse = torch.full((1, 1, 4, 2), math.nan, dtype=torch.float64), torch.zeros(1, 1, 0, dtype=torch.float64)
    full, _ = with_full_rows(out, lse, q, k, v, rows=torch.tensor([[1, 3]]), scale=1.0)
    assert full[0, 0, [1, 3]].isfinite().all()
    assert full[0, 0, [0, 2]].isnan().all()
