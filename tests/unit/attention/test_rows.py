"""Rows of logits taken in pieces: the same as all at once, whatever the facts of the forward."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from anyformer.attention._rows import attend_rows, weigh_by_softmax
from anyformer.attention.softmax import attend_with_lse
from anyformer.context import Context
from anyformer.model.build import build_position, verdict
from anyformer.position.bind import bind
from anyformer.side import side
from anyformer.site import Site

SITE = Site(24, 6, kv_heads=2, max_length=16)
KEEP = torch.tensor([[True] * 11, [True] * 4 + [False] * 7, [False] * 11])


def context(position: str, causal: bool, **facts: Tensor) -> Context:
    encoding = build_position(position, replace(SITE, causal=causal)).double()
    for parameter in encoding.parameters():
        parameter.data.normal_()
    tokens = side(11, torch.device("cpu"), **facts)
    forms = verdict("softmax", position, SITE).forms
    return Context(
        causal=causal, queries=tokens, keys=tokens, encoding=bind(encoding, forms, tokens, tokens), softcap=3.0
    )


def with_gradients(out: Tensor, parts: list[Tensor]) -> list[Tensor]:
    return [out, *torch.autograd.grad(out.square().sum(), parts)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("position", ["none", "alibi", "shaw", "deberta", "rope_value"])
@pytest.mark.parametrize("facts", [{}, {"keep": KEEP}, {"documents": (torch.arange(11) // 4).expand(3, 11)}])
def test_pieces_of_rows_are_the_dense_reference(position: str, causal: bool, facts: dict[str, Tensor]) -> None:
    known = context(position, causal, **facts)
    q = torch.randn(3, 6, 11, 4, dtype=torch.float64)
    k, v = torch.randn(2, 3, 2, 11, 4, dtype=torch.float64).unbind(0)
    mask, bias = torch.rand(3, 1, 11, 11) > 0.3, torch.randn(1, 6, 11, 11, dtype=torch.float64)
    for given in (known, replace(known, mask=mask, bias=bias)):
        parts = [part.clone().requires_grad_() for part in (q, k, v)]
        expected = with_gradients(attend_with_lse(*parts, given)[0], parts)
        for most in (1, 3 * 6 * 11 * 4):
            found = with_gradients(attend_rows(*parts, given, weigh_by_softmax, most=most), parts)
            for got, right in zip(found, expected, strict=True):
                assert torch.allclose(got, right, rtol=1e-10, atol=1e-12)


def test_dropout_is_the_same_when_a_piece_is_computed_again() -> None:
    q, k, v = (part.requires_grad_() for part in torch.randn(3, 1, 6, 11, 4, dtype=torch.float64).unbind(0))
    tokens = side(11, q.device)
    known = Context(causal=True, queries=tokens, keys=tokens, dropout=0.5)

    def out(v: Tensor) -> Tensor:
        torch.manual_seed(3)
        return attend_rows(q, k, v, known, weigh_by_softmax, most=200)

    (grad,) = torch.autograd.grad(out(v).sum(), v)
    step = torch.randn_like(v)
    slope = (out(v + step) - out(v)).sum()  # the output is linear in the values
    assert torch.allclose((grad * step).sum(), slope, rtol=1e-9)
