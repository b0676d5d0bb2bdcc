"""Block layouts against the dense mask: no pair is missed, no tile is called whole that is not, few kept in vain."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_patterns import HEADS, both_ways, joined
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from anyformer.errors import SpecError
from anyformer.pattern import Facts, decompose
from anyformer.pattern._algebra import PerHead
from anyformer.pattern.bigbird import bigbird
from anyformer.pattern.leaves import (
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

SIZES = (0, 1, 2, 3, 5, 7, 12, 13, 17, 29, 40)


def table(layout):
    """0, 1 or 2 for each tile of each group: dropped, kept, whole."""
    found = torch.zeros(len(layout.offsets), layout.rows, layout.columns, dtype=torch.int64)
    group, row, column = layout.tiles()
    assert layout.keys.dtype == torch.int32
    assert torch.equal(layout.offsets[:, -1].diff(), layout.offsets.diff(dim=1).sum(dim=1)[1:])
    line = (group * layout.rows + row) * layout.columns + column
    assert (line.diff() > 0).all()  # ascending, none twice
    found[group, row, column] = 1 + layout.whole.long()
    return found


def counts(mask, layout):
    """Allowed pairs of each tile of each group, and pairs of each tile."""
    mask = mask[: layout.batch, : layout.heads].flatten(0, 1)
    if layout.order is not None:
        mask = mask[:, layout.order][:, :, layout.order]
    pad = (0, layout.columns * layout.block - layout.m, 0, layout.rows * layout.block - layout.n)

    def per_tile(pairs):
        tiles = torch.nn.functional.pad(pairs.long(), pad)
        return tiles.view(len(pairs), layout.rows, layout.block, layout.columns, layout.block).sum(dim=(2, 4))

    return per_tile(mask), per_tile(torch.ones_like(mask[:1]))[0]


@settings(max_examples=150, deadline=None)
@given(
    pattern=joined(both_ways),
    n=st.sampled_from(SIZES),
    extra=st.sampled_from([None, None, -7, -1, 1, 4, 23]),
    block=st.sampled_from([1, 2, 3, 4, 5, 8, 16, 64]),
    causal=st.booleans(),
    several=st.booleans(),
    reorder=st.booleans(),
    seed=st.integers(0, 5),
)
def test_a_layout_covers_the_dense_mask(pattern, n, extra, block, causal, several, reorder, seed):
    m = max(n + (extra or 0), 0)
    facts = None
    if several:
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, m + 1, (2,), generator=draw)
        facts = Facts(lengths=lengths, flags=torch.rand(2, m, generator=draw) < 0.2, layer=seed % 3, seed=seed % 2)
    try:
        mask = pattern.dense_batch(n, m, heads=HEADS, causal=causal, facts=facts)
    except SpecError as error:
        assert "a causal layer does not know its last token" in str(error)  # noqa: PT017
        return
    layout = pattern.blocks(n, block, m, heads=HEADS, causal=causal, facts=facts, reorder=reorder)
    assert layout.batch in (1, len(mask))
    assert layout.heads in (1, HEADS)
    assert torch.equal(mask[: layout.batch, : layout.heads].expand_as(mask), mask)  # those left out are alike
    allowed, all_pairs = counts(mask, layout)
    found = table(layout)
    assert (found[allowed > 0] > 0).all()
    assert (allowed == all_pairs)[found == 2].all()
    if facts is None:
        assert pattern.density(n, m, heads=HEADS, causal=causal) == pytest.approx(
            mask.double().mean().item() if n * m else 0.0, abs=1e-12
        )


EXACT = [
    *(Full(), Causal(), Local(9), Local(5, 0), Local(0, 11), Block(6), Block(16), Global([0]), Global([3, 4, 5, 30])),
    *(Columns(9, 2), Random(2, 1), Local(5) | Global([0, 7])),
    *(bigbird(4, 2), bigbird(6, 1, window=5, globals=1), bigbird(4, 1, plan="google")),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n, m", [(64, 64), (61, 61), (20, 61), (61, 20)])
@pytest.mark.parametrize("block", [1, 4, 7, 16, 100])
@pytest.mark.parametrize("pattern", EXACT, ids=repr)
def test_no_tile_is_kept_in_vain(pattern, block, n, m, causal):
    layout = pattern.blocks(n, block, m, causal=causal)
    allowed, all_pairs = counts(pattern.dense_batch(n, m, causal=causal), layout)
    found = table(layout)
    assert torch.equal(found > 0, allowed > 0)
    if pattern.band() is not None or isinstance(pattern, Global | Block):
        assert torch.equal(found == 2, (allowed == all_pairs) & (all_pairs > 0))


def test_counts_of_a_window_by_hand():
    layout = Local(256).blocks(4096, 64)
    assert layout.offsets.diff(dim=1)[0].tolist() == [5, 6, 7, 8, *[9] * 56, 8, 7, 6, 5]
    row = layout.keys[layout.offsets[0, 10] : layout.offsets[0, 11]].tolist()
    assert row == list(range(6, 15))
    assert layout.whole[layout.offsets[0, 10] : layout.offsets[0, 11]].tolist() == [False, *[True] * 7, False]


def test_a_stride_sorts_tokens_by_residue():
    layout = Strided(4).blocks(16, 4)
    assert layout.order.tolist() == [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15]
    assert layout.keys.tolist() == [0, 1, 2, 3]
    assert layout.whole.all()
    assert Strided(4).blocks(16, 4, reorder=False).order is None
    assert Strided(4).blocks(4, 4, 16).order is None
    assert (Strided(4) | Local(1)).blocks(16, 4).order is None
    assert len(Dilated(2, 2, 8).blocks(4096, 64).keys) < 64 * 3
    assert len((Strided(64) & ~Local(64)).blocks(4096, 64).keys) == 64
    assert torch.equal(
        (Strided(6) | Strided(4)).blocks(12, 4).order, torch.tensor([0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11])
    )


def test_groups_are_as_few_as_the_pattern_allows():
    facts = Facts(lengths=torch.tensor([30, 20]), flags=torch.zeros(2, 32, dtype=torch.bool))
    shapes = {
        Local(3): (1, 1),
        Flagged(): (2, 1),
        Random(2): (2, 4),
        bigbird(4): (2, 4),
        bigbird(4, 0): (2, 1),
        Global([-1]): (2, 1),
        PerHead((Local(1), 2), (Full(), 2)): (1, 4),
    }
    for pattern, (batch, heads) in shapes.items():
        layout = pattern.blocks(32, 8, heads=4, facts=facts)
        assert (layout.batch, layout.heads) == (batch, heads), pattern
        assert len(layout.offsets) == batch * heads
    assert Random(2).blocks(32, 8, heads=4, causal=True, facts=facts).batch == 1


def test_layouts_are_kept_and_facts_enter_on_top():
    pattern = Local(5) | Random(2)
    assert pattern.blocks(64, 8) is (Local(5) | Random(2)).blocks(64, 8)
    assert pattern.blocks(64, 8) is not pattern.blocks(64, 8, causal=True)
    assert pattern.blocks(64, 8) is not pattern.blocks(64, 8, facts=Facts(layer=1))
    assert Local(5).blocks(64, 8) is Local(5).blocks(64, 8, heads=4, facts=Facts(layer=1, lengths=torch.tensor([9])))
    facts = Facts(lengths=torch.tensor([64]))
    assert pattern.blocks(64, 8, facts=facts) is not pattern.blocks(64, 8, facts=facts)


MILLION = """
import resource, time, torch
torch.set_num_threads(1)
from anyformer.pattern.bigbird import bigbird
from anyformer.pattern.leaves import Global, Local, Random
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
joined = Local(256) | Global([0]) | Random(3, seed=0)
for pattern, causal in ((joined, False), (bigbird(block=64), False), (bigbird(block=64), True)):
    layout = pattern.blocks(1_000_000, 64, causal=causal)
    rows = 1_000_000 // 64
    assert layout.offsets.shape == (1, rows + 1)
    assert len(layout.keys) == layout.offsets[0, -1] < 220 * rows
