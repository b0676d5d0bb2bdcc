"""What holds for every task: keyed batches, disjoint splits, oracles, chance, counts that add up."""

import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from anyformer.errors import SpecError, TaskError
from anyformer.registry import bind, find, names
from anyformer.spec import parse
from anyformer.task.base import (
    SPLITS,
    Batch,
    Reference,
    Task,
    accuracy,
    bits_per_target,
    digest_of,
    generator,
    logits_of,
    split_of,
)

torch.set_num_threads(1)

PINNED_DRAW = 0.41120567199998415  # when it changes, every recorded result is of other batches

SPECS = (
    "mqar(vocab=32, length=32, pairs=4)",
    "mqar(vocab=32, length=32, pairs=4, random_non_queries=True)",
    "listops(min_length=20, max_length=60)",
    "text(length=64, score=32)",
    "text(objective=mlm, length=64, score=32, span=3)",
    "digits(fold=1)",
)
DIGEST = """
import sys
sys.path.insert(0, sys.argv[1])
from test_task_contract import SPECS, build, digest
print(" ".join(digest(build(spec, sys.argv[2])) for spec in SPECS))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    for number in range(150):
        words = generator("corpus", number).random(60)
        text = " ".join(f"document{number}word{int(word * 20)}" for word in words)
        (root / f"{number}.txt").write_text(text)
    return str(root)


@pytest.fixture(params=SPECS)
def task(request, folder):
    return build(request.param, folder)


def build(text, folder):
    spec = parse(text)
    method = find("task", spec.name)
    return method.target(**bind(method, spec), **({"data": folder} if spec.name == "text" else {}))


def digest(task):
    total = hashlib.sha256(task.fingerprint.encode())
    for split in SPLITS:
        for index in (3, 0):
            batch = task.batch(split, index, size=3, length=task.eval_lengths[-1], seed=7)
            for each in (batch.tokens, batch.targets, batch.keep):
                total.update(each.numpy().tobytes())
    return total.hexdigest()


def equal(one, other):
    pairs = ((one.tokens, other.tokens), (one.targets, other.targets), (one.keep, other.keep))
    masks = (one.attention_mask, other.attention_mask)
    same_mask = masks == (None, None) or torch.equal(masks[0], masks[1])
    return all(torch.equal(left, right) for left, right in pairs) and same_mask


def random_logits(task, batch, seed=0):
    shape = (*batch.targets.shape, task.outputs)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_every_task_is_found_and_declares_itself(task):
    assert {"text", "listops", "mqar", "digits"} <= set(names("task"))
    method = find("task", task.name)
    assert method.summary
    assert method.paper
    assert method.family
    assert len(method.knobs) <= 8
    assert task.eval_lengths[0] == task.train_length
    assert list(task.eval_lengths) == sorted(set(task.eval_lengths))
    assert task.metric in task.finish({"nats": 1.0, "correct": 1.0, "scored": 2.0})
    assert len(task.fingerprint) == 64


def test_a_batch_has_the_declared_shapes_and_ids(task):
    for split in SPLITS:
        for length in (task.train_length, task.eval_lengths[-1]):
            batch = task.batch(split, 1, size=3, length=length)
            assert batch.tokens.shape == (3, length)
            assert batch.targets.shape == ((3,) if task.head == "classifier" else (3, length))
            assert batch.keep.shape == batch.targets.shape
            assert batch.keep.reshape(3, -1).any(-1).all()
            assert batch.tokens.min() >= 0
            assert batch.tokens.max() < task.vocab
            assert batch.targets.min() >= 0
            assert batch.targets.max() < task.outputs


def test_batches_are_the_same_in_every_process(folder):
    command = [sys.executable, "-c", DIGEST, str(Path(__file__).parent), folder]
    environment = {**os.environ, "PYTHONHASHSEED": "123"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    torch.manual_seed(1)
    assert run.stdout.split() == [digest(build(spec, folder)) for spec in SPECS]


def test_batches_do_not_touch_the_global_generators(task):
    torch.manual_seed(0)
    before, numbers = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    task.batch("train", 0, size=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numbers)  # noqa: NPY002


def test_items_do_not_depend_on_the_batch_size(task):
    for split in SPLITS:
        whole = task.batch(split, 0, size=6, seed=5)
        parts = [task.batch(split, index, size=2, seed=5) for index in range(3)]
        assert torch.equal(whole.tokens, torch.cat([part.tokens for part in parts]))
        assert torch.equal(whole.targets, torch.cat([part.targets for part in parts]))


def test_the_seed_orders_training_and_leaves_the_evaluation_set_alone(task):
    assert not equal(task.batch("train", 0, size=4, seed=0), task.batch("train", 0, size=4, seed=1))
    assert not equal(task.batch("train", 0, size=4), task.batch("train", 1, size=4))
    for split in ("valid", "test"):
        assert equal(task.batch(split, 0, size=4, seed=0), task.batch(split, 0, size=4, seed=1))
        assert not equal(task.batch(split, 0, size=4), task.batch(split, 1, size=4))


def test_the_oracle_scores_everything(task):
    batch = task.batch("test", 0, size=50)
    logits = task.oracle(batch)
    if logits is None:
        assert task.name in ("text", "digits")
        return
    finished = task.finish(task.metrics(logits, batch))
    assert finished["accuracy"] == 1.0
    assert finished["loss"] < 1e-9
    assert task.item_scores(logits, batch).tolist() == [1.0] * 50


def test_an_oracle_that_misses_one_target_is_seen(task):
    batch = task.batch("test", 0, size=4)
    logits = logits_of(batch.targets, task.outputs)
    place = batch.keep.nonzero()[0]
    logits[tuple(place)] = logits[tuple(place)].roll(1)
    assert task.metrics(logits, batch)["correct"] == batch.keep.sum() - 1


def test_a_random_guess_scores_chance(task):
    batch = task.batch("test", 0, size=100)
    if task.metric == "accuracy":
        guess = F.one_hot(torch.randint(task.outputs, batch.targets.shape, generator=torch.Generator().manual_seed(0)))
        totals = task.metrics(F.pad(guess, (0, task.outputs - guess.shape[-1])).float(), batch)
        error = math.sqrt(task.chance * (1 - task.chance) / totals["scored"])
        assert abs(task.score(totals) - task.chance) < 3 * error
    else:
        uniform = torch.zeros(*batch.targets.shape, task.outputs)
        assert task.finish(task.metrics(uniform, batch))[task.metric] == pytest.approx(task.chance, rel=1e-12)


def test_loss_is_the_mean_cross_entropy_of_the_kept_targets(task):
    batch = task.batch("train", 0, size=3)
    logits = random_logits(task, batch).double().requires_grad_()
    logged = logits.log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]
    expected = -(logged * batch.keep).sum() / batch.keep.sum()
    torch.testing.assert_close(task.loss(logits, batch), expected, rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(task.loss(logits, batch), logits)
    assert (gradient[~batch.keep] == 0).all()
    assert (gradient[batch.keep] != 0).all()
    assert task.loss(logits.bfloat16(), batch).dtype == torch.float32


def test_counts_add_up_over_rows_and_batches(task):
    whole = task.batch("test", 0, size=6)
    logits = random_logits(task, whole)
    totals = {"nats": 0.0, "correct": 0.0, "scored": 0.0}
    for index in range(3):
        part = task.batch("test", index, size=2)
        for name, value in task.metrics(logits[2 * index : 2 * index + 2], part).items():
            totals[name] += value
    expected = task.metrics(logits, whole)
    assert totals["correct"] == expected["correct"]
    assert totals["scored"] == expected["scored"] == whole.keep.sum().item()
    assert totals["nats"] == pytest.approx(expected["nats"], rel=1e-14)
    assert task.finish(totals)["loss"] == pytest.approx(task.loss(logits.double(), whole).item(), rel=1e-12)
    rows = task.counts(logits, whole)
    assert {name: value.sum().item() for name, value in rows.items()} == pytest.approx(expected, rel=1e-14)
    for row in range(6):
        alone = Batch(whole.tokens[row : row + 1], whole.targets[row : row + 1], whole.keep[row : row + 1])
        expected_score = task.score(task.metrics(logits[row : row + 1], alone))
        assert task.item_scores(logits, whole)[row].item() == pytest.approx(expected_score, rel=1e-14)


def test_headline_helpers():
    totals = {"nats": math.log(2) * 6, "correct": 1.0, "scored": 4.0}
    assert bits_per_target(totals) == pytest.approx(1.5, rel=1e-15)
    assert accuracy(totals) == 0.25


def test_to_moves_every_tensor(task):
    batch = task.batch("train", 0, size=2)
    moved = batch.to("meta")
    tensors = [moved.tokens, moved.targets, moved.keep] + [moved.attention_mask] * (moved.attention_mask is not None)
    assert all(each.is_meta for each in tensors)
    assert (moved.attention_mask is None) == (batch.attention_mask is None)
    assert equal(batch.to("cpu"), batch)


def test_reference_lines_are_finite_and_named_once(task):
    lines = task.reference_lines(items=20)
    assert all(isinstance(each, Reference) and math.isfinite(each.value) and each.note for each in lines)
    assert len({each.name for each in lines}) == len(lines)


def test_bad_batches_are_refused(task):
    with pytest.raises(TaskError, match=f"{task.name}: expected split 'train', 'valid' or 'test', got 'dev'"):
        task.batch("dev", 0, size=1)
    with pytest.raises(TaskError, match="expected index >= 0 and size >= 1, got index=-1 and size=1"):
        task.batch("test", -1, size=1)
    with pytest.raises(TaskError, match="expected index >= 0 and size >= 1, got index=0 and size=0"):
        task.batch("test", 0, size=0)


def test_logits_of_another_shape_are_refused(task):
    batch = task.batch("test", 0, size=2)
    wrong = torch.zeros(*batch.targets.shape, task.outputs + 1)
    message = (
        rf"{task.name}: expected logits of shape \(2, .*\), got \(2, .*\); build the model with head='{task.head}' and"
    )
    with pytest.raises(TaskError, match=message):
        task.loss(wrong, batch)
    with pytest.raises(TaskError, match=message):
        task.metrics(wrong, batch)


def test_fingerprints_differ_with_every_parameter(folder):
    specs = (
        *SPECS,
        "digits(fold=2)",
        "mqar(vocab=34, length=32, pairs=4)",
        "mqar(vocab=32, length=32, pairs=4, power=0.5)",
    )
    specs += ("listops(min_length=20, max_length=61)", "listops(min_length=20, max_length=60, depth=9)")
    specs += ("text(length=64, score=31)", "text(length=65, score=32)", "text(objective=mlm, length=64, score=32)")
    found = [build(each, folder).fingerprint for each in specs]
    assert len(set(found)) == len(found)
    assert found == [build(each, folder).fingerprint for each in specs]


@pytest.mark.parametrize(
    "spec, fault",
    [
        ("text(objective=both)", "objective="),
        ("text(length=0)", "length=0: expected greater than or equal to 1"),
        ("mqar(pair=3)", "unknown knob 'pair'; did you mean 'pairs'"),
        ("listops(probability=1.0)", "probability=1.0: expected less than 1"),
    ],
)
def test_knobs_are_checked_against_the_constructor(spec, fault):
    parsed = parse(spec)
    with pytest.raises(SpecError, match=fault):
        bind(find("task", parsed.name), parsed)


def test_generators_depend_on_the_whole_key():
    keys = [("a", 1), ("a", 2), ("b", 1), ("a1",), ("a", 1, 1)]
    drawn = [generator(*key).random() for key in keys]
    assert len(set(drawn)) == len(drawn)
    assert generator("a", 1).random() == drawn[0]
    assert generator("anyformer", 0).random() == pytest.approx(PINNED_DRAW, abs=0)


def test_a_sixteenth_goes_to_test_and_to_valid():
    splits = [split_of(str(number).encode()) for number in range(16000)]
    for split in ("test", "valid"):
        assert abs(splits.count(split) - 1000) < 3 * math.sqrt(16000 * 15 / 256)


class Reverse(Task):
    """Write the row backwards: a task in one class."""

    name = "reverse"
    summary = "the row backwards"
    paper = "none"
    family = ("copying",)

    def __init__(self, *, length: int = 8) -> None:
        self.vocab = self.outputs = 16
        self.head, self.causal = "mlm", False
        self.train_length, self.eval_lengths = length, (length, 2 * length)
        self.metric, self.better, self.chance = "accuracy", "higher", 1 / 16
        self.fingerprint = digest_of("reverse 1", length)

    def items(self, split):
        return None if split == "train" else 5

    def draw(self, split, numbers, *, length, seed):
        rows = [generator(self.name, split, seed, length, number).random(length) * 16 for number in numbers]
        tokens = torch.tensor([[int(each) for each in row] for row in rows])
        return Batch(tokens, tokens.flip(-1), torch.ones_like(tokens, dtype=torch.bool))

    def score(self, totals):
        return accuracy(totals)

    def oracle(self, batch):
        return logits_of(batch.tokens.flip(-1), self.outputs)

    def reference_lines(self, items=200):
        return [Reference("any id", 1 / 16, "exact")]


def test_a_task_of_ones_own_needs_one_class():
    task = Reverse()
    batch = task.batch("test", 0, size=3)
    assert task.finish(task.metrics(task.oracle(batch), batch))["accuracy"] == 1.0
    assert len(task.batch("test", 1, size=3).tokens) == 2
    with pytest.raises(
        TaskError, match=r"reverse: the test split holds 5 items, but batch 2 .* starts at item 6; use an index below 2"
    ):
        task.batch("test", 2, size=3)
