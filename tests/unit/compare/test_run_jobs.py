"""One job in a process of its own: how it ends is a status with a reason, whatever happens to it."""

import math
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
from small import SIZES, plan_on, text_task, write_text

from anyformer.compare.process import Limits, Outcome, run
from anyformer.compare.record import Environment, Parameters
from anyformer.compare.trial import Plan
from anyformer.compare.worker import Job


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> str:
    return text_task(write_text(tmp_path_factory.mktemp("data") / "a.txt"))


def ask(kind: str, *plans: Plan, limits: Limits | None = None, heard: list | None = None, **settings: float) -> Outcome:
    limits = limits or Limits()
    return run(Job(kind, plans, threads=1, **settings), limits, ([] if heard is None else heard).append)


def test_a_trial_trains_scores_and_tells_how_far_it_is(task: str) -> None:
    heard = []
    outcome = ask("trial", plan_on(task, steps=3), heard=heard)
    assert (outcome.status, outcome.reason, outcome.details) == ("ok", "", "")
    assert [(name, step) for name, step, _ in heard] == [("progress", 1), ("progress", 2), ("progress", 3)]
    curve = outcome.values["curve"]
    assert [round(loss, 5) for _, _, loss in heard] == [loss for _, loss in curve]
    quality = outcome.values["quality"]
    assert (quality.metric, quality.train_length, quality.chance) == ("bits/byte", 16, 8.0)
    assert [(score.length, score.status, len(score.items)) for score in quality.scores] == [
        (16, "ok", 4),
        (32, "ok", 4),
    ]
    assert all(math.isclose(sum(score.items) / 4, score.value) for score in quality.scores)
    assert isinstance(outcome.values["parameters"], Parameters)
    assert isinstance(outcome.values["environment"], Environment)
    assert outcome.values["environment"].threads == 1
    again = ask("trial", plan_on(task, steps=3))
    assert again.values["quality"] == quality, "the same plan in another process gives the same numbers"


def test_what_a_length_cannot_do_is_the_result_of_that_length(task: str) -> None:
    plan = plan_on(task, position="learned", lengths=(4, 16, 32))
    found = {score.length: score for score in ask("trial", plan).values["quality"].scores}
    assert {length: score.status for length, score in found.items()} == {4: "unsupported", 16: "ok", 32: "unsupported"}
    assert "expected a length of 8 to" in found[4].reason
    assert "learned" in found[32].reason
    costs = ask("memory", plan).values
    assert {length: cost.status for length, cost in costs.items()} == {4: "ok", 16: "ok", 32: "unsupported"}
    assert "learned" in costs[32].reason
    assert [costs[length].batch for length in (4, 16, 32)] == [16, 4, 2], "the tokens of a step stay the same"
    weights = ask("trial", plan).values["parameters"].total * 4
    assert all(cost.peak - cost.memory >= 3 * weights for cost in costs.values() if cost.status == "ok")


def test_times_are_taken_of_all_that_run_and_the_others_say_why_not(task: str) -> None:
    plans = [plan_on(task), plan_on(task, position="learned"), plan_on(task, position="rope", lengths=(16,))]
    heard = []
    measured = ask("speed", *plans, heard=heard, seconds=0.0).values["measured"]
    assert [text.partition(" at ")[2] for _, text in heard] == ["16 tokens", "32 tokens"]
    softmax, learned, short = (measured.costs[plan.cell] for plan in plans)
    assert [cost.status for cost in softmax] == ["ok", "ok"]
    assert [cost.status for cost in learned] == ["ok", "unsupported"]
    assert [(cost.length, cost.status) for cost in short] == [(16, "ok")]
    for cost in (*softmax, learned[0], *short):
        for timing in (cost.forward, cost.forward_backward, cost.step):
            assert timing.rounds == 2, "no time to spare: the fewest rounds"
            assert 0 < timing.min <= timing.low <= timing.median <= timing.high
    assert len(measured.calibration) == 4


def test_an_encoding_on_a_grid_gets_the_rows_and_columns_of_an_image() -> None:
    plans = [plan_on("digits", position=each, lengths=(64,)) for each in ("sinusoidal_2d", "sinusoidal", "vit_learned")]
    for plan in plans:
        outcome = ask("trial", plan)
        assert (outcome.status, outcome.reason) == ("ok", "")
        assert [score.status for score in outcome.values["quality"].scores] == ["ok"]


def test_a_time_limit(task: str) -> None:
    outcome = ask("trial", plan_on(task, steps=3000), limits=Limits(seconds=0.25))
    assert (outcome.status, outcome.reason) == ("timeout", "took longer than the 0.25 s it may take")
    assert 0.25 <= outcome.seconds < 60


def test_a_memory_limit(task: str) -> None:
    huge = replace(SIZES, dim=2**14)
    outcome = ask("trial", plan_on(task, sizes=huge), limits=Limits(memory=2**28))
    assert outcome.status == "oom"
    assert "can't allocate memory: you tried to allocate" in outcome.reason
    assert "RuntimeError" in outcome.details


def test_a_loss_that_is_no_number(task: str) -> None:
    outcome = ask("trial", plan_on(task, sizes=replace(SIZES, rate=1e30), steps=6))
    assert outcome.status == "diverged"
    assert "the training loss is" in outcome.reason
    assert "parameters" in outcome.values


def test_weights_that_the_last_step_broke(task: str) -> None:
    outcome = ask("trial", plan_on(task, sizes=replace(SIZES, rate=1e18), steps=1))
    assert (outcome.status, outcome.reason) == ("diverged", "bits/byte is nan at 16 tokens")
    assert len(outcome.values["curve"]) == 1


def test_data_that_went_or_changed(tmp_path: Path) -> None:
    path = write_text(tmp_path / "mine.txt")
    plan = plan_on(text_task(path))
    write_text(path, seed=1)
    outcome = ask("trial", plan)
    assert (outcome.status, outcome.reason) == (
        "error",
        f"RuntimeError: the data of {plan.task} changed while the comparison ran",
    )
    path.unlink()
    outcome = ask("trial", plan)
    assert outcome.status == "error"
    assert "were there when the comparison began: text: expected a file or folder" in outcome.reason


def test_no_process_and_no_file_is_left(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def interrupt(message: tuple) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Job("trial", (plan_on(task, steps=1000),), threads=1), Limits(), interrupt)
    assert multiprocessing.active_children() == []
    assert list(tmp_path.iterdir()) == []
