"""Digits: name the handwritten digit on an image of 8 x 8 pixels, each pixel a token.

1797 real images with 17 grey levels, read row by row: 64 tokens with ids 0 (white) to 16, 10 classes. A fixed shuffle deals the
images into ten parts; the fold says which two are test and which one is valid, so that the five folds test every image once.

Alpaydin and Kaynak 1998 (UCI repository, the test part of optdigits), as packed with scikit-learn.
"""

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any

import annotated_types as at
import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from anyformer.errors import TaskError
from anyformer.task.base import Batch, Number, Reference, Split, Task, accuracy, digest_of, generator

_SIDE, _LEVELS, _CLASSES, _PARTS = 8, 17, 10, 10


class Digits(Task):
    """Class of a digit's image.

    Args:
        fold: which of the five divisions into train (7 of 10 images), valid (1) and test (2).

    Raises:
        TaskError: scikit-learn, which holds the images, is not installed; a length other than 64.
    """

    name = "digits"
    summary = "handwritten digits, each pixel a token"
    paper = "Alpaydin and Kaynak 1998 (UCI optdigits)"
    family = ("vision", "classification")

    def __init__(self, *, fold: Annotated[int, at.Ge(0), at.Lt(5)] = 0) -> None:
        found = _package("datasets").load_digits()
        self._pixels = found.images.astype(np.int64)  # [1797 8 8], 0..16
        self._labels = found.target.astype(np.int64)
        self.fold = fold
        self._numbers = _deal(len(self._labels), fold)
        self.vocab, self.outputs = _LEVELS, _CLASSES
        self.head, self.causal = "classifier", False
        self.train_length, self.eval_lengths = _SIDE * _SIDE, (_SIDE * _SIDE,)
        self.grid = (_SIDE, _SIDE)
        self.metric, self.better, self.chance = "accuracy", "higher", 1 / _CLASSES
        content = hashlib.sha256(self._pixels.tobytes() + self._labels.tobytes()).hexdigest()
        self.fingerprint = digest_of("digits 1", content, fold)
        self.source = "scikit-learn's load_digits (UCI optdigits, test part)"

    def items(self, split: Split) -> int | None:
        """The images of valid and test; any number for training, epoch after epoch."""
        return None if split == "train" else len(self._numbers[split])

    def draw(self, split: Split, numbers: range, *, length: int, seed: int) -> Batch:
        """Images as rows of 64 tokens; every training image once an epoch, in an order of the seed's and the epoch's own.

        Raises:
            TaskError: another length.
        """
        if length != self.train_length:
            raise TaskError(
                f"digits: an image has {self.train_length} pixels, got length={length}; leave the length out"
            )
        held = self._numbers[split]
        chosen = held[numbers.start : numbers.stop]
        if split == "train":
            epochs = range(numbers.start // len(held), (numbers.stop - 1) // len(held) + 1)
            orders = [np.argsort(generator("digits", "epoch", seed, each).random(len(held))) for each in epochs]
            start = numbers.start - epochs.start * len(held)
            chosen = held[np.concatenate(orders)[start : start + len(numbers)]]
        pixels, labels = self._pixels[chosen].reshape(len(chosen), -1), self._labels[chosen]
        keep = torch.ones(len(chosen), dtype=torch.bool)
        return Batch(torch.from_numpy(pixels), torch.from_numpy(labels), keep)

    def images(self, split: Split) -> tuple[Float[Tensor, "t 1 8 8"], Int64[Tensor, " t"]]:
        """Every image of a split with pixels from 0 to 1, and its class."""
        numbers = self._numbers[split]
        pixels = torch.from_numpy(self._pixels[numbers]).float() / (_LEVELS - 1)
        return pixels[:, None], torch.from_numpy(self._labels[numbers])

    def score(self, totals: Mapping[str, Number]) -> Number:
        """Share of the images whose class is the top output."""
        return accuracy(totals)

    def oracle(self, batch: Batch) -> Float[Tensor, "b o"] | None:
        """None: nothing solves handwriting."""
        return None

    def reference_lines(self, items: int = 200) -> list[Reference]:
        """What a guess, the nearest images and a linear model make of the pixels, on the first `items` test images."""
        train, test = self._numbers["train"], self._numbers["test"][:items]
        rules = {
            "3 nearest images": _package("neighbors").KNeighborsClassifier(n_neighbors=3),
            "logistic regression": _package("linear_model").LogisticRegression(max_iter=1000),
        }
        note = f"fitted to the pixels of {len(train)} training images; {len(test)} test images"
        most = np.bincount(self._labels[train]).argmax()
        lines = [Reference("majority", float((self._labels[test] == most).mean()), note)]
        for name, rule in rules.items():
            rule.fit(self._flat(train), self._labels[train])
            lines.append(Reference(name, float(rule.score(self._flat(test), self._labels[test])), note))
        return lines

    def _flat(self, numbers: np.ndarray) -> np.ndarray:
        return self._pixels[numbers].reshape(len(numbers), -1) / (_LEVELS - 1)


def _deal(count: int, fold: int) -> dict[Split, np.ndarray]:
    """Numbers of the images of each split, in a fixed order."""
    shuffled = np.argsort(generator("digits", "deal").random(count), kind="stable")
    part = np.arange(count) % _PARTS
    test, valid = (part // 2 == fold), part == (2 * fold + 2) % _PARTS
    return {"train": shuffled[~test & ~valid], "valid": shuffled[valid], "test": shuffled[test]}


def _package(part: str) -> Any:
    from importlib import import_module

    try:
        return import_module(f"sklearn.{part}")
    except ImportError:
        raise TaskError(
            "digits reads images that come with scikit-learn, which is not installed; pip install 'anyformer[vision]'"
        ) from None
