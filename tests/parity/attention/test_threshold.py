"""Threshold attention against rows worked out one by one from the definition, and against full attention."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anyformer.attention.threshold import Rule, Threshold, weigh
from anyformer.context import Context
from anyformer.errors import SpecError
from anyformer.model.build import build_attention
from anyformer.side import side
from anyformer.site import Site


def run(level: float, rule: Rule, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    tokens = side(q.shape[2], q.device)
    attention = Threshold(Site(24, 3, causal=causal), level=level, rule=rule)
    return attention(q, k, v, Context(causal=causal, queries=tokens, keys=tokens))


def fewest(p: list[float], level: float) -> list[bool]:
    kept, mass = [False] * len(p), 0.0
    for j in sorted(range(len(p)), key=lambda j: -p[j]):
        if mass >= level:
            break
        kept[j], mass = True, mass + p[j]
    return kept


KEPT: dict[str, Callable[[list[float], float], list[bool]]] = {
    "largest": lambda p, level: [each >= level * max(p) for each in p],
    "weight": lambda p, level: [each >= level or each == max(p) for each in p],
    "mass": fewest,
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rule", "level"), [("largest", 0.3), ("weight", 0.2), ("weight", 0.9), ("mass", 0.7)])
def test_rows_worked_out_one_by_one(rule: Rule, level: float, causal: bool) -> None:
    parts, weights = torch.randn(3, 2, 3, 11, 8, dtype=torch.float64), torch.randn(2, 3, 11, 8, dtype=torch.float64)
    mine, (q, k, v) = ([part.clone().requires_grad_() for part in parts.unbind(0)] for _ in range(2))
    got = run(level, rule, causal, *mine)
    rows, cut = [], 0
    for b in range(2):
        for h in range(3):
            for i in range(11):
                seen = slice(0, i + 1 if causal else 11)
                p = ((q[b, h, i] @ k[b, h, seen].T) / 8**0.5).softmax(0)
                kept = torch.tensor(KEPT[rule](p.tolist(), level))
                cut += int((~kept).sum())
                rows.append((p[kept] / p[kept].sum()) @ v[b, h, seen][kept])
    expected = torch.stack(rows).view(2, 3, 11, 8)
    assert cut > 50
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    close(got, expected)
    for one, two in zip(mine, (q, k, v), strict=True):
        close(one.grad, two.grad)


@pytest.mark.parametrize(("rule", "level"), [("largest", 1e-30), ("weight", 1e-30), ("mass", 1 - 1e-16)])
def test_a_level_that_keeps_all_is_full_attention(rule: Rule, level: float) -> None:
    q, k, v = torch.randn(3, 2, 3, 9, 8, dtype=torch.float64).unbind(0)
    close(run(level, rule, False, q, k, v), F.scaled_dot_product_attention(q, k, v))
    close(run(level, rule, True, q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize("rule", ["largest", "weight", "mass"])
def test_a_masked_key_is_never_kept(rule: Rule) -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.1], [-torch.inf] * 3], dtype=torch.float64)
    got = weigh(logits, 0.999, rule)
    assert got[0, 1] == 0
    assert abs(float(got[0].sum()) - 1) < 1e-12
    assert not got[1].any()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("threshold(0.0)", "level=0 keeps all; use a level above 0"),
        ("threshold(0.0, rule=mass)", "level=0 keeps nothing"),
        ("threshold(1.0)", "level=1.0: expected less than 1"),
        ("threshold(-0.5)", "level=-0.5: expected greater than or equal to 0"),
        ("threshold(rule=best)", "rule='best': expected 'largest', 'weight' or 'mass'"),
    ],
)
def test_bad_knobs_are_refused(spec: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build_attention(spec, Site(8, 2))


def close(got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-12)
