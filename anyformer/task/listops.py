"""ListOps: read nested lists of operators and digits, name the one digit the whole evaluates to.

    [MAX 2 9 [MIN 4 7 ] 0 ]  ->  9

Drawn as Long Range Arena draws it: a node above the lowest depth is an operator with odds 1/4, else a uniform digit; an
operator is MIN, MAX, MED (median, cut to a whole number) or SM (sum modulo 10) with equal odds and takes 2 to 10
children; trees outside the length range are drawn again. Differences: every tree's split is decided by the hash of its
tokens, so no tree is in two splits; the training set is as long as asked, not 96,000 trees; the default lengths suit a
CPU.

Nangia and Bowman 2018 (arXiv 1804.06028); Tay et al. 2020 (arXiv 2011.04006).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Annotated

import annotated_types as at
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.errors import TaskError
from anyformer.task._trees import CLOSE, DIGIT, OPERATOR, OPERATORS, grow, lay_out, value
from anyformer.task.base import (
    Batch,
    Number,
    Reference,
    Split,
    Task,
    accuracy,
    digest_of,
    generator,
    logits_of,
    split_of,
)

_SHORTEST = 8  # tokens; shorter trees are too few to fill three disjoint splits
_TRIES = 50_000  # trees outside the length range before giving up; published settings keep one in three
_DIGIT_TRIES = 64  # new digits for the same tree until its hash falls into the wanted split
_FITTED = 1000  # training trees that fit the reference lines
_APPLY = (min, max, lambda values: int(median(values)), lambda values: sum(values) % 10)  # in the order of OPERATORS


class ListOps(Task):
    """Value of a nested list; ten classes, token ids as in `encode`, padded on the right to `length`.

    At a longer evaluation length both ends of the range of tree lengths grow in proportion.

    Args:
        min_length: trees are longer than this, in tokens (operators, digits and closing brackets).
        max_length: trees are shorter than this; also the width of a row. Long Range Arena: min_length=500,
            max_length=2000.
        depth: levels of a tree; the lowest holds digits only.
        arguments: most children of an operator.
        probability: odds of an operator above the lowest level.

    Raises:
        TaskError: a range of lengths that holds no tree or too few of them.
    """

    name = "listops"
    summary = "value of nested lists of MIN, MAX, MED and SM"
    paper = "Nangia and Bowman 2018 (arXiv 1804.06028); drawn as in Tay et al. 2020 (arXiv 2011.04006)"
    family = ("classification", "hierarchical")

    def __init__(
        self,
        *,
        min_length: Annotated[int, at.Ge(1)] = 100,
        max_length: Annotated[int, at.Ge(1)] = 500,
        depth: Annotated[int, at.Ge(2)] = 10,
        arguments: Annotated[int, at.Ge(2)] = 10,
        probability: Annotated[float, at.Gt(0), at.Lt(1)] = 0.25,
    ) -> None:
        if min_length < _SHORTEST or max_length < min_length + 2:
            raise TaskError(
                f"listops: expected min_length >= {_SHORTEST} and max_length >= min_length + 2 (a tree lies strictly "
                f"between them), got min_length={min_length} and max_length={max_length}; "
                f"type listops(min_length=100, max_length=500)"
            )
        self.min_length, self.max_length = min_length, max_length
        self.depth, self.arguments, self.probability = depth, arguments, probability
        self.vocab, self.outputs = CLOSE + 1, 10
        self.head = "classifier"
        self.causal = False
        self.train_length = max_length
        self.eval_lengths = (max_length, 2 * max_length)
        self.metric, self.better, self.chance = "accuracy", "higher", 0.1
        self.fingerprint = digest_of("listops 1", min_length, max_length, depth, arguments, float(probability))

    def items(self, split: Split) -> int | None:
        """As many as asked."""
        return None

    def draw(self, split: Split, numbers: range, *, length: int, seed: int) -> Batch:
        """Trees of between min_length and max_length tokens, both scaled by length / max_length.

        Raises:
            TaskError: a length that no tree fits.
        """
        spread = self.max_length - self.min_length
        least = max(-(-_SHORTEST * self.max_length // self.min_length), 2 * self.max_length // spread)
        if length < least:
            raise TaskError(
                f"listops: expected a length of at least {least} tokens, got length={length}; use length={least}"
            )
        tokens = np.zeros((len(numbers), length), dtype=np.int64)
        labels = np.zeros(len(numbers), dtype=np.int64)
        for row, number in enumerate(numbers):
            tree, labels[row] = self._tree(split, number, length, seed)
            tokens[row, : len(tree)] = tree
        read = torch.from_numpy(tokens)
        return Batch(read, torch.from_numpy(labels), torch.ones(len(numbers), dtype=torch.bool), read != 0)

    def score(self, totals: Mapping[str, Number]) -> Number:
        """Accuracy."""
        return accuracy(totals)

    def oracle(self, batch: Batch) -> Float[Tensor, "b o"]:
        """Logits of the true values, by a stack that reads the tokens; the labels come from the tree's arrays."""
        values = [evaluate(row[row != 0].tolist()) for row in batch.tokens]
        return logits_of(torch.tensor(values, device=batch.tokens.device), self.outputs)

    def reference_lines(self, items: int = 200) -> list[Reference]:
        """The commonest label, and rules that see only the top levels of a tree: a list that lies deeper counts as the
        likeliest value of its operator."""
        train, test = self._trees_of("train", _FITTED), self._trees_of("test", items)
        commonest = Counter(label for _, label in train).most_common(1)[0][0]
        by_root = [
            Counter(label for tree, label in train if tree[0] == OPERATOR + each) for each in range(len(OPERATORS))
        ]
        likeliest = [counter.most_common(1)[0][0] if counter else commonest for counter in by_root]
        fitted = f"fitted on {_FITTED} training trees"
        right = sum(label == commonest for _, label in test)
        lines = [Reference("majority class", right / items, f"always {commonest}, the commonest label; {fitted}")]
        names = ("root operator", "root operator and its digits", "two levels", "three levels")
        for depth, name in enumerate(names):
            right = sum(evaluate(tree, depth=depth, unseen=likeliest) == label for tree, label in test)
            note = f"lists below level {depth} count as the likeliest value of their operator; {fitted}"
            lines.append(Reference(name, right / items, note))
        return lines

    def _trees_of(self, split: Split, items: int) -> list[tuple[list[int], int]]:
        batch = self.batch(split, 0, size=items)
        return [(row[row != 0].tolist(), int(label)) for row, label in zip(batch.tokens, batch.targets, strict=True)]

    def _tree(self, split: Split, number: int, length: int, seed: int) -> tuple[np.ndarray, int]:
        random = generator("listops", split, seed, length, number).random
        above = self.min_length * length // self.max_length
        for _ in range(_TRIES):
            grown = grow(random, below=length, depth=self.depth, arguments=self.arguments, probability=self.probability)
            if grown is None or grown[1] <= above:
                continue
            written, blanks = lay_out(*grown)
            # Given its shape a tree's digits are uniform, so new digits keep the distribution and cost less than a new
            # tree.
            for _ in range(_DIGIT_TRIES):
                digits = (random(len(blanks)) * 10).astype(np.int64)
                written[blanks] = DIGIT + digits
                if split_of(written.astype(np.uint8).tobytes()) == split:
                    return written, value(grown[0], digits)
        raise TaskError(
            f"listops: none of {_TRIES} trees had more than {above} and fewer than {length} tokens; "
            f"expected lengths that depth={self.depth}, arguments={self.arguments} and probability={self.probability} "
            f"reach, such as listops(min_length=100, max_length=500)"
        )


