"""What every task shares: the batch, the loss, counts that add up exactly, and random numbers keyed by name.

A task of your own is one class in one file: derive from `Task`, set the attributes in `__init__`, write `items`,
`draw`, `score`, `oracle` and `reference_lines`.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar, get_args

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from anyformer.errors import TaskError

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
Number = TypeVar("Number", float, Tensor)


@dataclass(frozen=True)
class Batch:
    """What a model reads and what it is scored on.

    Args:
        tokens: ids, below the task's `vocab`.
        targets: ids, below the task's `outputs`; one a token, or one a row for a classifier. Already shifted: the
            logits at place i are scored against the targets at place i.
        keep: which targets count.
        attention_mask: True = a real token; None when no token is padding.
    """

    tokens: Int64[Tensor, "b n"]
    targets: Int64[Tensor, "b n"] | Int64[Tensor, " b"]
    keep: Bool[Tensor, "b n"] | Bool[Tensor, " b"]
    attention_mask: Bool[Tensor, "b n"] | None = None

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        mask = None if self.attention_mask is None else self.attention_mask.to(device)
        return Batch(self.tokens.to(device), self.targets.to(device), self.keep.to(device), mask)


@dataclass(frozen=True)
class Reference:
    """A score without attention, to hold a model's against.

    Args:
        name: the rule, such as "bigram".
        value: its score in the task's headline metric.
        note: how it was fitted and on what it was scored.
    """

    name: str
    value: float
    note: str


class Task(ABC):
    """What is measured. Batches depend on (split, index, size, length, seed) and nothing else, in every process.

    Item k of a split is one window or one example; `batch(split, index, size=s)` holds the s items from index*s on. The
    seed orders the training items; valid and test are the same items for every seed, so that seeds, methods and
    reference lines are compared on one set.

    Class attributes: `name` (the file's stem), `summary`, `paper`, `family`.
    Attributes set by `__init__`:
        vocab: token ids a model must embed.
        outputs: width of the head.
        head: the head a model needs.
        causal: whether a model may look at earlier tokens only.
        train_length: tokens of a training row.
        eval_lengths: tokens of an evaluation row, the trained length first.
        metric: name of the headline metric.
        better: which direction of it is good.
        chance: what a uniform random guess scores in it.
        fingerprint: SHA-256 of the data and of all parameters that determine the batches.
        source: where the data come from; "generated" by default.
        skipped: files that were left out, each with the reason.
        grid: rows and columns of the image that a row of tokens is, for encodings on a grid; None: tokens stand in one row.
    """

    kind: ClassVar[str] = "task"
    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]
    family: ClassVar[tuple[str, ...]]

    vocab: int
    outputs: int
    head: Literal["lm", "mlm", "classifier"]
    causal: bool
    train_length: int
    eval_lengths: tuple[int, ...]
    metric: str
    better: Literal["lower", "higher"]
    chance: float
    fingerprint: str
    source: str = "generated"
    skipped: tuple[str, ...] = ()
    grid: tuple[int, int] | None = None

    @abstractmethod
    def items(self, split: Split) -> int | None:
        """How many items a split holds; None = as many as asked."""

    @abstractmethod
    def draw(self, split: Split, numbers: range, *, length: int, seed: int) -> Batch:
        """The items of these numbers, `length` tokens a row. `batch` has checked the numbers; check the length here."""

    @abstractmethod
    def score(self, totals: Mapping[str, Number]) -> Number:
        """The headline metric from `counts` of one item each (tensors) or from sums of them (floats)."""

    @abstractmethod
    def oracle(self, batch: Batch) -> Float[Tensor, "..."] | None:
        """Logits that solve the batch, found without the code that made the labels; None where nothing solves the
        task."""

    @abstractmethod
    def reference_lines(self, items: int = 200) -> list[Reference]:
        """What rules without attention score on the first `items` test items, in seconds on one core."""

    def batch(self, split: str, index: int, *, size: int, length: int | None = None, seed: int = 0) -> Batch:
        """The `size` items of a split from index*size on; the last batch of a finite split may be shorter.

        Args:
            split: "train", "valid" or "test"; no item is in two of them.
            index: number of the batch, from 0.
            size: rows.
            length: tokens a row; None = `train_length`.
            seed: order of the training items; valid and test ignore it.

        Raises:
            TaskError: an unknown split, a negative index, size below 1, a split that has ended, or a length the task
                cannot fill.
        """
        if split not in SPLITS:
            raise TaskError(f"{self.name}: expected split 'train', 'valid' or 'test', got {split!r}")
        if index < 0 or size < 1:
            raise TaskError(f"{self.name}: expected index >= 0 and size >= 1, got index={index} and size={size}")
        held, start = self.items(split), index * size
        if held is not None and start >= held:
            raise TaskError(
                f"{self.name}: the {split} split holds {held} items, but batch {index} of size {size} starts at item "
                f"{start}; use an index below {-(-held // size)}"
            )
        stop = start + size if held is None else min(start + size, held)
        length = self.train_length if length is None else length
        return self.draw(split, range(start, stop), length=length, seed=seed if split == "train" else 0)

    def loss(self, logits: Float[Tensor, "... o"], batch: Batch) -> Float[Tensor, ""]:
        """Mean cross entropy in nats over the kept targets, in float32 or wider.

        Raises:
            TaskError: logits whose shape does not fit the batch.
        """
        self._check_logits(logits, batch)
        kept = logits[batch.keep]  # [kept, outputs]
        return F.cross_entropy(kept.to(torch.promote_types(kept.dtype, torch.float32)), batch.targets[batch.keep])

    def counts(self, logits: Float[Tensor, "... o"], batch: Batch) -> dict[str, Float64[Tensor, " b"]]:
        """For each row: `nats` (summed cross entropy), `correct` (targets that are the top output) and `scored` (kept
        targets). They add up over rows and batches; `score` turns one row's or a sum's into the headline metric.

        Raises:
            TaskError: logits whose shape does not fit the batch.
        """
        self._check_logits(logits, batch)
        rows = batch.keep.nonzero()[:, 0]
        kept, targets = logits[batch.keep].double(), batch.targets[batch.keep]  # double only what is scored
        values = {
            "nats": F.cross_entropy(kept, targets, reduction="none"),
            "correct": (kept.argmax(-1) == targets).double(),
            "scored": torch.ones_like(rows, dtype=torch.float64),
        }
        zeros = torch.zeros(len(batch.tokens), dtype=torch.float64, device=rows.device)
        return {name: zeros.index_add(0, rows, value) for name, value in values.items()}

    def metrics(self, logits: Float[Tensor, "... o"], batch: Batch) -> dict[str, float]:
        """`counts` summed over the batch. Add these over batches, then call `finish`."""
        return {name: value.sum().item() for name, value in self.counts(logits, batch).items()}

    def item_scores(self, logits: Float[Tensor, "... o"], batch: Batch) -> Float64[Tensor, " b"]:
        """The headline metric of each row, for paired statistics. Its mean is the batch's when all rows keep as many
        targets."""
        return self.score(self.counts(logits, batch))

    def finish(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Metrics by name from summed counts: the headline `metric`, `loss` in nats a target, and `accuracy`."""
        return {
            "loss": totals["nats"] / totals["scored"],
            "accuracy": totals["correct"] / totals["scored"],
            self.metric: self.score(totals),
        }

    def _check_logits(self, logits: Tensor, batch: Batch) -> None:
        expected = (*batch.targets.shape, self.outputs)
        if logits.shape != expected:
            raise TaskError(
                f"{self.name}: expected logits of shape {expected}, got {tuple(logits.shape)}; "
                f"build the model with head={self.head!r} and {self.outputs} outputs"
            )


def bits_per_target(totals: Mapping[str, Number]) -> Number:
    """Cross entropy in bits a scored target."""
    return totals["nats"] / totals["scored"] / float(np.log(2.0))


def accuracy(totals: Mapping[str, Number]) -> Number:
    """Share of the scored targets that are the top output."""
    return totals["correct"] / totals["scored"]


def generator(*key: int | str) -> np.random.Generator:
    """Random numbers that depend on the key alone, never on the process or on what was drawn before.

    Take only `random` from it: NumPy may change how its other distributions use the stream.
    """
    digest = hashlib.sha256(repr([str(part) for part in key]).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))


def split_of(content: bytes) -> Split:
    """The split a document or an example belongs to: by its hash, one in 16 to test, one in 16 to valid, the rest to
    train. Whatever is hashed can be in one split only."""
    bucket = hashlib.blake2b(content, digest_size=1).digest()[0] % 16
    return "test" if bucket == 0 else "valid" if bucket == 1 else "train"


def digest_of(*parts: object) -> str:
    """SHA-256, in hex, of the parts' texts: a fingerprint of parameters."""
    return hashlib.sha256(repr([str(part) for part in parts]).encode()).hexdigest()


def logits_of(labels: Int64[Tensor, "..."], outputs: int) -> Float[Tensor, "... o"]:
    """Logits that answer `labels` with near certainty (40 against 0)."""
    return F.one_hot(labels, outputs).float() * 40
