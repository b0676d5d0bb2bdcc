"""BigBird against Hugging Face's block-sparse attention: output and gradients for equal draws and where those lie."""

import numpy as np
import pytest
import torch
from transformers.models.big_bird.configuration_big_bird import BigBirdConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

from anyformer.errors import SpecError
from anyformer.pattern import Facts
from anyformer.pattern.bigbird import bigbird
from anyformer.pattern.leaves import Full

HEADS, WIDTH, BLOCK = 2, 6, 4


def peer(random, block=BLOCK, longest=4096):
    config = BigBirdConfig(
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        num_random_blocks=random,
        block_size=block,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=longest,
    )
    return BigBirdBlockSparseAttention(config, seed=3).double().train()


def outputs(layer, x, allowed, real):
    """What the peer computes, and dense attention over `allowed`, with padded rows left out."""
    blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(real.double(), BLOCK)
    theirs = layer(x, band, rows, columns, blocked, blocked)[0]
    q, k, v = (
        part(x).view(len(x), x.shape[1], HEADS, WIDTH).transpose(1, 2) for part in (layer.query, layer.key, layer.value)
    )
    scores = (q @ k.mT / WIDTH**0.5).masked_fill(~(allowed & real[:, None, None]), -torch.inf)
    ours = (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)
    return theirs[real], ours[real]


def same(layer, n, allowed, real):
    x = torch.randn(len(real), n, HEADS * WIDTH, dtype=torch.float64, requires_grad=True)
    theirs, ours = outputs(layer, x, allowed, real)
    assert (theirs - ours).abs().max() <= 1e-10
    weight = torch.randn_like(theirs)
    for parameter in (x, layer.query.weight, layer.key.weight, layer.value.weight):
        one, two = (
            torch.autograd.grad((out * weight).sum(), parameter, retain_graph=True)[0] for out in (theirs, ours)
        )
        assert (one - two).abs().max() <= 1e-10 * one.abs().max()


