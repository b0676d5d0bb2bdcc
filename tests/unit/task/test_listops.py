"""ListOps: trees against the published statistics, two evaluators, reference rules, refusals."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from anyformer.errors import TaskError
from anyformer.task import listops
from anyformer.task._trees import CLOSE, DIGIT, OPERATOR, grow
from anyformer.task.base import SPLITS, generator, split_of
from anyformer.task.listops import ListOps, encode, evaluate

torch.set_num_threads(1)

PUBLISHED = 20_000  # trees behind the expected statistics


@pytest.fixture(scope="module")
def arena():
    """Trees at Long Range Arena's lengths, with their labels."""
    batch = ListOps(min_length=500, max_length=2000).batch("train", 0, size=2000)
    return [row[row != 0].tolist() for row in batch.tokens], batch.targets.numpy()


def close(found, expected, spread, count):
    """Within three standard errors of two samples, ours and the published one, rounding of the latter included."""
    return abs(found - expected) < 3 * spread * math.sqrt(1 / count + 1 / PUBLISHED) + 0.0005


def closer(found, share, count):
    return close(found, share, math.sqrt(share * (1 - share)), count)


@pytest.mark.parametrize(
    "text, result",
    [
        ("[MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]", 5),
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[MED 1 2 ]", 1),
        ("[MED 3 9 4 8 ]", 6),
        ("[MED 9 0 5 ]", 5),
        ("[SM 9 9 9 ]", 7),
        ("[SM [SM 5 5 ] [MIN 3 7 ] ]", 3),
    ],
)
def test_lists_worked_by_hand(text, result):
    assert evaluate(encode(text)) == result


def test_both_evaluators_agree_on_every_tree(arena):
    trees, labels = arena
    assert [evaluate(tree) for tree in trees] == labels.tolist()


def test_trees_are_well_formed(arena):
    for tree in arena[0][:500]:
        assert 500 < len(tree) < 2000
        arity, deepest = [], 0
        for token in tree:
            if OPERATOR <= token < CLOSE:
                arity.append(0)
            elif token == CLOSE:
                assert 2 <= arity.pop() <= 10
            if token == CLOSE or DIGIT <= token < OPERATOR:
                arity[-1:] = [each + 1 for each in arity[-1:]]
            deepest = max(deepest, len(arity))
        assert arity == []
        assert deepest == 9


def test_trees_follow_the_published_statistics(arena):
    trees, labels = arena
    count, lengths = len(trees), np.array([len(tree) for tree in trees])
    assert close(lengths.mean(), 1039, lengths.std(), count)
    for share, expected in ((0.05, 540), (0.25, 706), (0.5, 961), (0.75, 1315), (0.95, 1805)):
        assert closer((lengths <= expected).mean(), share, count)
    operators = np.array([sum(OPERATOR <= token < CLOSE for token in tree) for tree in trees])
    assert close(operators.mean(), 148, operators.std(), count) or abs(operators.mean() - 148) < 0.5
    digits = np.array([sum(DIGIT <= token < OPERATOR for token in tree) for tree in trees])
    assert abs(digits.sum() / lengths.sum() - 0.715) < 0.002
    expected = (0.170, 0.090, 0.077, 0.081, 0.091, 0.087, 0.080, 0.075, 0.082, 0.167)
    for label, share in enumerate(expected):
        assert closer((labels == label).mean(), share, count)
    roots = np.array([tree[0] - OPERATOR for tree in trees])
    for root, label, share in ((0, 0, 0.576), (1, 9, 0.570), (2, 4, 0.21)):
        chosen = labels[roots == root]
        assert abs((chosen == label).mean() - share) < 3 * math.sqrt(share * (1 - share) / len(chosen)) + 0.005
    assert all(closer((labels[roots == 3] == label).mean(), 0.1, (roots == 3).sum()) for label in range(10))
    spread = Counter(token for tree in trees for token in tree if DIGIT <= token < OPERATOR)
    assert all(abs(each / digits.sum() - 0.1) < 0.002 for each in spread.values())


def test_one_tree_in_twelve_is_long_enough():
    random = generator("acceptance").random
    grown = [grow(random, below=2000, depth=10, arguments=10, probability=0.25) for _ in range(4000)]
    kept = sum(tree is not None and tree[1] > 500 for tree in grown)
    assert closer(kept / 4000 / 4, 1 / 12.0, 4000 * 4)  # a root is an operator with odds 1/4