print(time.process_time() - start, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_a_million_tokens():
    done = subprocess.run([sys.executable, "-c", MILLION], capture_output=True, text=True, check=True)
    seconds, megabytes = map(float, done.stdout.split())
    assert seconds < 5  # three layouts, one thread
    assert megabytes < 1000


def test_density():
    assert Full().density(1_000_000) == 1.0
    assert Causal().density(10) == 0.55
    assert Local(2, 0).density(100, causal=True) == (1 + 2 + 98 * 3) / 100**2
    assert Strided(1000).density(100_000) == 1e-3
    assert PerHead((Full(), 1), (Local(0), 1)).density(4, heads=2) == (1 + 0.25) / 2
    assert Local(2).density(0) == 0.0
    assert Local(2).blocks(0, 4).density == 0.0
    assert Causal().blocks(16, 4).density == 10 / 16


@settings(max_examples=60, deadline=None)
@given(pattern=joined(both_ways), causal=st.booleans())
def test_parts_are_disjoint_and_make_the_whole(pattern, causal):
    facts = Facts(flags=torch.arange(17)[None] % 7 == 3)
    try:
        whole = pattern.dense(17, heads=HEADS, causal=causal, facts=facts)
    except SpecError:
        return
    masks = [
        each.dense(17, heads=HEADS, causal=causal, facts=facts) for each in decompose(pattern, causal=causal).disjoint()
    ]
    assert torch.equal(sum((mask.long() for mask in masks), torch.zeros_like(whole).long()), whole.long())


def test_parts():
    parts = decompose(Local(4) | Strided(8) | Global([0]) | Local(1, 6) | Global([0, 9]) | Flagged())
    assert (parts.tokens, parts.flagged, parts.band) == ((0, 9), True, (4, 6))
    assert parts.rest == Strided(8) & ~Local(4, 6) & ~(Global([0, 9]) | Flagged())
    assert parts.rest.traits(False).stride == 8
    assert decompose(Local(4), causal=True).band == (4, 0)
    assert decompose(bigbird()).rest == bigbird()
    united = (Causal() | Local(0, 3), ~Causal() | Local(2, 0), Causal(), Full(), Local(2) | Global([0, 5]) | Strided(4))
    for pattern in united:
        assert torch.equal(sum(part.dense(9).long() for part in decompose(pattern).disjoint()), pattern.dense(9).long())
    with pytest.raises(SpecError, match="a causal layer does not know its last token"):
        decompose(Global([-1]), causal=True)


FLEX = [
    Local(3) | Global([0, -1]) | Random(2, mutual=True) | Flagged(),
    PerHead((Strided(3) | Columns(5, 2), 1), (bigbird(4, 1), 1)),
    ~RandomBlocks(3, 2),
    Local(40),
]


def two_samples(m):
    return Facts(lengths=torch.tensor([m, max(m - 7, 0)]), flags=torch.rand(2, m) < 0.1)


def spread(count, index, shape):
    """Which tiles a list of FlexAttention names, for every sample and head."""
    inside = torch.arange(index.shape[-1]) < count[..., None]
    named = torch.nn.functional.one_hot(index.long(), index.shape[-1]).bool() & inside[..., None]
    return named.any(dim=-2).expand(*shape, *index.shape[2:])


@pytest.mark.parametrize("n, m", [(32, 32), (24, 37), (29, 32), (1, 5)])
@pytest.mark.parametrize("pattern", FLEX, ids=repr)
def test_block_masks_hold_the_same_pairs(pattern, n, m):
    facts = two_samples(m)
    dense = pattern.dense_batch(n, m, heads=2, facts=facts)
    made = pattern.block_mask(n, m, heads=2, facts=facts, block=8)
    some = spread(made.kv_num_blocks, made.kv_indices, (2, 2))
    whole = spread(made.full_kv_num_blocks, made.full_kv_indices, (2, 2))
    assert not (some & whole).any()
    assert torch.equal(spread(made.q_num_blocks, made.q_indices, (2, 2)).mT, some)
    assert torch.equal(spread(made.full_q_num_blocks, made.full_q_indices, (2, 2)).mT, whole)

    at_token = [tiles.repeat_interleave(8, 2).repeat_interleave(8, 3)[:, :, :n, :m] for tiles in (some, whole)]
    batch, head = torch.arange(2)[:, None, None, None], torch.arange(2)[:, None, None]
    asked = made.mask_mod(batch, head, torch.arange(n)[:, None], torch.arange(m))
    assert torch.equal(at_token[0] & asked | at_token[1], dense)
    assert (
        whole.sum() * 64 == (whole.repeat_interleave(8, 2).repeat_interleave(8, 3)[:, :, :n, :m]).sum()
    )  # none sticks out

    slow = create_block_mask(pattern.mask_mod(facts, m - n), 2, 2, n, m, device="cpu", BLOCK_SIZE=8)
    assert ((some | whole) >= slow.to_dense().bool()).all()


@pytest.mark.plain
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("n, m", [(32, 32), (24, 37)])
def test_flex_attention_with_a_block_mask(n, m):
    pattern, facts = FLEX[0], two_samples(m)
    made = pattern.block_mask(n, m, heads=2, facts=facts, block=8)
    q, k, v = torch.randn(2, 2, n, 4), torch.randn(2, 2, m, 4), torch.randn(2, 2, m, 4)
    scores = (q @ k.mT / 2).masked_fill(~pattern.dense_batch(n, m, heads=2, facts=facts), -torch.inf)
    assert (flex_attention(q, k, v, block_mask=made) - scores.softmax(dim=-1) @ v).abs().max() < 2e-6


def test_heads_of_a_block_mask_keep_their_numbers():
    pattern = Random(3)
    made = pattern.block_mask(16, heads=range(2, 4), block=4)
    want = pattern.dense(16, heads=range(2, 4))
    zero, two = torch.tensor(0), torch.arange(2)[:, None, None]
    assert torch.equal(made.mask_mod(zero, two, torch.arange(16)[:, None], torch.arange(16)), want)
