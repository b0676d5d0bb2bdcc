"""Sinkhorn attention against the balancing of `sinkhorn_transformer`, blocks worked out one by one, and dense attention."""

import pytest
import torch
import torch.nn.functional as F
from sinkhorn_transformer.sinkhorn_transformer import sinkhorn_sorting_operator
from torch import Tensor

from anyformer.attention import sinkhorn
from anyformer.attention._blocks import blocks
from anyformer.attention.sinkhorn import Sinkhorn, attend_sorted, balance
from anyformer.context import Context
from anyformer.errors import IncompatibleError, SpecError
from anyformer.model.build import build_attention, build_mixer
from anyformer.side import Side, side
from anyformer.site import Site

BLOCK = 4


def tokens(n: int, length: int | None = None) -> Side:
    return side(n, torch.device("cpu"), keep=None if length is None else (torch.arange(n) < length)[None])


def built(causal: bool = False, **knobs: float) -> Sinkhorn:
    attention = Sinkhorn(Site(24, 4, kv_heads=2, head_dim=6, causal=causal, max_length=40), block=BLOCK, **knobs)  # type: ignore[arg-type]
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    return attention.double().eval()


def drawn(n: int) -> list[Tensor]:
    return [torch.randn(2, heads, n, 6, dtype=torch.float64) for heads in (4, 2, 2)]


