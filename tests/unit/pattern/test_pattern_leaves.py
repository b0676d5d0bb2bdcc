"""Each leaf against its definition, pair by pair; windows and global tokens by counting; sizes out of range."""

import pytest
import torch

from anyformer.errors import SpecError
from anyformer.pattern import Facts
from anyformer.pattern._algebra import PerHead
from anyformer.pattern.leaves import (
    LEAVES,
    SLOT_NAMES,
    Block,
    Causal,
    Columns,
    Dilated,
    Flagged,
    Full,
    Global,
    Local,
    Random,
    RandomBlocks,
    Strided,
)

RULES = {
    Full(): lambda q, k, n: True,
    Causal(): lambda q, k, n: k <= q,
    Local(3, 1): lambda q, k, n: -3 <= k - q <= 1,
    Local(2): lambda q, k, n: abs(k - q) <= 2,
    Local(0): lambda q, k, n: k == q,
    Strided(4): lambda q, k, n: abs(q - k) in range(0, 100, 4),
    Strided(1): lambda q, k, n: True,
    Dilated(2, 1, 3): lambda q, k, n: k in (q - 6, q - 3, q, q + 3),
    Block(5): lambda q, k, n: q // 5 == k // 5,
    Columns(4, 1): lambda q, k, n: min(q, k) in (3, 7, 11, 15),
    Global([2, 5]): lambda q, k, n: bool({q, k} & {2, 5}),
    Global([0, 1, 2, -1]): lambda q, k, n: bool({q, k} & {0, 1, 2, n - 1}),
    Global([99]): lambda q, k, n: False,
    Global([-99]): lambda q, k, n: False,
    Flagged(): lambda q, k, n: False,
}


@pytest.mark.parametrize("pattern", RULES, ids=repr)
@pytest.mark.parametrize("n, m", [(0, 0), (1, 1), (13, 13), (4, 17), (0, 3), (3, 0)])
def test_a_leaf_is_its_definition(pattern, n, m):
    want = [[RULES[pattern](i + m - n, j, m) for j in range(m)] for i in range(n)]
    assert pattern.dense(n, m)[0].tolist() == want
    if not isinstance(pattern, Global):  # whose causal form is another rule
        causal = [[met and j <= i + m - n for j, met in enumerate(row)] for i, row in enumerate(want)]
        assert pattern.dense(n, m, causal=True)[0].tolist() == causal


def test_global_tokens_are_only_seen_when_causal():
    want = [[j in (2, 5) and j <= i for j in range(9)] for i in range(9)]
    assert Global([2, 5]).dense(9, causal=True)[0].tolist() == want


@pytest.mark.parametrize("window", [1, 3, 8, 50])
def test_a_window_of_w_is_w(window):
    counts = Local(window - 1).dense(8, causal=True)[0].sum(dim=1)
    assert counts.tolist() == [min(i + 1, window) for i in range(8)]
    for step in range(8):  # one new token at a time
        assert Local(window - 1).dense(1, step + 1, causal=True).sum() == min(step + 1, window)
    assert torch.equal(Local(49).dense(8, causal=True), Causal().dense(8))


def test_counts_of_a_two_sided_window():
    assert Local(2).dense(8)[0].sum(dim=1).tolist() == [3, 4, 5, 5, 5, 5, 4, 3]


def test_flags_of_several_samples_some_on_padding():
    flags = torch.zeros(3, 10, dtype=torch.bool)
    flags[0, [0, 6]] = True
    flags[1, 9] = True
    lengths = torch.tensor([10, 7, 10])
    real = torch.arange(10) < lengths[:, None]
    pattern = Local(1) | Flagged()
    mask = pattern.dense_batch(10, facts=Facts(lengths=lengths, flags=flags))[:, 0]
    seen = (mask & real[:, None, :]).sum(dim=2)
    assert seen[0].tolist() == [10, 4, 5, 5, 5, 4, 10, 4, 5, 4]
    assert seen[1, :7].tolist() == [2, 3, 3, 3, 3, 3, 2]
    assert torch.equal(mask[2], Local(1).dense(10)[0])
    flags[1, 9] = False
    assert torch.equal(mask, pattern.dense_batch(10, facts=Facts(lengths=lengths, flags=flags))[:, 0])
    for i in range(3):  # a batch equals its rows alone
        alone = pattern.dense(10, facts=Facts(lengths=lengths[i : i + 1], flags=flags[i : i + 1]))
        assert torch.equal(alone[0], mask[i])


