"""Kill -9 at any moment: no process stays behind, and the same command finishes the rest and nothing else, as it was planned."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from small import MODEL, text_task, write_text

from anyformer.compare.record import Trial
from anyformer.compare.store import read


def command(folder: Path) -> list[str]:
    given = ["compare", "--attention", "softmax", "local(4)", "--position", "none", "learned", "--task"]
    given += [text_task(folder / "a.txt"), "--model", MODEL, "--items", "2", "--lengths", "16", "--threads", "1"]
    return [sys.executable, "-m", "anyformer", *given, "--budget", "3s", "--out", str(folder / "out")]


def complete_lines(folder: Path) -> list[dict]:
    path = folder / "out" / "results.jsonl"
    content = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in content[: content.rfind("\n") + 1].splitlines()]


def wait_for(what: object, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def kill_when(folder: Path, ready: object) -> list[psutil.Process]:
    """Start the command, kill it when `ready`, and return the processes it had."""
    (folder / "tmp").mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
    driver = subprocess.Popen(command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        wait_for(lambda: driver.poll() is not None or ready())
        children = psutil.Process(driver.pid).children(recursive=True)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    return children


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    write_text(folder / "a.txt")
    return folder


def test_kill_nine_and_go_on(folder: Path) -> None:
    def trials() -> int:
        return sum(line["kind"] == "trial" for line in complete_lines(folder))

    plan = folder / "out" / "plan.json"
    states = []
    for ready in (lambda: complete_lines(folder), plan.is_file, lambda: trials() >= 2):
        children = kill_when(folder, ready)
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive, "a worker outlived its driver"
        states.append(complete_lines(folder))
    assert states[1], "the second kill came after the plan was made"
    planned = plan.read_text()
    done = subprocess.run(command(folder), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert plan.read_text() == planned
    found = complete_lines(folder)
    for earlier in states:
        assert found[: len(earlier)] == earlier, "a finished line is never touched"
    assert len({line["key"] for line in found}) == len(found), "nothing is repeated"
    records = [record for record in read(folder / "out").records if isinstance(record, Trial)]
    assert sorted((trial.attention, trial.position) for trial in records) == [
        (attention, position)
        for attention in ("softmax", "softmax(pattern=Local(4))")
        for position in ("learned", "none")
    ]
    assert {trial.steps for trial in records} == set(json.loads(planned).values())
    assert {trial.status for trial in records} == {"ok"}
    assert [line["key"].split("/")[1] for line in found if line["kind"] == "reference"] == list("012345")
