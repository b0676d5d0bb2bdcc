"""Random structure: the same everywhere, different where it should be, uniform, untouched by padding and generators."""

import subprocess
import sys

import pytest
import torch

from anyformer.pattern import Facts, from_head
from anyformer.pattern._hash import any_equal, mix, pick, row_key
from anyformer.pattern.bigbird import bigbird
from anyformer.pattern.leaves import Random, RandomBlocks
from anyformer.pattern.read import pattern_of

FAMILIES = [
    Random(3, seed=1),
    Random(2, mutual=True),
    RandomBlocks(4, 2, avoid=2),
    bigbird(4, 2),
    bigbird(4, 1, plan="google"),
]

PRINT = """
from anyformer.pattern import Facts
from anyformer.pattern.bigbird import bigbird
from anyformer.pattern.leaves import Random, RandomBlocks
for pattern in (Random(3, seed=1), RandomBlocks(4, 2), bigbird(4, 2)):
    print(pattern.dense(40, heads=2, facts=Facts(layer=3, seed=5)).nonzero().tolist())
"""


def test_known_values():
    """Pinned: a change here changes every trained model with a random pattern."""
    assert [mix(x) for x in (0, 1, 2, 0xFFFFFFFF)] == [0, 1753845952, 3507691905, 1734902346]
    key = row_key((1, 0, 0, 0), torch.tensor(0), torch.arange(3))
    assert torch.stack(pick(key, 3, torch.tensor(100))).T.tolist() == [[41, 31, 88], [49, 92, 61], [0, 93, 80]]


def test_the_hash_is_exact_and_one_to_one():
    x = torch.cat([torch.arange(2000), torch.randint(0, 1 << 32, (2000,))])
    assert torch.equal(mix(x), torch.tensor([mix(each) for each in x.tolist()]))
    assert mix(torch.arange(1 << 16)).unique().numel() == 1 << 16
    flips = torch.stack(
        [mix(x) ^ mix(x ^ (1 << bit)) for bit in range(32)]
    )  # one input bit turns half of the output bits
    ones = torch.stack([(flips >> bit) & 1 for bit in range(32)]).double().mean(dim=2)
    assert (ones - 0.5).abs().max() < 0.06


def test_another_process_draws_the_same():
    there = subprocess.run([sys.executable, "-c", PRINT], capture_output=True, text=True, check=True).stdout.split("\n")
    facts = Facts(layer=3, seed=5)
    for text, pattern in zip(there, (Random(3, seed=1), RandomBlocks(4, 2), bigbird(4, 2)), strict=False):
        assert text == str(pattern.dense(40, heads=2, facts=facts).nonzero().tolist())


@pytest.mark.parametrize("pattern", FAMILIES, ids=repr)
def test_no_generator_is_touched(pattern):
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first = pattern.dense(40, heads=2)
    pattern.blocks(40, 4, heads=2, causal=True)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(8)
    assert torch.equal(pattern.dense(40, heads=2), first)


