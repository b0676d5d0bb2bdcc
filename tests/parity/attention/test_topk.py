"""Top-k attention against `x_transformers`, against rows worked out one by one, and against full attention."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anyformer.attention.topk import Topk, weigh
from anyformer.context import Context
from anyformer.errors import SpecError
from anyformer.model.build import build_attention
from anyformer.side import side
from anyformer.site import Site

with warnings.catch_warnings():  # it uses torch.jit.script, which torch deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from x_transformers.attend import Attend


def run(k: int, causal: bool, q: Tensor, keys: Tensor, v: Tensor) -> Tensor:
    attention = Topk(Site(24, 3, causal=causal, kv_heads=keys.shape[1]), k=k)
    tokens = side(q.shape[2], q.device)
    return attention(q, keys, v, Context(causal=causal, queries=tokens, keys=tokens))


def drawn(count: int = 3, n: int = 17) -> list[Tensor]:
    return list(torch.randn(count, 2, 3, n, 8, dtype=torch.float64).unbind(0))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("k", [2, 5, 16])
def test_equals_the_package(k: int, causal: bool) -> None:
    parts, weights = drawn(), torch.randn(2, 3, 17, 8, dtype=torch.float64)
    mine, other = ([part.clone().requires_grad_() for part in parts] for _ in range(2))
    got, expected = run(k, causal, *mine), Attend(causal=causal, sparse_topk=k)(*other)[0]
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    close(got, expected)
    for one, two in zip(mine, other, strict=True):
        close(one.grad, two.grad)


def test_rows_worked_out_one_by_one() -> None:
    q, k, v = drawn(n=9)
    got = run(3, True, q, k, v)
    for i in range(9):
        for b in range(2):
            for h in range(3):
                scores = (q[b, h, i] @ k[b, h, : i + 1].T) / 8**0.5
                kept = scores.argsort(descending=True)[:3]
                close(got[b, h, i], scores[kept].softmax(0) @ v[b, h, kept])


def test_k_of_all_keys_is_full_attention() -> None:
    q, k, v = drawn()
    close(run(17, False, q, k, v), F.scaled_dot_product_attention(q, k, v))
    close(run(99, True, q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_k_of_1_is_the_value_of_the_best_key() -> None:
    q, k, v = drawn()
    best = (q @ k.mT).argmax(dim=-1)
    close(run(1, False, q, k, v), v.gather(2, best[..., None].expand_as(v)))


def test_fewer_keys_than_k_bring_no_masked_one_back() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 2.0, -torch.inf], [-torch.inf] * 4], dtype=torch.float64)
    close(weigh(logits, 3)[0], torch.tensor([1.0, -torch.inf, 2.0, -torch.inf], dtype=torch.float64).softmax(0))
    assert not weigh(logits, 3)[1].any()


@pytest.mark.parametrize("difference", [0.0, 1e-15])
def test_logits_that_tie_but_for_rounding_are_kept_together(difference: float) -> None:
    logits = torch.tensor([1.0, 0.0, -difference, -1e-6], dtype=torch.float64)
    expected = torch.tensor([1.0, 0.0, 0.0, -torch.inf], dtype=torch.float64).softmax(0)
    close(weigh(logits, 2), expected)


@pytest.mark.parametrize("spec", ["topk(0)", "topk(k=-3)"])
def test_k_below_1_is_refused(spec: str) -> None:
    with pytest.raises(SpecError, match=r"k=.*greater than or equal to 1"):
        build_attention(spec, Site(8, 2))


def close(got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-12)
