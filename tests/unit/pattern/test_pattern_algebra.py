"""The algebra of patterns: boolean laws, texts, values, heads and layers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_patterns import HEADS, both_ways, joined, leaves, value_of

from anyformer.errors import SpecError
from anyformer.pattern import Facts
from anyformer.pattern._algebra import And, Not, Or, PerHead, PerLayer
from anyformer.pattern.bigbird import bigbird
from anyformer.pattern.leaves import Block, Causal, Dilated, Full, Global, Local, Random, Strided

N = 13


def dense(pattern, causal=False):
    return pattern.dense(N, heads=HEADS, causal=causal)


@settings(max_examples=60, deadline=None)
@given(a=leaves, b=leaves, c=leaves, causal=st.booleans())
def test_boolean_laws(a, b, c, causal):
    everything = dense(Full(), causal)
    of = lambda pattern: dense(pattern, causal)  # noqa: E731
    assert torch.equal(of(~(a | b)), of(~a & ~b))
    assert torch.equal(of(~(a & b)), of(~a | ~b))
    assert torch.equal(of(a | b), of(b | a))
    assert torch.equal(of(a & (b | c)), of((a & b) | (a & c)))
    assert torch.equal(of(a | (a & b)), of(a))
    assert torch.equal(of(a | ~a), everything)
    assert not of(a & ~a).any()
    assert torch.equal(of(a | b), of(a) | of(b))
    assert torch.equal(of(~a), ~of(a) & everything)


@settings(max_examples=200, deadline=None)
@given(pattern=joined(both_ways))
def test_a_text_reads_back_to_an_equal_value(pattern):
    again = value_of(repr(pattern))
    assert again == pattern
    assert hash(again) == hash(pattern)
    assert repr(again) == repr(pattern)


def test_texts():
    assert repr(Local(64) | Global([0])) == "Local(64) | Global([0])"
    assert repr(Local(64, 0)) == "Local(64, 0)"
    assert repr((Local(1) | Full()) & ~Causal()) == "(Local(1) | Full()) & ~Causal()"
    assert repr(~(Local(1) & Full())) == "~(Local(1) & Full())"
    assert repr(Global([-1, 3, 0])) == "Global([0, 3, -1])"
    assert repr(bigbird()) == "bigbird(block=64, random=3)"
    assert repr(bigbird(window=5, plan="google")) == "bigbird(block=64, random=3, window=5, plan='google')"
    per_head = PerHead((Local(64), 4), (bigbird(), 4))
    assert repr(per_head) == "PerHead((Local(64), 4), (bigbird(block=64, random=3), 4))"
    assert repr(PerLayer(Local(1), Full())) == "PerLayer(Local(1), Full())"


def test_a_part_that_comes_twice_is_kept_once_and_nesting_is_flat():
    a, b, c = Local(1), Block(2), Strided(3)
    assert (a | b) | (c | a) == Or((a, b, c))
    assert (a & b) & (c & a) == And((a, b, c))
    assert a | a == a
    assert ~~a == a
    assert ~a == Not(a)


def test_patterns_are_frozen_and_join_only_patterns():
    with pytest.raises(AttributeError):
        Local(3).left = 4  # type: ignore[misc]
    with pytest.raises(TypeError):
        Local(3) | 4  # type: ignore[operator]
    with pytest.raises(TypeError):
        Local(3) & 4  # type: ignore[operator]


def test_band_horizon_and_stride():
    assert Local(4, 2).band() == (4, 2)
    assert Local(4, 2).band(causal=True) == (4, 0)
    assert (Local(4, 2) | Local(1, 7)).band() == (4, 7)
    assert (Local(4, 2) & Local(1, 7)).band() == (1, 2)
    assert (Local(4, 2) & Causal()).band() == (4, 0)
    assert Causal().band() == (None, 0)
    assert Full().band() == (None, None)
    assert Full().band(causal=True) == (None, 0)
    assert (Local(4) | Block(3)).band() is None
    assert (~Local(4)).band() is None

    assert Local(4, 2).horizon() == 4
    assert Dilated(4, 2, 3).horizon() == 12
    assert Block(8).horizon() == 7
    assert (Local(4) | Dilated(4, 2, 3)).horizon() == 12
    assert (Local(4) | Causal()).horizon() is None
    assert (Local(4) & Causal()).horizon() == 4
    assert (~Local(4)).horizon() is None
    assert PerHead((Local(4), 1), (Local(9), 1)).horizon() == 9
    assert PerLayer(Local(4), Strided(9)).horizon() is None

    assert (Strided(6) | Strided(4)).traits(False).stride == 2
    assert (Strided(6) & Strided(4)).traits(False).stride == 12
    assert (Strided(6) & ~Local(3)).traits(False).stride == 6
    assert (Strided(6) | Local(3)).traits(False).stride == 1


def test_heads_and_layers_have_patterns_of_their_own():
    a, b, c = Local(1), Strided(3), Random(2)
    pattern = PerHead((a, 2), (b | c, 1))
    masks = pattern.dense(N, heads=3)
    assert torch.equal(masks[0], a.dense(N)[0])
    assert torch.equal(masks[1], a.dense(N)[0])
    assert torch.equal(masks[2:], (b | c).dense(N, heads=range(2, 3)))  # draws follow the original head number
    assert pattern.groups_of(3) == [(a, range(2)), (b | c, range(2, 3))]
    assert (pattern | Causal()).groups_of(3) == [(a | Causal(), range(2)), (b | c | Causal(), range(2, 3))]
    assert (~pattern & Causal()).at(0) == ~a & Causal()
    assert a.groups_of(8) == [(a, range(8))]

    layers = PerLayer(a, b)
    for layer in range(4):
        assert torch.equal(layers.dense(N, facts=Facts(layer=layer)), (a, b)[layer % 2].dense(N))
        assert layers.at(0, layer) == (a, b)[layer % 2]


def test_bottom_right_alignment():
    assert Causal().dense(2, 5)[0].int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert Causal().dense(5, 2)[0].int().tolist() == [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]
    assert torch.equal(Local(2).dense(4, 9)[0], Local(2).dense(9)[0, -4:])


def test_index_tensors_without_axes_and_huge_broadcasts():
    pattern = Local(2) | Global([0, -1]) | Random(2) | bigbird(2, 1)
    facts = Facts(lengths=torch.tensor([N, N - 3]))
    mask = pattern.dense_batch(N, heads=2, facts=facts)
    modified = pattern.mask_mod(facts)
    at = torch.tensor
    for batch, head, q, k in ((0, 0, 0, 5), (1, 1, 9, 4), (1, 0, 12, 12)):
        one = modified(at(batch), at(head), at(q), at(k))
        assert one.shape == ()
        assert one.item() == mask[batch, head, q, k]
    wide = modified(at(0), at(0), torch.arange(N)[:, None, None].expand(N, 5, N), torch.arange(N, dtype=torch.int32))
    assert torch.equal(wide[:, 3], mask[0, 0])


def test_errors_of_readers():
    with pytest.raises(SpecError, match=r"is for 8 query heads, the layer has 6; make the counts sum to 6"):
        PerHead((Local(1), 4), (Full(), 4)).dense(N, heads=6)
    with pytest.raises(SpecError, match=r"is for 2 query heads"):
        (PerHead((Local(1), 1), (Full(), 1)) | Block(2)).blocks(N, 4)
    with pytest.raises(SpecError, match=r"expected heads as a number of at least 1 .* got 0; for example heads=8"):
        Local(1).dense(N, heads=0)
    with pytest.raises(SpecError, match=r"expected the facts of one sample, got 2; use dense_batch"):
        Local(1).dense(N, facts=Facts(lengths=torch.tensor([3, 4])))
    with pytest.raises(SpecError, match=r"expected facts of at most the 13 keys there are, got a length of 14"):
        Local(1).dense(N, facts=Facts(lengths=torch.tensor([14])))
    with pytest.raises(SpecError, match=r"Global\(\[0, -1\]\): a causal layer does not know its last token.* got -1"):
        (Local(1) | Global([0, -1])).dense(N, causal=True)
    zero = torch.tensor(0)
    with pytest.raises(SpecError, match=r"a causal layer does not know its last token"):
        Global([-1]).allows(zero, zero, zero, zero, Facts(length=3, causal=True))
    with pytest.raises(SpecError, match=r"expected Facts\(length=\.\.\.\) or Facts\(lengths=\.\.\.\), got neither"):
        Global([-1]).allows(zero, zero, zero, zero, Facts())
    with pytest.raises(SpecError, match=r"PerHead: expected pairs of a pattern and a number of heads, got \(\)"):
        PerHead()
    with pytest.raises(SpecError, match=r"PerHead: expected a number of heads as a whole number of at least 1, got 0"):
        PerHead((Local(1), 0))
    with pytest.raises(SpecError, match=r"PerLayer: expected patterns, got \(\)"):
        PerLayer()


@pytest.mark.plain
def test_errors_of_wrong_types():
    with pytest.raises(SpecError, match=r"PerHead: expected pairs of a pattern and a number of heads"):
        PerHead((Local(1), 2, 3))  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"PerHead: expected pairs of a pattern and a number of heads"):
        PerHead(Local(1))  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"PerLayer: expected patterns"):
        PerLayer(Local(1), 3)  # type: ignore[arg-type]
