"""Which package of the standard library a piece of source text comes from."""

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from anyformer.errors import TaskError
from anyformer.task._corpus import Document, standard_library
from anyformer.task.base import SPLITS, Batch, Number, Reference, Split, Task, accuracy, digest_of, generator

PACKAGES = ("asyncio", "email", "idlelib", "importlib", "multiprocessing", "tkinter", "unittest", "xml")
_SHARES: dict[Split, float] = {"test": 0.25, "valid": 0.125}
_COUNTED = 4096  # training pieces that reference lines count


class Packages(Task):
    """Pieces of text and the package that they come from; no file is in two splits, and classes take turns.

    Args:
        length: bytes of a piece.

    Attributes:
        files: names of the files of each split.

    Raises:
        TaskError: a package has too few files here.
    """

    name = "packages"
    summary = "which package of the standard library a piece of text comes from"
    paper = "none"
    family = ("text classification",)

    def __init__(self, *, length: int = 256) -> None:
        corpus = standard_library()
        self.source = corpus.source
        self.vocab, self.outputs = 256, len(PACKAGES)
        self.head, self.causal = "classifier", False
        self.train_length, self.eval_lengths = length, (length,)
        self.metric, self.better, self.chance = "accuracy", "higher", 1 / len(PACKAGES)
        self.fingerprint = digest_of("packages 1", corpus.fingerprint(), length)
        self.files: dict[Split, list[str]] = {split: [] for split in SPLITS}
        self._pieces: dict[Split, list[list[bytes]]] = {split: [] for split in SPLITS}
        for package in PACKAGES:
            files = [each for each in corpus.documents if each.name.startswith(f"{package}/")]
            for split, chosen in _split(package, files).items():
                pieces = [piece for each in chosen for piece in _cut(each.content, length)]
                self._pieces[split].append(sorted(pieces, key=_hash))
                self.files[split] += [each.name for each in chosen]

    def items(self, split: Split) -> int | None:
        """Pieces that every class has; any number for training."""
        return None if split == "train" else len(PACKAGES) * min(len(pieces) for pieces in self._pieces[split])

    def draw(self, split: Split, numbers: range, *, length: int, seed: int) -> Batch:
        """The pieces of these numbers: of class number % 8 the next one, in training a random one.

        Raises:
            TaskError: another length.
        """
        if length != self.train_length:
            raise TaskError(
                f"packages: expected length={self.train_length}, got {length}; build it with length={length}"
            )
        targets = np.array([number % len(PACKAGES) for number in numbers])
        rows = [self._piece(split, number, seed) for number in numbers]
        tokens = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), length).astype(np.int64)
        kept = torch.ones(len(rows), dtype=torch.bool)
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), kept)

    def score(self, totals: Mapping[str, Number]) -> Number:
        """Share of pieces with the right class."""
        return accuracy(totals)

    def oracle(self, batch: Batch) -> Tensor | None:
        """None: nothing solves it."""
        return None

    def reference_lines(self, items: int = 200) -> list[Reference]:
        """What guessing and counts of bytes score on the first test items."""
        train = self.batch("train", 0, size=_COUNTED)
        test = self.batch("test", 0, size=min(items, self.items("test") or 0))
        bags = torch.nn.functional.one_hot(train.tokens, 256).sum(dim=1).double()
        counts = torch.zeros(len(PACKAGES), 256, dtype=torch.float64).index_add(0, train.targets, bags) + 1
        found = (
            torch.nn.functional.one_hot(test.tokens, 256).sum(dim=1).double()
            @ counts.div(counts.sum(dim=1, keepdim=True)).log().mT
        )
        right = (found.argmax(dim=1) == test.targets).double().mean().item()
        return [
            Reference("majority", self.chance, "classes take turns; exact"),
            Reference(
                "bag of bytes", right, f"naive Bayes of {_COUNTED} training pieces, on {len(test.tokens)} test pieces"
            ),
        ]

    def _piece(self, split: Split, number: int, seed: int) -> bytes:
        turn, package = divmod(number, len(PACKAGES))
        pieces = self._pieces[split][package]
        place = int(generator("packages", seed, number).random() * len(pieces)) if split == "train" else turn
        return pieces[place]


def _split(package: str, files: list[Document]) -> dict[Split, list[Document]]:
    """Whole files: the largest to train, the others in the order of the hash of their names to test until it has a quarter of all
    bytes, to valid until it has an eighth, the rest to train."""
    if len(files) < len(PACKAGES):
        raise TaskError(f"packages: expected at least {len(PACKAGES)} files in {package}, got {len(files)}")
    total = sum(len(each.content) for each in files)
    largest, *others = sorted(files, key=lambda each: (-len(each.content), each.name))
    found: dict[Split, list[Document]] = {"train": [largest], "valid": [], "test": []}
    for each in sorted(others, key=lambda each: _hash(each.name.encode())):
        sizes = {split: sum(len(other.content) for other in found[split]) for split in _SHARES}
        short = [split for split, share in _SHARES.items() if sizes[split] < share * total]
        found[short[0] if short else "train"].append(each)
    return found


def _cut(content: bytes, length: int) -> list[bytes]:
    return [content[start : start + length] for start in range(0, len(content) - length + 1, length)]


def _hash(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