def drawn(pattern, n):
    """Our draws as the peer's lists: heads x (rows 1 to the last but one) x draws."""
    zero, rows = torch.tensor(0), torch.arange(1, n // pattern.block - 1)
    head = torch.arange(HEADS)[:, None]
    return torch.stack(pattern.targets(zero, head, rows, Facts(length=n)), dim=2).numpy()


@pytest.mark.parametrize("plan", ["uniform", "google"])
@pytest.mark.parametrize("random, blocks", [(1, 12), (2, 16), (3, 12), (3, 20)])
def test_same_attention_with_our_draws(plan, random, blocks):
    pattern, layer, n = bigbird(BLOCK, random, plan=plan), peer(random), blocks * BLOCK
    layer._bigbird_block_rand_mask_with_head = lambda **_: list(drawn(pattern, n))
    same(layer, n, pattern.dense(n, heads=HEADS), torch.ones(2, n, dtype=torch.bool))


def test_same_attention_with_padding_inside_the_last_block():
    n, lengths = 12 * BLOCK, torch.tensor([48, 46, 45])
    pattern, layer = bigbird(BLOCK, 2), peer(2)
    layer._bigbird_block_rand_mask_with_head = lambda **_: list(drawn(pattern, n))
    allowed = pattern.dense_batch(n, heads=HEADS, facts=Facts(lengths=lengths))
    same(layer, n, allowed, torch.arange(n) < lengths[:, None])


def test_same_attention_with_their_draws():
    n, random, blocks = 16 * BLOCK, 2, 16
    layer = peer(random)
    seed(layer.seed)
    lengths, counts = layer._get_rand_attn_plan(n, BLOCK, random)
    lists = layer._bigbird_block_rand_mask_with_head(n, n, BLOCK, BLOCK, HEADS, lengths, counts)
    allowed = (
        bigbird(BLOCK, 0).dense(n, heads=HEADS).unflatten(1, (blocks, BLOCK)).unflatten(3, (blocks, BLOCK)).clone()
    )
    for head in range(HEADS):
        for row in range(1, blocks - 1):
            allowed[head, row, :, lists[head][row - 1]] = True
    same(layer, n, allowed.flatten(3, 4).flatten(1, 2), torch.ones(1, n, dtype=torch.bool))


def seed(value):
    """Start the generator that the peer draws from."""
    np.random.seed(value)  # noqa: NPY002  # it draws from the global one


def legal(rows):
    """For each row of blocks, every block that any list holds."""
    return [sorted({int(block) for each in row for block in each}) for row in rows]


def ours(pattern, n):
    """Draws of many heads, rows first."""
    head, rows = torch.arange(600)[:, None], torch.arange(1, n // pattern.block - 1)
    return torch.stack(pattern.targets(torch.tensor(0), head, rows, Facts(length=n)), dim=2).transpose(0, 1).tolist()


@pytest.mark.parametrize("random, blocks", [(1, 10), (2, 12), (2, 16), (3, 20)])
def test_the_google_plan_draws_from_the_same_blocks(random, blocks):
    n, layer = blocks * BLOCK, peer(random)
    lengths, counts = layer._get_rand_attn_plan(n, BLOCK, random)
    seed(0)
    lists = layer._bigbird_block_rand_mask_with_head(n, n, BLOCK, BLOCK, 300, lengths, counts)
    theirs = legal(np.stack(lists).transpose(1, 0, 2))
    assert legal(ours(bigbird(BLOCK, random, plan="google"), n)) == theirs


def test_the_google_plan_at_the_lengths_of_the_paper():
    n, random = 3072, 3
    layer = peer(random, block=64)
    seed(0)
    lists = [
        layer._bigbird_block_rand_mask(4096, 4096, 64, 64, random, last_idx=1024)[: n // 64 - 2] for _ in range(300)
    ]
    theirs = legal(np.stack(lists).transpose(1, 0, 2))
    found = legal(ours(bigbird(64, random, plan="google"), n))
    assert found == theirs
    assert max(map(max, found)) == 15  # tokens below 1024 only
    assert max(map(max, legal(ours(bigbird(64, random), n)))) == n // 64 - 2


@pytest.mark.parametrize("random, blocks", [(0, 4), (0, 3), (1, 5), (3, 7), (8, 12), (3, 1), (3, 0)])
def test_identity_with_full_attention(random, blocks):
    for n in {blocks * BLOCK, max(blocks * BLOCK - 1, 0)}:
        assert torch.equal(bigbird(BLOCK, random).dense(n, heads=3), Full().dense(n, heads=3))


@pytest.mark.parametrize("random, blocks", [(0, 5), (1, 6), (3, 8)])
def test_one_block_more_is_not_full(random, blocks):
    assert not bigbird(BLOCK, random).dense(blocks * BLOCK, heads=3).all()


def test_roles_of_rows():
    """Rows as the paper's figure shows them, window and global blocks only."""
    table = bigbird(1, 0).dense(8)[0].int().tolist()
    assert table == [
        [1, 1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 0, 0, 0, 0, 1],
        [1, 1, 1, 1, 0, 0, 0, 1],
        [1, 0, 1, 1, 1, 0, 0, 1],
        [1, 0, 0, 1, 1, 1, 0, 1],
        [1, 0, 0, 0, 1, 1, 1, 1],
        [1, 0, 0, 0, 0, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 1, 1],
    ]
    assert bigbird(1, 0, window=1, globals=1).dense(4)[0].int().tolist() == [
        [1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]
    ]  # fmt: skip
    assert (
        bigbird(2, 3)
        .dense(40, heads=4)
        .unflatten(1, (20, 2))
        .unflatten(3, (20, 2))
        .any(4)
        .any(2)[:, 2:-2]
        .sum(2)
        .eq(8)
        .all()
    )


def test_the_last_global_block_is_the_last_with_a_real_token():
    pattern = bigbird(BLOCK, 1)
    lengths = torch.tensor([48, 47, 45, 44, 31, 1])
    masks = pattern.dense_batch(48, heads=HEADS, facts=Facts(lengths=lengths))
    for mask, n in zip(masks, lengths.tolist(), strict=True):
        assert torch.equal(mask[:, :n, :n], pattern.dense(n, heads=HEADS))
        end = (n - 1) // BLOCK * BLOCK
        assert mask[:, :n, end:n].all()
        assert mask[:, end:n, :n].all()


@pytest.mark.parametrize("plan", ["uniform", "google"])
def test_causal(plan):
    pattern = bigbird(BLOCK, 2, plan=plan)
    mask = pattern.dense(80, heads=HEADS, causal=True)
    assert not mask.triu(1).any()
    assert torch.equal(mask[:, :37, :37], pattern.dense(37, heads=HEADS, causal=True))
    assert (
        mask[:, :, :BLOCK].tril().eq(torch.ones(80, BLOCK, dtype=torch.bool).tril()).all()
    )  # the first block is global
    per_row = mask.unflatten(1, (20, BLOCK)).unflatten(3, (20, BLOCK)).any(4).any(2).sum(2)
    assert per_row[:, 7:].eq(5).all()  # own, previous, first and two drawn
    assert per_row[:, :5].eq(torch.arange(1, 6)).all()


def test_draws_are_distinct_and_outside_window_and_global_blocks():
    for plan in ("uniform", "google"):
        for row, draws in enumerate(ours(bigbird(BLOCK, 3, plan=plan), 30 * BLOCK), start=1):
            for each in draws[:50]:
                assert len(set(each)) == 3
                assert not set(each) & {0, row - 1, row, row + 1, 29}


@pytest.mark.parametrize(
    "knobs, message",
    [
        (
            {"block": 0},
            r"bigbird: expected block as a whole number of at least 1, got 0; for example bigbird\(block=64",
        ),
        ({"random": -1}, r"bigbird: expected random as a whole number of at least 0, got -1"),
        ({"window": 2}, r"bigbird: expected window as an odd number of blocks, got 2; for example window=3"),
        ({"window": 0}, r"bigbird: expected window as a whole number of at least 1, got 0"),
        ({"globals": -1}, r"bigbird: expected globals as a whole number of at least 0, got -1"),
        ({"seed": -1}, r"bigbird: expected seed as a whole number of at least 0, got -1"),
    ],
)
def test_knobs_out_of_range(knobs, message):
    with pytest.raises(SpecError, match=message):
        bigbird(**knobs)


@pytest.mark.plain
def test_an_unknown_plan():
    with pytest.raises(SpecError, match=r"bigbird: expected plan as 'uniform' or 'google', got 'etc'"):
        bigbird(plan="etc")
