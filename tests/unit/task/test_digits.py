"""Digits: real images, five divisions, and what is refused."""

import sys
from itertools import combinations

import pytest
import torch
from sklearn.datasets import load_digits

from anyformer.errors import SpecError, TaskError
from anyformer.registry import bind, find
from anyformer.spec import parse
from anyformer.task.base import SPLITS
from anyformer.task.digits import Digits

torch.set_num_threads(1)


def rows(task: Digits, split: str) -> list[tuple[int, ...]]:
    images, _ = task.images(split)
    return [tuple(each) for each in (images.flatten(1) * 16).long().tolist()]


@pytest.mark.parametrize("fold", range(5))
def test_a_fold_deals_every_image_once(fold: int) -> None:
    task = Digits(fold=fold)
    held = {split: rows(task, split) for split in SPLITS}
    assert sum(len(each) for each in held.values()) == 1797
    for one, other in combinations(held.values(), 2):
        assert not set(one) & set(other)
    assert abs(len(held["test"]) - 1797 / 5) < 2
    assert abs(len(held["valid"]) - 1797 / 10) < 2


def test_the_five_folds_test_every_image_once() -> None:
    tested = [each for fold in range(5) for each in rows(Digits(fold=fold), "test")]
    assert sorted(tested) == sorted(tuple(int(pixel) for pixel in each) for each in load_digits().data)


def test_images_and_tokens_are_those_of_the_package() -> None:
    task, found = Digits(), load_digits()
    known = {
        tuple(int(pixel) for pixel in data): int(label) for data, label in zip(found.data, found.target, strict=True)
    }
    batch = task.batch("test", 1, size=50)
    assert [known[tuple(row)] for row in batch.tokens.tolist()] == batch.targets.tolist()
    images, labels = task.images("test")
    assert torch.equal((images * 16).long().flatten(1)[50:100], batch.tokens)
    assert torch.equal(labels[50:100], batch.targets)
    assert task.grid == (8, 8)


def test_an_epoch_shows_every_training_image_once() -> None:
    task = Digits(fold=3)
    count = len(task.images("train")[1])
    epochs = [task.batch("train", index, size=count, seed=4).tokens.tolist() for index in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(map(list, rows(task, "train")))
    assert epochs[0] != epochs[1]
    across = task.batch("train", 1, size=count - 3, seed=4).tokens.tolist()
    assert across == (epochs[0] + epochs[1])[count - 3 : 2 * (count - 3)]


def test_reference_lines_are_near_what_is_known() -> None:
    found = {line.name: line.value for line in Digits().reference_lines(items=360)}
    assert found["3 nearest images"] > 0.97
    assert 0.93 < found["logistic regression"] < 0.98
    assert found["majority"] < 0.15


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(TaskError, match="an image has 64 pixels, got length=128; leave the length out"):
        Digits().batch("test", 0, size=2, length=128)
    with pytest.raises(SpecError, match="fold=5: expected less than 5"):
        bind(find("task", "digits"), parse("digits(fold=5)"))


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(TaskError, match=r"scikit-learn, which is not installed; pip install 'anyformer\[vision\]'"):
        Digits()
