"""What makes two methods comparable: the same initial weights where their shapes agree, and the same batches in the same order."""

import pytest
import torch
from small import plan_on, text_task, write_text
from torch import Tensor

from anyformer.compare.quality import open_fabric, rate_at, scores, train
from anyformer.compare.trial import Plan, build_task
from anyformer.model.transformer import Transformer
from anyformer.task.base import Batch, Task

METHODS = (("softmax", "none"), ("softmax(pattern=Local(4))", "learned"), ("gru", "none"))


@pytest.fixture(scope="module")
def task_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return text_task(write_text(tmp_path_factory.mktemp("data") / "a.txt"))


def plans(task: str, seed: int = 0) -> list[Plan]:
    return [plan_on(task, attention=a, position=p, seed=seed, steps=4) for a, p in METHODS]


def weights(plan: Plan, task: Task) -> dict[str, Tensor]:
    return dict(Transformer(plan.config(task)).state_dict())


def test_shared_weights_start_alike(task_text: str) -> None:
    task = build_task(task_text)
    first, *others = [weights(plan, task) for plan in plans(task_text)]
    for other in others:
        shared = [name for name in first if name in other and first[name].shape == other[name].shape]
        assert len(shared) >= 5
        assert all(torch.equal(first[name], other[name]) for name in shared)
    again = weights(plans(task_text, seed=1)[0], task)
    assert not all(torch.equal(first[name], again[name]) for name in first)


def batches(plan: Plan) -> list[tuple[str, Batch]]:
    """What a model of this plan reads, from the first training step to the last test item."""
    task, seen = build_task(plan.task), []
    draw = task.batch

    def remember(split: str, index: int, **settings: int) -> Batch:
        seen.append((split, draw(split, index, **settings)))
        return seen[-1][1]

    task.batch = remember
    fabric = open_fabric("cpu", plan.precision)
    model, _ = train(plan, task, Transformer(plan.config(task)), fabric, lambda step, loss: None)
    scores(plan, task, model, fabric.device)
    return seen


def test_batches_come_alike(task_text: str) -> None:
    first, *others = [batches(plan) for plan in plans(task_text)]
    assert [split for split, _ in first] == ["train"] * 4 + ["test"] * 2
    for other in others:
        for (_, ours), (_, theirs) in zip(first, other, strict=True):
            assert torch.equal(ours.tokens, theirs.tokens)
            assert torch.equal(ours.targets, theirs.targets)
    again = batches(plans(task_text, seed=1)[0])
    for (split, ours), (_, theirs) in zip(first, again, strict=True):
        assert torch.equal(ours.tokens, theirs.tokens) == (split == "test"), "another seed, other training data"


def test_the_rate_rises_for_a_tenth_and_falls_to_a_tenth() -> None:
    rates = [rate_at(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates == [*sorted(rates[:10]), *sorted(rates[10:], reverse=True)]
    assert 0.1 < rates[-1] < 0.11
    assert rate_at(0, 1) == 1.0
