"""MQAR, multi-query associative recall: after K (key, value) pairs each key comes once more; answer with its value.

    k1 v1 k2 v2 ... kK vK | .. k2 .. .. k1 ..
    target at the place of a repeated key: its value; nothing else is scored

Keys are drawn without replacement from 1 .. V//2 - 1, values from V//2 .. V - 1. With S = (length - 2K) / 2 slots left,
key i is asked at place 2K + 2 s, the slots s drawn without replacement with weight a (s + 1)^(a - 1): most soon after
the pairs, a long tail later. All other places hold 0, or random ids. A sequence's split is decided by the hash of its
tokens.

Arora et al. 2023 (arXiv 2312.04927).
"""

from collections.abc import Callable, Mapping
from math import perm
from typing import Annotated

import annotated_types as at
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.errors import TaskError
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

_FEWEST = 10_000  # different sequences, so that three disjoint splits each get some


class MQAR(Task):
    """Recall of the value that was paired with a key.

    Args:
        vocab: ids V; the lower half are keys (0 is the filler), the upper half values.
        length: tokens of a training row; evaluation also takes 2 and 4 times as many.
        pairs: K, pairs to remember and queries to answer.
        power: a, the spread of the queries; towards 0 they crowd behind the pairs, at 1 they are spread evenly.
        random_non_queries: whether the places between hold random ids instead of 0.

    Raises:
        TaskError: a length that is odd or below 4 pairs, a vocabulary with fewer keys than pairs, or a setting that
            allows too few different sequences to fill three disjoint splits.
    """

    name = "mqar"
    summary = "recall of the values paired with many keys"
    paper = "Arora et al. 2023 (arXiv 2312.04927)"
    family = ("recall", "associative")

    def __init__(
        self,
        *,
        vocab: Annotated[int, at.Ge(4)] = 64,
        length: Annotated[int, at.Ge(4)] = 64,
        pairs: Annotated[int, at.Ge(1)] = 8,
        power: Annotated[float, at.Gt(0)] = 0.01,
        random_non_queries: bool = False,
    ) -> None:
        self.pairs, self.power, self.random_non_queries = pairs, power, random_non_queries
        self.vocab = self.outputs = vocab
        self._check_length(length)
        if vocab // 2 - 1 < pairs:
            raise TaskError(
                f"mqar: expected a vocab with at least pairs={pairs} keys (vocab // 2 - 1), got vocab={vocab} with "
                f"{vocab // 2 - 1}; type mqar(vocab={2 * pairs + 2}, length={length}, pairs={pairs}) or fewer pairs"
            )
        different = perm(vocab // 2 - 1, pairs) * perm(vocab - vocab // 2, pairs) * perm(length // 2 - pairs, pairs)
        if different < _FEWEST:
            raise TaskError(
                f"mqar: expected at least {_FEWEST} different sequences to fill three disjoint splits, got {different} "
                f"with vocab={vocab}, length={length}, pairs={pairs}; raise vocab, length or pairs"
            )
        self.head = "lm"
        self.causal = True
        self.train_length = length
        self.eval_lengths = (length, 2 * length, 4 * length)
        self.metric, self.better, self.chance = "accuracy", "higher", 1 / vocab
        self.fingerprint = digest_of("mqar 1", vocab, length, pairs, float(power), random_non_queries)

    def items(self, split: Split) -> int | None:
        """As many as asked."""
        return None

    def draw(self, split: Split, numbers: range, *, length: int, seed: int) -> Batch:
        """Sequences of `length` tokens with the same number of pairs.

        Raises:
            TaskError: a length that is odd or below 4 pairs.
        """
        self._check_length(length)
        odds = (self.power - 1) * np.log(np.arange(1, length // 2 - self.pairs + 1))  # logarithms, up to a constant
        tokens = np.zeros((len(numbers), length), dtype=np.int64)
        targets, keep = np.zeros_like(tokens), np.zeros(tokens.shape, dtype=bool)
        for row, number in enumerate(numbers):
            random = generator("mqar", split, seed, length, number).random
            while True:
                tokens[row], asked, answers = self._sequence(random, odds, length)
                if split_of(tokens[row].astype("<i8").tobytes()) == split:
                    break
            targets[row, asked], keep[row, asked] = answers, True
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(keep))

    def score(self, totals: Mapping[str, Number]) -> Number:
        """Accuracy over queries."""
        return accuracy(totals)

    def oracle(self, batch: Batch) -> Float[Tensor, "b n o"]:
        """Logits of the values, looked up in the pairs that a row's tokens begin with."""
        answers = torch.zeros_like(batch.tokens)
        for row, tokens in enumerate(batch.tokens.tolist()):
            table = dict(zip(tokens[: 2 * self.pairs : 2], tokens[1 : 2 * self.pairs : 2], strict=True))
            for place in batch.keep[row].nonzero()[:, 0].tolist():
                answers[row, place] = table[tokens[place]]
        return logits_of(answers, self.outputs)

    def reference_lines(self, items: int = 200) -> list[Reference]:
        """What guessing scores, by arithmetic: with any value, and with any value that the row holds."""
        values = self.vocab - self.vocab // 2
        return [
            Reference("any value", 1 / values, f"one of the {values} values at random; exact"),
            Reference("any value present", 1 / self.pairs, f"one of the row's {self.pairs} values at random; exact"),
        ]

    def _sequence(self, random: Callable, odds: np.ndarray, length: int) -> tuple[np.ndarray, ...]:
        """Int[length] tokens, Int[pairs] places of the queries, Int[pairs] their answers."""
        keys_end, pairs = self.vocab // 2, self.pairs
        keys = 1 + _first(random(keys_end - 1), pairs)
        values = keys_end + _first(random(self.vocab - keys_end), pairs)
        # The first arrivals of exponential clocks with rates w are draws without replacement with odds w.
        slots = _first(np.log(-np.log1p(-random(len(odds)))) - odds, pairs)
        tokens = np.zeros(length, dtype=np.int64)
        if self.random_non_queries:
            tokens[:] = random(length) * self.vocab
        tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2] = keys, values
        asked = 2 * pairs + 2 * slots
        tokens[asked] = keys
        return tokens, asked, values

    def _check_length(self, length: int) -> None:
        if length % 2 or length < 4 * self.pairs:
            raise TaskError(
                f"mqar: expected an even length of at least 4 * pairs = {4 * self.pairs}, got length={length}; "
                f"use length={max(4 * self.pairs, length + length % 2)} or fewer pairs"
            )


def _first(times: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` smallest times, in their order: a draw without replacement."""
    found = np.argpartition(times, count - 1)[:count]
    return found[np.argsort(times[found], kind="stable")]