def encode(text: str) -> list[int]:
    """Token ids of a written list such as "[MAX 2 9 [MIN 4 7 ] 0 ]": digit d is d + 1, MIN, MAX, MED, SM are 11 to 14,
    the closing bracket is 15, padding is 0.

    Raises:
        TaskError: a word that is none of these.
    """
    ids = {str(digit): DIGIT + digit for digit in range(10)} | {"]": CLOSE}
    ids |= {"[" + name: OPERATOR + place for place, name in enumerate(OPERATORS)}
    words = text.split()
    for word in words:
        if word not in ids:
            raise TaskError(f"listops: expected words out of {' '.join(ids)}, got {word!r}")
    return [ids[word] for word in words]


def evaluate(tokens: Sequence[int], *, depth: int | None = None, unseen: Sequence[int] = (0, 9, 4, 4)) -> int:
    """The value of one list, read once from left to right with a stack.

    Args:
        tokens: ids of one tree without padding.
        depth: levels that are evaluated; None = all. A list below them counts as `unseen` of its operator, with 0 the
            root too.
        unseen: value of MIN, MAX, MED and SM where they are not evaluated.

    Raises:
        TaskError: tokens that are not one whole list.
    """
    stack: list[list[int]] = []
    for place, token in enumerate(tokens):
        if OPERATOR <= token < CLOSE:
            stack.append([token - OPERATOR])
        elif stack and DIGIT <= token < OPERATOR:
            stack[-1].append(token - DIGIT)
        elif stack and token == CLOSE and len(stack[-1]) > 1:
            operator, *values = stack.pop()
            result = _APPLY[operator](values) if depth is None or len(stack) < depth else unseen[operator]
            if stack:
                stack[-1].append(result)
            elif place == len(tokens) - 1:
                return result
            else:
                break
        else:
            break
    raise TaskError(f"listops: expected the ids of one whole list, got {list(tokens)[:20]} ({len(tokens)} ids)")
