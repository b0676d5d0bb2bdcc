"""The Sparse Transformer's patterns against the paper's sets, written out, with attention over them row by row."""

import pytest
import torch
import torch.nn.functional as F

from anyformer.errors import SpecError
from anyformer.pattern import Facts
from anyformer.pattern._algebra import PerHead, PerLayer
from anyformer.pattern.leaves import Causal, Full
from anyformer.pattern.sparse_transformer import sparse_transformer

N = 29


def near(kind, i, length):
    return (
        set(range(max(i - length + 1, 0), i + 1))
        if kind == "strided"
        else {j for j in range(i + 1) if j // length == i // length}
    )


def far(kind, i, length, summary):
    if kind == "strided":
        return set(range(i, -1, -length))
    return {j for j in range(i + 1) if j % length in range(length - summary, length)}


def closure(rows):
    """Each row with the later rows that hold it."""
    return [row | {j for j in range(len(rows)) if i in rows[j]} for i, row in enumerate(rows)]


def as_sets(mask):
    return [set(row.nonzero()[:, 0].tolist()) for row in mask]


CASES = [("fixed", 8, 2), ("fixed", 5, 1), ("fixed", 4, 4), ("strided", 6, 1), ("strided", 1, 1), ("fixed", 64, 3)]


@pytest.mark.parametrize("kind, length, summary", CASES)
def test_sets_of_the_paper(kind, length, summary):
    nears = [near(kind, i, length) for i in range(N)]
    fars = [far(kind, i, length, summary) for i in range(N)]
    unions = [one | two for one, two in zip(nears, fars, strict=True)]

    merged = sparse_transformer(kind, length, summary)
    assert as_sets(merged.dense(N, causal=True)[0]) == unions
    assert as_sets(merged.dense(N)[0]) == closure(unions)
    assert torch.equal(merged.dense(N), merged.dense(N).mT)

    alternate = sparse_transformer(kind, length, summary, usage="alternate")
    assert isinstance(alternate, PerLayer)
    for layer in range(3):
        mask = alternate.dense(N, causal=True, facts=Facts(layer=layer))[0]
        assert as_sets(mask) == (fars if layer % 2 else nears)
        assert as_sets(alternate.dense(N, facts=Facts(layer=layer))[0]) == closure(fars if layer % 2 else nears)

    heads = sparse_transformer(kind, length, summary, usage="heads", heads=4)
    assert isinstance(heads, PerHead)
    masks = heads.dense(N, heads=4, causal=True)
    assert [as_sets(mask) for mask in masks] == [nears, nears, fars, fars]


@pytest.mark.parametrize("kind, length, summary", CASES)
def test_attention_and_gradients_over_those_sets(kind, length, summary):
    sets = [near(kind, i, length) | far(kind, i, length, summary) for i in range(N)]
    q, k, v = (torch.randn(1, 1, N, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    rows = []
    for i, keys in enumerate(sets):
        index = sorted(keys)
        rows.append((q[0, 0, i] @ k[0, 0, index].T / 2).softmax(dim=0) @ v[0, 0, index])
    want = torch.stack(rows)[None, None]
    mask = sparse_transformer(kind, length, summary).dense(N, causal=True)
    found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert (found - want).abs().max() <= 1e-10
    weight = torch.randn_like(want)
    for one, two in zip(*(torch.autograd.grad((out * weight).sum(), (q, k, v)) for out in (found, want)), strict=True):
        assert (one - two).abs().max() <= 1e-10 * two.abs().max()


@pytest.mark.parametrize("kind, length, summary", CASES)
def test_two_steps_reach_every_earlier_token(kind, length, summary):
    pattern = sparse_transformer(kind, length, summary, usage="alternate")
    first, second = (pattern.dense(N, causal=True, facts=Facts(layer=layer))[0].double() for layer in (0, 1))
    reached = second @ first + second + first  # a residual stream skips either step
    assert torch.equal(reached > 0, Causal().dense(N)[0])


def test_one_stretch_is_full_attention():
    assert torch.equal(sparse_transformer("fixed", N, 1).dense(N), Full().dense(N))
    assert torch.equal(sparse_transformer("strided", N).dense(N, causal=True), Causal().dense(N))


@pytest.mark.parametrize(
    "knobs, message",
    [
        (
            {"length": 0},
            r"sparse_transformer: expected length as a whole number of at least 1, got 0; for example length=128",
        ),
        ({"length": 8, "summary": 9}, r"Columns: expected count as at most the period of 8, got 9"),
        ({"summary": 0}, r"Columns: expected count as a whole number of at least 1, got 0"),
        (
            {"usage": "heads"},
            r"expected heads as the layer's even number of query heads, got None; for example usage='heads', heads=8",
        ),
        ({"usage": "heads", "heads": 3}, r"expected heads as the layer's even number of query heads, got 3"),
    ],
)
def test_knobs_out_of_range(knobs, message):
    with pytest.raises(SpecError, match=message):
        sparse_transformer(**knobs)


@pytest.mark.plain
def test_unknown_kinds():
    with pytest.raises(SpecError, match=r"sparse_transformer: expected kind as 'fixed' or 'strided', got 'wide'"):
        sparse_transformer("wide")
    with pytest.raises(
        SpecError, match=r"expected usage as 'merged', 'alternate' or 'heads', got 'both'; for example usage='merged'"
    ):
        sparse_transformer(usage="both")
