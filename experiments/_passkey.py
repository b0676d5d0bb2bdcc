"""Passkey: one key symbol somewhere in a row of filler; at the end a question mark asks for it several times.

The only thing to find lies anywhere between the first token and the last quarter (at least 32 tokens), so a longer row asks for it
from farther away.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from anyformer.errors import TaskError
from anyformer.task.base import Batch, Number, Reference, Split, Task, accuracy, digest_of, generator, logits_of

_KEYS, _FILLERS = 32, 32
_MARK = _KEYS + _FILLERS


class Passkey(Task):
    """Accuracy of the key at the question marks.

    Args:
        length: tokens of a training row.
        asked: question marks in a row's last 32 tokens; in training four times as many.

    Raises:
        TaskError: a length below 64.
    """

    name = "passkey"
    summary = "one key in a row of filler, asked for at the end"
    paper = "Mohtashami and Jaggi 2023 (arXiv 2305.16300)"
    family = ("recall", "passkey")

    def __init__(self, *, length: int = 128, asked: int = 4) -> None:
        self.asked = asked
        self.vocab = self.outputs = _MARK + 1
        self.head, self.causal = "lm", True
        self.train_length = length
        self.eval_lengths = tuple(times * length for times in (1, 2, 4, 8))
        self.metric, self.better, self.chance = "accuracy", "higher", 1 / _KEYS
        self.fingerprint = digest_of("passkey 1", length, asked)

    def items(self, split: Split) -> int | None:
        """As many as asked."""
        return None

    def draw(self, split: Split, numbers: range, *, length: int, seed: int) -> Batch:
        """Rows of `length` tokens, by split and number."""
        if length < 64:
            raise TaskError(f"passkey: expected a length of at least 64, got {length}")
        tokens = np.zeros((len(numbers), length), dtype=np.int64)
        targets, keep = np.zeros_like(tokens), np.zeros(tokens.shape, dtype=bool)
        for row, number in enumerate(numbers):
            random = generator("passkey", split, seed, length, number).random
            key = int(random() * _KEYS)
            tokens[row] = _KEYS + (random(length) * _FILLERS).astype(np.int64)
            tokens[row, int(random() * (length - max(length // 4, 32)))] = key
            marks = 4 * self.asked if split == "train" else self.asked
            places = length - 32 + np.argsort(random(32), kind="stable")[:marks]
            tokens[row, places], targets[row, places], keep[row, places] = _MARK, key, True
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(keep))

    def score(self, totals: Mapping[str, Number]) -> Number:
        """Accuracy over the question marks."""
        return accuracy(totals)

    def oracle(self, batch: Batch) -> Tensor:
        """The one key in each row."""
        keys = torch.where(batch.tokens < _KEYS, batch.tokens, 0).sum(dim=1, keepdim=True)
        return logits_of(keys.expand_as(batch.tokens).clone(), self.outputs)

    def reference_lines(self, items: int = 200) -> list[Reference]:
        """A guess."""
        return [Reference("any key", 1 / _KEYS, "exact")]
