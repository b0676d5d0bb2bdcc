"""efficient against the `linear_attention_transformer` package, and causal against its quadratic form."""

import pytest
import torch
from linear_attention_transformer.linear_attention_transformer import linear_attn
from torch import Tensor

import anyformer as af
from anyformer.context import Context
from anyformer.side import side

TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def ours(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, keep: Tensor | None = None) -> Tensor:
    attention = af.build_attention("efficient", af.Site(32, q.shape[1], causal=causal, kv_heads=k.shape[1]))
    queries, keys = (side(x.shape[2], x.device, keep=keep) for x in (q, k))
    return attention(q, k, v, Context(causal=causal, queries=queries, keys=keys))


def made(n: int, m: int, groups: int = 4) -> list[Tensor]:
    shapes = (2, 4, n, 8), (2, groups, m, 8), (2, groups, m, 8)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def agree(out: Tensor, truth: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(out, truth, **TIGHT)
    upstream = torch.randn_like(truth)
    for one, other in zip(*(torch.autograd.grad(y, inputs, upstream) for y in (out, truth)), strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_package(masked: bool) -> None:
    q, k, v = made(11, 11)
    keep = torch.arange(11) < torch.tensor([[11], [7]]) if masked else None
    theirs = linear_attn(q, k.clone(), v.clone(), keep) * 8**0.5  # it writes to k and v, and scales queries
    agree(ours(q, k, v, keep=keep), theirs, [q, k, v])


@pytest.mark.parametrize("groups", [4, 2])
def test_causal_equals_the_quadratic_form(groups: int) -> None:
    q, k, v = made(70, 75, groups)
    keys, values = (x.repeat_interleave(4 // groups, 1) for x in (k, v))
    seen = (torch.arange(75) <= torch.arange(5, 75)[:, None])[:, :, None]
    shares = keys[:, :, None].masked_fill(~seen, -torch.inf).softmax(3)  # [b h n m d]
    truth = torch.einsum("bhnd,bhnmd,bhmv->bhnv", q.softmax(-1), shares, values)
    agree(ours(q, k, v, causal=True), truth, [q, k, v])


@pytest.mark.parametrize("causal", [False, True])
def test_the_implied_weights_of_a_query_sum_to_one(causal: bool) -> None:
    q, k, v = made(9, 9)
    out = ours(q, 40 * k, torch.ones_like(v), causal=causal)
    torch.testing.assert_close(out, torch.ones_like(out), **TIGHT)


def test_keys_of_any_size_neither_overflow_nor_hide_others() -> None:
    q, k, v = (x.detach().float() for x in made(20, 20))
    k[:, :, 7] = 1e4
    out = ours(q, k, v, causal=True)
    torch.testing.assert_close(out[:, :, :7], ours(q[:, :, :7], k[:, :, :7], v[:, :, :7], causal=True))
    torch.testing.assert_close(out[:, :, 7:], v[:, :, 7:8].expand(-1, -1, 13, -1))  # it outweighs the rest
