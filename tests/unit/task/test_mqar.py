"""MQAR: the layout of a row, the draws, refusals."""

import math
import struct

import pytest
import torch

from anyformer.errors import TaskError
from anyformer.task.base import SPLITS, split_of
from anyformer.task.mqar import MQAR

torch.set_num_threads(1)


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("length", [64, 128])
def test_a_row_is_pairs_then_every_key_once_more(length, noise):
    task = MQAR(random_non_queries=noise)
    batch = task.batch("train", 0, size=50, length=length)
    for tokens, targets, keep in zip(batch.tokens.tolist(), batch.targets.tolist(), batch.keep.tolist(), strict=True):
        keys, values = tokens[:16:2], tokens[1:16:2]
        assert len(set(keys)) == len(set(values)) == 8
        assert all(1 <= key < 32 for key in keys)
        assert all(32 <= value < 64 for value in values)
        asked = [place for place, kept in enumerate(keep) if kept]
        assert len(asked) == 8
        assert all(place >= 16 and place % 2 == 0 for place in asked)
        assert sorted(tokens[place] for place in asked) == sorted(keys)
        assert all(targets[place] == values[keys.index(tokens[place])] for place in asked)
        rest = [token for place, token in enumerate(tokens[16:], start=16) if place not in asked]
        assert (len(set(rest)) > 10) if noise else (set(rest) == {0})
    assert batch.attention_mask is None
    assert task.causal
    assert task.head == "lm"


@pytest.mark.parametrize("power", [0.01, 0.5, 1.0])
def test_queries_lie_where_the_power_law_puts_them(power):
    task, rows = MQAR(length=32, pairs=1, power=power), 6000
    asked = task.batch("train", 0, size=rows, length=32).keep.nonzero()[:, 1]
    found = torch.bincount((asked - 2) // 2, minlength=15).double() / rows
    odds = torch.arange(1, 16, dtype=torch.float64) ** (power - 1)
    odds /= odds.sum()
    error = (odds * (1 - odds) / rows).sqrt()
    assert ((found - odds).abs() < 4 * error).all()


def test_two_queries_are_drawn_without_replacement():
    task, rows = MQAR(length=12, pairs=2, power=0.3), 6000
    batch = task.batch("train", 0, size=rows)
    second = batch.tokens[:, 2]  # the key of the second pair; its slot is the second draw
    places = (batch.tokens[:, 4:] == second[:, None]).double().argmax(-1) // 2
    odds = torch.arange(1, 5, dtype=torch.float64) ** (0.3 - 1)
    odds /= odds.sum()
    drawn = (odds[:, None] * odds[None, :] / (1 - odds[:, None])).fill_diagonal_(0).sum(0)
    found = torch.bincount(places, minlength=4).double() / rows
    assert ((found - drawn).abs() < 4 * (drawn * (1 - drawn) / rows).sqrt()).all()


def test_keys_and_values_are_uniform():
    batch = MQAR().batch("train", 0, size=3000)
    for first, ids in ((0, range(1, 32)), (1, range(32, 64))):
        counts = torch.bincount(batch.tokens[:, first:16:2].flatten(), minlength=64)
        assert counts.sum() == counts[ids.start : ids.stop].sum() == 24_000
        expected = 24_000 / len(ids)
        assert ((counts[ids.start : ids.stop] - expected).abs() < 4.5 * math.sqrt(expected)).all()


def test_the_drawn_rows_stay_the_same():
    tokens = [
        MQAR(vocab=16, length=12, pairs=2, random_non_queries=noise).batch("test", 0, size=1).tokens
        for noise in (False, True)
    ]
    assert tokens[0].tolist() == [[3, 8, 4, 13, 3, 0, 0, 0, 0, 0, 4, 0]]
    assert tokens[1].tolist() == [[4, 8, 7, 15, 7, 15, 14, 12, 4, 0, 11, 7]]


def test_no_row_is_in_two_splits():
    task = MQAR(vocab=16, length=16, pairs=2)
    rows = {split: {tuple(row) for row in task.batch(split, 0, size=300).tokens.tolist()} for split in SPLITS}
    for split in SPLITS:
        assert {split_of(struct.pack("<16q", *row)) for row in rows[split]} == {split}
    assert not rows["train"] & rows["valid"]
    assert not rows["train"] & rows["test"]
    assert not rows["valid"] & rows["test"]


def test_guesses_score_what_arithmetic_says():
    lines = {each.name: each.value for each in MQAR(vocab=64, pairs=8).reference_lines()}
    assert lines == {"any value": 1 / 32, "any value present": 1 / 8}
    assert MQAR().chance == 1 / 64
    task = MQAR()
    batch = task.batch("test", 0, size=400)
    generator = torch.Generator().manual_seed(0)
    for pool, expected in ((torch.arange(32, 64).expand(400, 32), 1 / 32), (batch.tokens[:, 1:16:2], 1 / 8)):
        picks = torch.randint(pool.shape[1], batch.tokens.shape, generator=generator)
        logits = torch.nn.functional.one_hot(pool.gather(1, picks), 64).float()
        scored = task.metrics(logits, batch)
        assert abs(task.score(scored) - expected) < 3 * math.sqrt(expected * (1 - expected) / scored["scored"])


def test_lengths_that_pairs_do_not_fit_are_refused():
    for length, use in ((63, 64), (30, 32)):
        message = rf"mqar: expected an even length of at least 4 \* pairs = 32, got length={length}; use length={use}"
        with pytest.raises(TaskError, match=message):
            MQAR(length=length)
        with pytest.raises(TaskError, match=message):
            MQAR().batch("test", 0, size=1, length=length)
    assert MQAR(length=32).eval_lengths == (32, 64, 128)


def test_vocabularies_that_are_too_small_are_refused():
    message = r"mqar: expected a vocab with at least pairs=8 keys .*, got vocab=17 with 7; type mqar\(vocab=18, length"
    with pytest.raises(TaskError, match=message):
        MQAR(vocab=17)
    assert MQAR(vocab=18).batch("test", 0, size=2).keep.sum() == 16
    message = (
        "mqar: expected at least 10000 different sequences to fill three disjoint splits, got 6 with vocab=4, length"
    )
    with pytest.raises(TaskError, match=message):
        MQAR(vocab=4, length=8, pairs=1)