def test_rules_that_read_the_top_levels_score_as_published(arena):
    trees, labels = arena
    likeliest = [
        Counter(
            int(label) for tree, label in zip(trees, labels, strict=True) if tree[0] == OPERATOR + each
        ).most_common(1)[0][0]
        for each in range(4)
    ]
    assert likeliest[:3] == [0, 9, 4]
    for depth, share in enumerate((0.363, 0.593, 0.733, 0.831, 0.894, 0.934)):
        found = [evaluate(tree, depth=depth, unseen=likeliest) for tree in trees[:1000]]
        assert closer((np.array(found) == labels[:1000]).mean(), share, 1000)


def test_reference_lines_rise_with_the_levels_they_read():
    lines = ListOps().reference_lines(items=300)
    names = ["majority class", "root operator", "root operator and its digits", "two levels", "three levels"]
    assert [each.name for each in lines] == names
    values = [each.value for each in lines]
    assert values == sorted(values)
    assert abs(values[0] - 0.165) < 0.08
    assert abs(values[1] - 0.35) < 0.1


def test_no_tree_is_in_two_splits_or_twice_in_one():
    task = ListOps(min_length=8, max_length=40)
    rows = {split: task.batch(split, 0, size=400).tokens for split in SPLITS}
    rows["train, longer"] = task.batch("train", 0, size=400, length=80).tokens
    trees = {split: {tuple(row[row != 0].tolist()) for row in tokens} for split, tokens in rows.items()}
    for split, each in trees.items():
        assert {split_of(bytes(tree)) for tree in each} == {split.split(",")[0]}
    assert all(len(each) >= 395 for each in trees.values())
    for one, other in (("train", "valid"), ("train", "test"), ("valid", "test"), ("train, longer", "test")):
        assert not trees[one] & trees[other]


def test_the_drawn_trees_stay_the_same():
    batch = ListOps(min_length=8, max_length=14).batch("test", 0, size=2)
    trees = ("[MED 2 0 7 3 0 2 6 9 2 ]", "[MED 9 5 9 9 2 1 5 ]")
    assert [row[row != 0].tolist() for row in batch.tokens] == [encode(tree) for tree in trees]
    assert batch.targets.tolist() == [2, 5]


def test_padding_is_masked_and_longer_rows_hold_longer_trees():
    task = ListOps(min_length=20, max_length=60)
    for length, above in ((60, 20), (120, 40), (30, 10)):
        batch = task.batch("test", 0, size=50, length=length)
        assert batch.tokens.shape == (50, length)
        assert torch.equal(batch.attention_mask, batch.tokens != 0)
        sizes = batch.attention_mask.sum(-1)
        assert above < sizes.min()
        assert sizes.max() < length
        assert (batch.attention_mask[:, 1:] <= batch.attention_mask[:, :-1]).all()


@pytest.mark.parametrize("low, high", [(7, 60), (100, 101), (100, 50)])
def test_bad_ranges_are_refused(low, high):
    message = rf"min_length >= 8 and max_length >= min_length \+ 2 .* got min_length={low} and max_length={high}; type"
    with pytest.raises(TaskError, match="listops: expected " + message):
        ListOps(min_length=low, max_length=high)


def test_lengths_no_tree_reaches_are_refused(monkeypatch):
    task = ListOps(min_length=20, max_length=60)
    for length in (-1, 0, 23):
        with pytest.raises(
            TaskError, match=f"listops: expected a length of at least 24 tokens, got length={length}; use length=24"
        ):
            task.batch("test", 0, size=1, length=length)
    assert task.batch("test", 0, size=1, length=24).tokens.shape == (1, 24)
    monkeypatch.setattr(listops, "_TRIES", 300)
    message = (
        r"none of 300 trees had more than 100 and fewer than 500 tokens; expected lengths that depth=2, .* such as"
    )
    with pytest.raises(TaskError, match="listops: " + message):
        ListOps(depth=2).batch("train", 0, size=1)


def test_words_and_ids_that_are_no_list_are_refused():
    with pytest.raises(TaskError, match=r"listops: expected words out of 0 1 .* \[SM, got 'MEAN'"):
        encode("[MAX 1 MEAN ]")
    for broken in ("[MAX 1 2", "[MAX 1 ] 2", "3", "[MAX ]", "] [MAX", "[MAX 1 2 ] [MIN 1 2 ]", ""):
        with pytest.raises(TaskError, match=r"listops: expected the ids of one whole list, got \["):
            evaluate(encode(broken))
    with pytest.raises(TaskError, match="listops: expected the ids of one whole list"):
        evaluate([OPERATOR, DIGIT, 0, CLOSE])