def by_hand(attention: Sinkhorn, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The equation with loops: weights balanced as plain numbers, every row of queries on its own."""
    n, out = q.shape[2], torch.zeros_like(q)
    count = -(-n // BLOCK)
    for b in range(2):
        for g in range(2):
            spans = [range(j * BLOCK, min(n, (j + 1) * BLOCK)) for j in range(count)]
            seen = [range(span[0] + 1) if causal else span for span in spans]
            means = torch.stack([k[b, g, list(span)].mean(0) for span in seen])
            hidden = torch.relu(means @ attention.inner[g] + attention.inner_bias[g])
            scores = (hidden @ attention.outer[g] + attention.outer_bias[g])[:, :count] / attention.temperature
            p = plain_balance(scores, attention.iterations, causal)
            for i, rows in enumerate(spans):
                for at in rows:
                    for h in (2 * g, 2 * g + 1):
                        out[b, h, at] = one_row(q[b, h, at], k[b, g], v[b, g], p[i], spans, spans[i], causal, at)
    return out


def one_row(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, spans: list[range], own: range, causal: bool, at: int
) -> Tensor:
    logits, values = [], []
    for slot in range(BLOCK):
        parts = [(p[j], span[slot]) for j, span in enumerate(spans) if slot < len(span) and p[j] > 0]
        if parts:
            share = sum(weight for weight, _ in parts)
            logits.append(q @ sum(weight * k[j] for weight, j in parts) / share / 6**0.5 + share.log())
            values.append(sum(weight * v[j] for weight, j in parts) / share)
    for j in own:
        if j <= at or not causal:
            logits.append(q @ k[j] / 6**0.5)
            values.append(v[j])
    return torch.stack(logits).softmax(0) @ torch.stack(values)


def plain_balance(scores: Tensor, iterations: int, causal: bool) -> Tensor:
    count = len(scores)
    p = scores.exp() * (torch.ones(count, count).tril(-1) if causal else 1)

    def by_row(p: Tensor) -> Tensor:
        return torch.stack([row / row.sum() if row.sum() > 0 else row for row in p])

    p = by_row(p)
    for _ in range(iterations):
        column = torch.stack([p[: i + 1].sum(0) if causal else p.sum(0) for i in range(count)])
        p = by_row(p / torch.where(column > 0, column, 1.0))
    return p


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [3, 4, 8, 19])
def test_blocks_worked_out_one_by_one(n: int, causal: bool) -> None:
    attention, parts = built(causal), drawn(n)
    given = Context(causal=causal, queries=tokens(n), keys=tokens(n))
    mine, other = ([part.clone().requires_grad_() for part in parts] for _ in range(2))
    weights, parameters = torch.randn(2, 4, n, 6, dtype=torch.float64), list(attention.parameters())
    got, expected = attention(*mine, given), by_hand(attention, causal, *other)
    close(got, expected)
    found, right = (
        torch.autograd.grad((out * weights).sum(), [*inputs, *parameters], allow_unused=True, materialize_grads=True)
        for out, inputs in ((got, mine), (expected, other))
    )
    for one, two in zip(found, right, strict=True):
        close(one, two)


def test_the_balancing_of_the_package() -> None:
    scores = torch.randn(3, 2, 6, 6, dtype=torch.float64)
    got = balance(scores, torch.ones(3, 1, 6, 6, dtype=torch.bool), 5, causal=False)
    start = scores.log_softmax(-1).flatten(0, 1).mT  # the package ends with columns
    close(got.flatten(0, 1), sinkhorn_sorting_operator(start, 5).mT)


def test_rows_and_columns_sum_to_1() -> None:
    p = balance(torch.randn(1, 1, 6, 6).double(), torch.ones(1, 1, 6, 6, dtype=torch.bool), 200, causal=False)
    for axis in (-1, -2):
        close(p.sum(axis), torch.ones_like(p.sum(axis)))


@pytest.mark.parametrize("spread", [1.0, 1e3])
def test_a_causal_row_does_not_know_later_ones(spread: float) -> None:
    scores = spread * torch.randn(1, 1, 7, 7, dtype=torch.float64)
    allowed = torch.ones(1, 1, 7, 7, dtype=torch.bool).tril(-1)
    p = balance(scores, allowed, 6, causal=True)
    close(p.sum(-1)[0, 0], torch.tensor([0.0] + [1.0] * 6, dtype=torch.float64))
    for i in range(7):
        earlier = (..., slice(i + 1), slice(i + 1))
        close(p[earlier], balance(scores[earlier], allowed[earlier], 6, causal=True))


@pytest.mark.parametrize("length", [12, 10])
def test_with_one_block_a_row_it_is_dense_attention_with_repeats(length: int) -> None:
    q, k, v = drawn(length)
    count, order = 3, torch.tensor([2, 0, 1])
    weights = F.one_hot(order, count).double().expand(2, 2, -1, -1)
    given = Context(causal=False, queries=tokens(length), keys=tokens(length))
    got = attend_sorted(q, k, v, weights, blocks(given, given.keys, 2, BLOCK), 6**-0.5, 0.0)
    block = torch.arange(length) // BLOCK
    times = (torch.eye(count) + F.one_hot(order, count))[block][:, block].double()
    bias = torch.where(times > 0, times.log(), -torch.inf)
    close(got, F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True))


def test_one_block_is_full_attention() -> None:
    q, k, v = drawn(BLOCK)
    given = Context(causal=False, queries=tokens(BLOCK), keys=tokens(BLOCK))
    close(built()(q, k, v, given), F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    given = Context(causal=True, queries=tokens(BLOCK), keys=tokens(BLOCK))
    close(built(True)(q, k, v, given), F.scaled_dot_product_attention(q, k, v, enable_gqa=True, is_causal=True))


@pytest.mark.parametrize("causal", [False, True])
def test_values_are_values(causal: bool) -> None:
    q, k, v = drawn(13)
    given = Context(causal=causal, queries=tokens(13), keys=tokens(13))
    attention = built(causal)
    assert not attention(q, k, torch.zeros_like(v), given).any()
    close(attention(q, k, 3 * v, given), 3 * attention(q, k, v, given))
    close(attention(q, k, torch.ones_like(v), given), torch.ones_like(q))


@pytest.mark.parametrize("causal", [False, True])
def test_hard_takes_the_best_block_and_the_network_learns_by_the_mixture(causal: bool) -> None:
    soft, hard = built(causal), built(causal, hard=True)
    hard.load_state_dict(soft.state_dict())
    n, k = 16, drawn(16)[1].requires_grad_()
    given = Context(causal=causal, queries=tokens(n), keys=tokens(n))
    laid = blocks(given, given.keys, 2, BLOCK)
    p, q = (attention._weights(k, laid) for attention in (soft, hard))
    best = F.one_hot(p.argmax(-1), 4).double()
    close(q, best.masked_fill(~sinkhorn.sources(laid), 0.0))
    weights = torch.randn_like(p)
    close(*(torch.autograd.grad((x * weights).sum(), a.outer, retain_graph=True)[0] for x, a in ((p, soft), (q, hard))))
    assert torch.autograd.grad(q.sum(), k, allow_unused=True) == (None,)


def test_noise_is_drawn_in_training_only() -> None:
    attention, (q, k, v) = built(noise=1.0), drawn(12)
    given = Context(causal=False, queries=tokens(12), keys=tokens(12))
    assert torch.equal(attention(q, k, v, given), attention(q, k, v, given))
    attention.train()
    assert not torch.equal(attention(q, k, v, given), attention(q, k, v, given))
    attention.noise = 0.0
    assert torch.equal(attention(q, k, v, given), attention.eval()(q, k, v, given))


def test_bad_knobs_are_refused() -> None:
    with pytest.raises(SpecError, match="expected a noise of at least 0, got -1"):
        build_attention("sinkhorn(noise=-1.0)", Site(8, 2))
    with pytest.raises(SpecError, match="block=0: expected greater than or equal to 1"):
        build_attention("sinkhorn(0)", Site(8, 2))


def test_more_tokens_than_it_was_built_for_are_refused() -> None:
    q, k, v = drawn(41)
    with pytest.raises(SpecError, match="sinkhorn was built for at most 40 tokens, got 41; build with max_length=41"):
        built()(q, k, v, Context(causal=False, queries=tokens(41), keys=tokens(41)))


def test_a_second_sequence_is_refused() -> None:
    mixer = build_mixer("sinkhorn", "none", Site(8, 2))
    with pytest.raises(IncompatibleError, match="sinkhorn mixes one sequence with itself and takes no source"):
        mixer(torch.randn(1, 3, 8), source=torch.randn(1, 4, 8))


def close(got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-12)
