"""Methods that fail in every way there is: each failure is a line with its status, and the others are compared all the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small import MODEL, text_task, write_text

from anyformer.compare.record import Trial
from anyformer.compare.store import read

SCRIPT = Path(__file__).with_name("faulty_attentions.py")
FAULTS = ("crash", "killed", "leaves", "raises", "not_finite", "greedy", "sly", "short_sighted")


def compare(folder: Path, *attentions: str) -> subprocess.CompletedProcess:
    """The script's own comparison, with a folder of its own for temporary files."""
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    task = text_task(write_text(folder / "a.txt"))
    command = [sys.executable, str(SCRIPT), "compare", "--attention", *attentions, "--position", "none", "--task", task]
    command += ["--model", MODEL, "--steps", "2", "--items", "2", "--lengths", "32", "--threads", "1"]
    command += ["--budget", "1s", "--memory", "0.5", "--out", str(folder / "out")]
    environment = {**os.environ, "TMPDIR": str(temporary), "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess, dict[str, Trial]]:
    folder = tmp_path_factory.mktemp("faults")
    done = compare(folder, "softmax", *FAULTS)
    trials = [record for record in read(folder / "out").records if isinstance(record, Trial)]
    assert list((folder / "tmp").iterdir()) == []
    assert len(trials) == 1 + len(FAULTS)
    return done, {trial.attention: trial for trial in trials}


def test_a_grid_with_failures_is_finished(run: tuple) -> None:
    done, trials = run
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert {name: trial.status for name, trial in trials.items()} == {
        "softmax": "ok",
        "crash": "error",
        "killed": "error",
        "leaves": "error",
        "raises": "error",
        "not_finite": "diverged",
        "greedy": "oom",
        "sly": "oom",
        "short_sighted": "ok",
    }
    for name, trial in trials.items():
        assert f"{name} + none" in done.stdout
        assert trial.parameters is not None, "what a trial had handed over before it failed is kept"
        assert trial.environment is not None


@pytest.mark.parametrize(
    ("name", "reason", "details"),
    [
        ("crash", "the process was ended by SIGSEGV", "Extension modules"),
        ("killed", "the process was ended by SIGKILL, as the system does when memory runs out", ""),
        ("leaves", "the process ended with code 7 and no result", "I am going"),
        ("raises", "KeyError: 'a fault of the method\\nwith a second line'", "in raises"),
        ("not_finite", "the training loss is nan at step 1 of 2", ""),
        ("greedy", "can't allocate memory: you tried to allocate 2147483648 bytes", "in greedy"),
        ("sly", "took more than the 0.5 GiB it may take", ""),
    ],
)
def test_the_reason_and_the_last_lines(run: tuple, name: str, reason: str, details: str) -> None:
    trial = run[1][name]
    assert reason in trial.reason
    assert details in trial.details
    assert details or not trial.details
    # the memory was measured first and alone, and failed alike
    if name != "not_finite":
        assert [(cost.length, cost.status) for cost in trial.costs] == [(16, trial.status), (32, trial.status)]
        assert reason in trial.costs[0].reason


def test_what_fails_at_a_length_is_good_at_the_others(run: tuple) -> None:
    trial = run[1]["short_sighted"]
    assert [(score.length, score.status) for score in trial.quality.scores] == [(16, "ok"), (32, "error")]
    assert trial.quality.scores[1].reason == "IndexError: cannot read 32 tokens"
    assert [(cost.length, cost.status) for cost in trial.costs] == [(16, "ok"), (32, "error")]


def test_failures_cost_the_others_no_times(run: tuple) -> None:
    trial = run[1]["softmax"]
    assert all(cost.step is not None and cost.memory is not None for cost in trial.costs)
    assert trial.tokens_per_second > 0


@pytest.mark.parametrize("name", ["short", "n" * 100], ids=["forkserver", "spawn"])
def test_an_interrupt_ends_driver_and_worker_and_leaves_what_was_finished(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    """Also where the folder for temporary files has too long a name for a fork server."""
    tmp_path = tmp_path_factory.mktemp(name)
    done = compare(tmp_path, "softmax", "interrupts")
    assert done.returncode == 130
    assert "stopped; finished trials are kept" in " ".join(done.stdout.split())
    assert done.stderr == ""
    assert list((tmp_path / "tmp").iterdir()) == []
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".lock", "results.jsonl"]
    lines = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in lines} == {"reference"}
