"""The extension experiment: its retrieval task, its lines, its table and picture."""

import argparse
from pathlib import Path

import pytest
import torch

import experiments.extension as experiment
from anyformer.errors import TaskError
from anyformer.task.base import SPLITS
from experiments._passkey import Passkey

OPTIONS = argparse.Namespace(steps=2, tune=1, tokens=128, items=2, seeds=1)


@pytest.mark.parametrize("length", [64, 128, 512])
def test_a_row_holds_one_key_and_asks_for_it_at_the_end(length: int) -> None:
    task = Passkey()
    for split in SPLITS:
        batch = task.batch(split, 0, size=32, length=length)
        assert task.finish(task.metrics(task.oracle(batch), batch))["accuracy"] == 1.0
        assert ((batch.tokens < 32).sum(dim=1) == 1).all()
        assert batch.keep.sum(dim=1).unique().tolist() == [16 if split == "train" else 4]
        assert not batch.keep[:, :-32].any()
        assert (batch.tokens[:, length - max(length // 4, 32) :] >= 32).all()
    first, again = (task.batch("test", 1, size=4, length=length).tokens for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, task.batch("valid", 1, size=4, length=length).tokens)


def test_rows_too_short_for_the_questions_are_refused() -> None:
    with pytest.raises(TaskError, match="expected a length of at least 64, got 63"):
        Passkey().batch("test", 0, size=1, length=63)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "TRAINED", 64)
    monkeypatch.setattr(experiment, "TIMES", (1, 2))
    monkeypatch.setattr(experiment, "TO", 128)
    monkeypatch.setattr(experiment, "_SEARCHED", 2)
    monkeypatch.setattr(experiment, "tasks", lambda: [Passkey(length=64)])


@pytest.mark.usefixtures("small")
def test_every_method_has_a_line_before_and_after_and_none_is_made_twice(tmp_path: Path) -> None:
    lines = list(experiment.rows(OPTIONS, []))
    methods = [(position, method) for position, names in experiment.METHODS.items() for method in names]
    wanted = {(0, "passkey", *each, tuned) for each in methods for tuned in experiment.tunings(each[1], OPTIONS)}
    assert len(lines) == len(wanted)
    assert {experiment.name_of(line) for line in lines} == wanted
    assert all(set(line["scores"]) == {"64", "128"} for line in lines)
    (spec,) = {line["spec"] for line in lines if line["method"] == "longrope"}
    assert spec.startswith("rope(scaling=longrope(original=64, short=[1.0")
    assert list(experiment.rows(OPTIONS, lines)) == []
    (again,) = experiment.rows(OPTIONS, [line for line in lines if experiment.name_of(line)[3:] != ("stretch", 1)])
    assert {**again, "seconds": 0} == {
        **next(line for line in lines if experiment.name_of(line)[3:] == ("stretch", 1)),
        "seconds": 0,
    }
    shown = experiment.table(lines)
    assert "| encoding | method | steps at 128 | 64 | 128 |" in shown
    assert all(f"| {position} | {method} | 0 |" in shown for position, method in methods)
    experiment.draw(lines, tmp_path / "extension.png")
    assert (tmp_path / "extension.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("small")
def test_a_short_training_changes_the_extended_model_and_leaves_the_first_alone() -> None:
    task = Passkey(length=64)
    base = experiment.trained(task, "learned", 0, OPTIONS)
    kept = {name: each.clone() for name, each in base.state_dict().items()}
    longer = experiment.af.extend(base, to=128, method="random_rows")
    before = longer.state_dict()["head.out.weight"].clone()
    experiment.tune(longer, task, 0, OPTIONS)
    assert not longer.training
    assert not torch.equal(before, longer.state_dict()["head.out.weight"])
    assert all(torch.equal(kept[name], each) for name, each in base.state_dict().items())
