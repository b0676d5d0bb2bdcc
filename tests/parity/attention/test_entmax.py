"""Entmax attention against the sorted closed forms, the optimality conditions, a root finder and full attention."""

import math

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import brentq
from torch import Tensor

from anyformer.attention.entmax import Entmax, weigh
from anyformer.context import Context
from anyformer.errors import SpecError
from anyformer.model.build import build_attention
from anyformer.side import side
from anyformer.site import Site


def sorted_form(s: Tensor, alpha: float) -> Tensor:
    """Entmax of one row for alpha 2 and 1.5, by the sizes of support that the papers try one by one."""
    falling = s.sort(descending=True).values * (alpha - 1)
    found = None
    for size in range(1, len(s) + 1):
        top = falling[:size]
        if alpha == 2:
            t = (top.sum() - 1) / size
        else:
            mean, spread = top.mean(), (top.square().mean() - top.mean() ** 2) * size
            if spread > 1:
                break
            t = mean - ((1 - spread) / size).sqrt()
        if t <= falling[size - 1]:
            found = t
    assert found is not None
    return ((alpha - 1) * s - found).clamp(min=0) ** (1 / (alpha - 1))


@pytest.mark.parametrize("alpha", [1.5, 2.0])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_worked_out_one_by_one(alpha: float, causal: bool) -> None:
    parts, weights = torch.randn(3, 2, 3, 11, 8, dtype=torch.float64), torch.randn(2, 3, 11, 8, dtype=torch.float64)
    mine, (q, k, v) = ([part.clone().requires_grad_() for part in (2 * parts).unbind(0)] for _ in range(2))
    tokens = side(11, q.device)
    attention = Entmax(Site(24, 3, causal=causal), alpha=alpha)
    got = attention(*mine, Context(causal=causal, queries=tokens, keys=tokens))
    rows, zeros = [], 0
    for b in range(2):
        for h in range(3):
            for i in range(11):
                seen = slice(0, i + 1 if causal else 11)
                p = sorted_form((q[b, h, i] @ k[b, h, seen].T) / 8**0.5, alpha)
                zeros += int((p == 0).sum())
                rows.append(p @ v[b, h, seen])
    expected = torch.stack(rows).view(2, 3, 11, 8)
    assert zeros > 50
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    close(got, expected)
    for one, two in zip(mine, (q, k, v), strict=True):
        close(one.grad, two.grad)


@pytest.mark.parametrize("alpha", [1.001, 1.05, 1.3, 1.5, 1.9, 2.0])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("m", [1, 2, 700])
def test_the_threshold_is_the_root(alpha: float, spread: float, m: int) -> None:
    s = spread * torch.randn(m, dtype=torch.float64)

    def total(t: float) -> float:
        return float((((alpha - 1) * s - t).clamp(min=0) ** (1 / (alpha - 1))).sum()) - 1

    top = float(s.max()) * (alpha - 1)
    t = brentq(total, top - 1, top, xtol=1e-15, rtol=4 * torch.finfo(torch.float64).eps)
    close(weigh(s, alpha), ((alpha - 1) * s - t).clamp(min=0) ** (1 / (alpha - 1)), rtol=1e-9)


def test_near_1_it_is_softmax() -> None:
    s = torch.randn(5, 40, dtype=torch.float64)
    assert torch.allclose(weigh(s, 1 + 1e-7), s.softmax(-1), rtol=1e-5)


def test_rows_that_shrink_slowly() -> None:
    s = -torch.logspace(-15, 0, 60, base=2.0, dtype=torch.float64)
    close(weigh(s, 2.0), sorted_form(s, 2.0))


def test_the_gradient_is_that_of_the_implicit_equation() -> None:
    s = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    for alpha in (1.3, 1.5, 1.8):
        assert torch.autograd.gradcheck(lambda s, alpha=alpha: weigh(s, alpha), s)


def test_a_learned_alpha() -> None:
    attention = build_attention("entmax(alpha=1.3, learned=True)", Site(24, 3)).double()
    q, k, v = torch.randn(3, 1, 3, 6, 8, dtype=torch.float64).unbind(0)
    tokens = side(6, q.device)
    context = Context(causal=False, queries=tokens, keys=tokens)
    close(attention(q, k, v, context), Entmax(Site(24, 3), alpha=1.3)(q, k, v, context), rtol=1e-6)
    level = attention.get_parameter("level")
    level.data += torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)[:, None, None]
    for head in range(3):
        alpha = 1 + 1 / (1 + math.exp(-level[head].item()))
        alone = Entmax(Site(8, 1), alpha=alpha)(*(part[:, head : head + 1] for part in (q, k, v)), context)
        close(attention(q, k, v, context)[:, head : head + 1], alone)
    s = torch.randn(3, 4, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda level: weigh(s, 1 + level.sigmoid()), level)


def test_a_masked_key_has_no_weight() -> None:
    s = torch.tensor([[0.0, -torch.inf, 0.1], [-torch.inf] * 3], dtype=torch.float64, requires_grad=True)
    p = weigh(s, 1.5)
    close(p[0, ::2], sorted_form(s[0, ::2], 1.5))
    assert p[0, 1] == 0
    assert not p[1].any()
    (grad,) = torch.autograd.grad(p.square().sum(), s)
    assert torch.isfinite(grad).all()
    assert not grad[1].any()


@pytest.mark.parametrize("alpha", [1.0, 0.5, 2.5])
def test_alpha_out_of_range_is_refused(alpha: float) -> None:
    with pytest.raises(SpecError, match=f"expected an alpha above 1 and up to 2, got {alpha}; softmax is alpha 1"):
        build_attention(f"entmax(alpha={alpha})", Site(8, 2))


def test_a_learned_alpha_starts_below_2() -> None:
    with pytest.raises(SpecError, match=r"above 1 and below 2, got 2\.0"):
        build_attention("entmax(2.0, learned=True)", Site(8, 2))


def test_alpha_of_a_flat_row_spreads_evenly() -> None:
    q = torch.zeros(1, 2, 5, 4, dtype=torch.float64)
    v = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    tokens = side(5, q.device)
    got = Entmax(Site(8, 2))(q, q, v, Context(causal=False, queries=tokens, keys=tokens))
    close(got, F.scaled_dot_product_attention(q, q, v))


def close(got: Tensor | None, expected: Tensor | None, rtol: float = 1e-10) -> None:
    assert got is not None
    assert expected is not None
    assert torch.allclose(got, expected, rtol=rtol, atol=1e-12)