@pytest.mark.parametrize("pattern", FAMILIES, ids=repr)
def test_heads_layers_and_seeds_draw_differently(pattern):
    base = pattern.dense(80, heads=2)
    assert not torch.equal(base[0], base[1])
    for facts in (Facts(layer=1), Facts(seed=1)):
        assert not torch.equal(pattern.dense(80, facts=facts)[0], base[0])
    assert torch.equal(pattern.dense(80, heads=range(1, 2))[0], base[1])
    other = type(pattern)(**{**vars(pattern), "seed": 9})
    assert not torch.equal(other.dense(80)[0], base[0])
    # layer and seeds are not interchangeable
    assert not torch.equal(pattern.dense(80, facts=Facts(layer=1)), pattern.dense(80, facts=Facts(seed=1)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [1, 3, 8])
def test_a_query_draws_that_many_different_keys(keys, causal):
    counts = Random(keys).dense(50, heads=4, causal=causal).sum(dim=2)
    want = torch.arange(1, 51).clamp(max=keys) if causal else torch.full((50,), keys)
    assert torch.equal(counts, want.expand(4, -1))
    few = Random(keys).dense(2, 2)
    assert few.sum() == 2 * min(keys, 2)


def test_a_block_draws_that_many_different_blocks():
    blocks = lambda pattern, causal: pattern.dense(64, heads=4, causal=causal)[:, 3::4, ::4]  # noqa: E731  # last query, first key
    assert (blocks(RandomBlocks(4, 3), False).sum(dim=2) == 3).all()
    assert torch.equal(blocks(RandomBlocks(4, 3), True).sum(dim=2), torch.arange(1, 17).clamp(max=3).expand(4, -1))
    for avoid in (1, 2, 5):
        near = (torch.arange(16)[:, None] - torch.arange(16)).abs() < avoid
        drawn = blocks(RandomBlocks(4, 3, avoid=avoid), False)
        assert not (drawn & near).any()
        assert torch.equal(drawn.sum(dim=2), (~near).sum(dim=1).clamp(max=3).expand(4, -1))


def test_every_key_is_equally_likely():
    rows, span, keys = 40_000, 20, 3
    draws = torch.stack(pick(row_key((5,), torch.tensor(0), torch.arange(rows)), keys, torch.tensor(span)))
    share = torch.bincount(draws.flatten(), minlength=span) / rows
    spread = (keys / span * (1 - keys / span) / rows) ** 0.5
    assert (share - keys / span).abs().max() < 5 * spread
    # sets, not only numbers: every pair of numbers is as likely as any other
    sets = draws.sort(dim=0).values
    pairs = torch.bincount((sets[0] * span + sets[1]) * span + sets[2], minlength=span**3)
    pairs = pairs[pairs > 0]
    assert len(pairs) == 1140  # 20 choose 3
    assert ((pairs - rows / 1140) ** 2 / (rows / 1140)).sum() < 1140 + 5 * (2 * 1140) ** 0.5


@pytest.mark.parametrize("pattern", FAMILIES, ids=repr)
@pytest.mark.parametrize("causal", [False, True])
def test_padding_moves_nothing(pattern, causal):
    for length in (1, 5, 17, 33):
        alone = pattern.dense(length, heads=2, causal=causal)
        for extra in (1, 3, 4, 13):
            facts = Facts(lengths=torch.tensor([length, length + extra]))
            padded = pattern.dense_batch(length + extra, heads=2, causal=causal, facts=facts)
            assert torch.equal(padded[0, :, :length, :length], alone)
            assert torch.equal(padded[1], pattern.dense(length + extra, heads=2, causal=causal))


@pytest.mark.parametrize("pattern", FAMILIES, ids=repr)
def test_later_tokens_move_nothing_when_causal(pattern):
    whole = pattern.dense(61, heads=2, causal=True)
    for n in (1, 4, 30):
        assert torch.equal(pattern.dense(n, heads=2, causal=True), whole[:, :n, :n])
        assert torch.equal(pattern.dense(n, 61, heads=2, causal=True), whole[:, -n:])


def test_mutual_draws_are_symmetric():
    mask = Random(2, mutual=True).dense(30, heads=2)
    assert torch.equal(mask, mask.mT)
    once = Random(2).dense(30, heads=2)
    assert torch.equal(mask, once | once.mT)
    assert torch.equal(Random(2, mutual=True).dense(30, causal=True), Random(2).dense(30, causal=True))


def test_looking_up_in_a_row_of_numbers_gives_what_comparing_gives() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(-1, 90, (2, 50, 1), generator=generator) for _ in range(3)]
    row = torch.cat([torch.arange(70), torch.tensor([5, 5, 88]), torch.tensor([-1, -3])])
    one_by_one = torch.cat([any_equal(drawn, number) for number in row], dim=-1)
    assert torch.equal(any_equal(drawn, row), one_by_one)
    assert torch.equal(any_equal(drawn, row.view(1, 1, 1, -1)), one_by_one[None])


def test_a_pattern_from_a_head_on_draws_as_that_head() -> None:
    pattern = pattern_of("Random(3, seed=1) & ~Local(2) | Strided(7)")
    later = from_head(pattern, 2, causal=False)
    assert torch.equal(later.dense(40, heads=2), pattern.dense(40, heads=4)[2:])
    assert later.density(40, heads=2) == float(pattern.dense(40, heads=4)[2:].double().mean())
    assert repr(later) == "Random(3, seed=1) of heads from 2 & ~Local(2) | Strided(7)"
    assert from_head(pattern_of("Local(2)"), 2, causal=False) == pattern_of("Local(2)")
