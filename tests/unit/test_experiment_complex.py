"""The tasks of the complex experiment, its twins, and its table."""

import sysconfig
from pathlib import Path

import pytest
import torch

import experiments.complex as experiment
from anyformer.errors import TaskError
from anyformer.task._corpus import Document
from anyformer.task.base import SPLITS
from experiments._order import Order
from experiments._packages import PACKAGES, Packages, _split


@pytest.fixture(scope="module")
def packages() -> Packages:
    return Packages()


@pytest.mark.parametrize("marks", [2, 3, 4])
def test_order_has_the_same_bags_in_both_classes(marks: int) -> None:
    task = Order(marks=marks)
    batch = task.batch("train", 0, size=64)
    assert task.metrics(task.oracle(batch), batch)["correct"] == 64
    even, odd = batch.tokens[0::2], batch.tokens[1::2]
    assert torch.equal(even.sort(dim=1).values, odd.sort(dim=1).values)
    assert batch.targets.tolist() == [0, 1] * 32
    held = (even < marks).sum(dim=1)
    assert held.tolist() == [marks] * 32


def test_order_is_drawn_by_split_seed_and_number() -> None:
    rows = {(split, seed): Order().batch(split, 0, size=32, seed=seed).tokens for split in SPLITS for seed in (0, 1)}
    assert torch.equal(rows["train", 0][10:12], Order().batch("train", 5, size=2).tokens)
    assert not torch.equal(rows["train", 0], rows["train", 1])
    assert torch.equal(rows["test", 0], rows["test", 1])
    assert not torch.equal(rows["test", 0], rows["valid", 0])


def test_what_windows_know_of_the_order() -> None:
    lines = {each.name: each.value for each in Order().reference_lines()}
    near = sum(abs(a - b) <= 4 for a in range(32) for b in range(32) if a != b) / (32 * 31)
    assert lines == {"bag of tokens": 0.5, "windows of 5": pytest.approx(0.5 + near / 2)}
    with pytest.raises(TaskError, match="order: expected 2 to 4 marks, got 5"):
        Order(marks=5)


def test_packages_share_no_file_between_splits(packages: Packages) -> None:
    names = [name for split in SPLITS for name in packages.files[split]]
    assert len(names) == len(set(names))
    root = Path(sysconfig.get_path("stdlib"))
    batch = packages.batch("test", 0, size=16)
    assert batch.targets.tolist() == [*range(len(PACKAGES))] * 2
    assert packages.oracle(batch) is None
    for target, row in zip(batch.targets, batch.tokens, strict=True):
        own = [name for name in packages.files["test"] if name.startswith(f"{PACKAGES[target]}/")]
        assert any(bytes(row.tolist()) in (root / name).read_bytes() for name in own)
    with pytest.raises(TaskError, match="packages: expected at least 8 files in xml, got 2"):
        _split("xml", [Document("xml/a.py", b"a"), Document("xml/b.py", b"b")])


def test_packages_score_and_refuse(packages: Packages) -> None:
    lines = {each.name: each.value for each in packages.reference_lines(64)}
    assert lines["majority"] == 1 / 8
    assert 0.15 < lines["bag of bytes"] < 0.6
    with pytest.raises(TaskError, match="packages: expected length=256, got 100; build it with length=100"):
        packages.batch("train", 0, size=2, length=100)


@pytest.mark.parametrize("model", experiment.MODELS)
def test_twins_have_as_many_parameters(model: str, packages: Packages) -> None:
    build, _, kinds = experiment.MODELS[model]
    for task in (Order(), packages):
        counts = []
        for kind in kinds:
            size = experiment.size_of(model, task, kind)
            with torch.device("meta"):
                counts.append(experiment.count(build(task, kind, size, 0)))
        wanted = counts[kinds.index(experiment.COMPLEX)]
        assert max(abs(each / wanted - 1) for each in counts) <= 0.02


def test_no_twin_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    build, _, kinds = experiment.MODELS["Transformer"]
    monkeypatch.setitem(experiment.MODELS, "Transformer", (build, 3, kinds))
    with pytest.raises(ValueError, match=r"Transformer: the closest twin of \d+ parameters has \d+"):
        experiment.size_of("Transformer", Order(), kinds[0])


def test_a_trial_and_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    made, sizes, _, _ = experiment.TASKS["order of two"]
    monkeypatch.setattr(experiment, "TASKS", {"order of two": (made, sizes, 3, 64)})
    task = Order()
    lines = [experiment.run("order of two", task, "FastText", experiment.COMPLEX, seed) for seed in (0, 1)]
    again = experiment.run("order of two", task, "FastText", experiment.COMPLEX, 1)
    assert again["accuracy"] == lines[1]["accuracy"]
    assert again["loss"] == lines[1]["loss"]
    assert lines[0]["trial"] == experiment.title("order of two", "FastText", experiment.COMPLEX, 0)
    page = experiment.table(lines, {"order of two": task})
    mean = (lines[0]["accuracy"] + lines[1]["accuracy"]) / 2
    assert f"| FastText | complex, complex_order | {lines[0]['parameters']} | {mean:.3f} |" in page
    assert experiment.COMMAND in page
    assert "bag of tokens: 0.500" in page