def test_flags_are_only_seen_when_causal():
    flags = torch.tensor([[False, True, False, False]])
    want = [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]]
    assert Flagged().dense(4, causal=True, facts=Facts(flags=flags))[0].int().tolist() == want


def test_places_from_the_end_follow_the_real_length():
    facts = Facts(lengths=torch.tensor([6, 3, 1]))
    mask = Global([-2, -1]).dense_batch(6, facts=facts)[:, 0]
    for sample, ends in enumerate(({4, 5}, {1, 2}, {0})):
        want = [[bool({q, k} & ends) for k in range(6)] for q in range(6)]
        assert mask[sample].tolist() == want


def test_names():
    assert {name: leaf.__name__ for name, leaf in LEAVES.items()} == {name: name for name in LEAVES}
    assert SLOT_NAMES["local"] is Local
    assert SLOT_NAMES["per_head"] is PerHead
    assert set(SLOT_NAMES) == {"local", "strided", "dilated", "block_local", "global_tokens", "random", "per_head"}


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Local(-1), r"Local: expected left as a whole number of at least 0, got -1; for example Local\(64\)"),
        (lambda: Local(2**31), r"Local: expected left as a whole number of at most 2147483647, got 2147483648"),
        (lambda: Global([10**30]), r"Global: expected each place as a whole number of at most 2147483647, got 1000"),
        (lambda: Global([-(2**31)]), r"Global: expected each place as a whole number of at least -2147483647, got -21"),
        (lambda: Local(3, -2), r"Local: expected right as a whole number of at least 0, got -2; for example"),
        (
            lambda: Strided(0),
            r"Strided: expected stride as a whole number of at least 1, got 0; for example Strided\(64\)",
        ),
        (lambda: Dilated(1, -1, 2), r"Dilated: expected right as a whole number of at least 0, got -1"),
        (lambda: Dilated(1, 1, 0), r"Dilated: expected dilation as a whole number of at least 1, got 0"),
        (lambda: Block(0), r"Block: expected size as a whole number of at least 1, got 0"),
        (lambda: Columns(4, 0), r"Columns: expected count as a whole number of at least 1, got 0"),
        (lambda: Columns(4, 5), r"Columns: expected count as at most the period of 4, got 5"),
        (lambda: Global([]), r"Global: expected a list of at least one place, got \[\]; for example Global\(\[0\]\)"),
        (lambda: Random(0), r"Random: expected keys as a whole number of at least 1, got 0"),
        (lambda: Random(3, seed=-1), r"Random: expected seed as a whole number of at least 0, got -1"),
        (lambda: RandomBlocks(0, 3), r"RandomBlocks: expected block as a whole number of at least 1, got 0"),
        (lambda: RandomBlocks(4, 0), r"RandomBlocks: expected count as a whole number of at least 1, got 0"),
        (lambda: RandomBlocks(4, 3, avoid=-1), r"RandomBlocks: expected avoid as a whole number of at least 0, got -1"),
        (lambda: Local(1).blocks(8, 0), r"blocks: expected block as a whole number of at least 1, got 0"),
    ],
)
def test_sizes_out_of_range(make, message):
    with pytest.raises(SpecError, match=message):
        make()


@pytest.mark.plain
@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Local("3"), r"Local: expected left as a whole number of at least 0, got '3'"),
        (lambda: Local(2.0), r"Local: expected left as a whole number of at least 0, got 2\.0"),
        (lambda: Local(True), r"Local: expected left as a whole number of at least 0, got True"),
        (lambda: Strided(None), r"Strided: expected stride as a whole number of at least 1, got None"),
        (lambda: Global(0), r"Global: expected a list of at least one place, got 0"),
        (lambda: Global([0, 1.5]), r"Global: expected a list of at least one place, got \[0, 1\.5\]"),
        (lambda: Random(3, mutual=1), r"Random: expected mutual as True or False, got 1"),
    ],
)
def test_sizes_of_a_wrong_type(make, message):
    with pytest.raises(SpecError, match=message):
        make()
