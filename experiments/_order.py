"""In which order marked tokens come: a task that no bag of tokens can solve."""

from collections.abc import Mapping

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

_MOST = 4  # marks


class Order(Task):
    """Rows of random tokens that hold each of the marks 0, 1, ... once; the class says whether their order is an even permutation,
    with two marks whether 0 comes before 1.

    Items 2 k and 2 k + 1 are one row with two marks exchanged, so that both classes have the same bags of tokens.

    Args:
        marks: number of marks, 2 to 4. With two, a sum of what each mark tells of its own place is enough; with more it is not.
        length: tokens of a row.
        vocab: token ids, the marks included.

    Raises:
        TaskError: another number of marks.
    """

    name = "order"
    summary = "whether marked tokens come in an even order"
    paper = "none"
    family = ("order",)

    def __init__(self, *, marks: int = 2, length: int = 32, vocab: int = 32) -> None:
        if not 2 <= marks <= _MOST:
            raise TaskError(f"order: expected 2 to {_MOST} marks, got {marks}")
        self.marks, self.vocab, self.outputs = marks, vocab, 2
        self.head, self.causal = "classifier", False
        self.train_length, self.eval_lengths = length, (length,)
        self.metric, self.better, self.chance = "accuracy", "higher", 0.5
        self.fingerprint = digest_of("order 1", marks, length, vocab)

    def items(self, split: Split) -> int | None:
        """As many as asked."""
        return None

    def draw(self, split: Split, numbers: range, *, length: int, seed: int) -> Batch:
        """The rows of these numbers."""
        rows = np.stack([self._row(split, number, length, seed) for number in numbers])
        targets = np.array([number % 2 for number in numbers])
        kept = torch.ones(len(rows), dtype=torch.bool)
        return Batch(torch.from_numpy(rows), torch.from_numpy(targets), kept)

    def score(self, totals: Mapping[str, Number]) -> Number:
        """Share of rows with the right class."""
        return accuracy(totals)

    def oracle(self, batch: Batch) -> Float[Tensor, "b o"]:
        """Logits found by counting, in each row read from the left, the pairs of marks with the larger one first."""
        orders = [[token for token in row if token < self.marks] for row in batch.tokens.tolist()]
        odd = [sum(a > b for at, a in enumerate(order) for b in order[at:]) % 2 for order in orders]
        return logits_of(torch.tensor(odd), 2)

    def reference_lines(self, items: int = 200) -> list[Reference]:
        """What is known without training, by arithmetic."""
        n, reach = self.train_length, 4
        lines = [Reference("bag of tokens", 0.5, "both classes have the same bags; exact")]
        if self.marks == 2:
            near = sum(2 * (n - gap) for gap in range(1, reach + 1)) / (n * (n - 1))
            lines.append(
                Reference(
                    f"windows of {reach + 1}",
                    0.5 + near / 2,
                    "right where one window holds both; exact, but a model also sees the ends of a row",
                )
            )
        return lines

    def _row(self, split: Split, number: int, length: int, seed: int) -> np.ndarray:
        """The row of a number: the marks in even order, in rows of odd numbers with marks 0 and 1 exchanged."""
        pair, exchanged = divmod(number, 2)
        random = generator("order", split, seed, length, pair).random
        while True:
            row = self.marks + (random(length) * (self.vocab - self.marks)).astype(np.int64)
            places, order = random(length).argsort()[: self.marks], random(self.marks).argsort()
            if split_of(row.astype("<i8").tobytes() + np.sort(places).astype("<i8").tobytes()) == split:
                break
        places = np.sort(places)
        odd = sum(a > b for at, a in enumerate(order) for b in order[at:]) % 2
        if odd != exchanged:
            order[order < 2] = 1 - order[order < 2]
        row[places] = order
        return row
