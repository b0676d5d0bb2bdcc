"""What the driver asks for and writes, with answers made up instead of processes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from small import SIZES, text_task, write_text

from anyformer.compare import run as runner
from anyformer.compare.budget import START
from anyformer.compare.process import Limits, Outcome
from anyformer.compare.record import Cost, Quality, Reference, Score, Timing, Trial
from anyformer.compare.run import Listener, Request, compare
from anyformer.compare.speed import Measured
from anyformer.compare.store import Store
from anyformer.compare.worker import Job
from anyformer.errors import IncompatibleError, SpecError

PAIRS = (("softmax", "none"), ("softmax", "learned"), ("linformer", "none"))


def times(seconds: float) -> Timing:
    return Timing(median=seconds, low=seconds, high=seconds, min=seconds, rounds=3)


def answer(job: Job) -> Outcome:
    """What each kind of job hands over when all goes well."""
    match job.kind:
        case "references":
            return Outcome("ok", {"lines": (("rule", 3.0, "by hand"), ("other rule", 2.0, "by hand"))})
        case "memory":
            return Outcome("ok", {n: Cost(length=n, batch=64 // n, memory=n, peak=2 * n) for n in job.plans[0].lengths})
        case "speed":
            costs = {plan.cell: tuple(timed(n) for n in plan.lengths) for plan in job.plans}
            return Outcome("ok", {"measured": Measured(costs, (0.1, 0.2))})
    scores = tuple(Score(length=n, value=2.0) for n in job.plans[0].lengths)
    return Outcome("ok", {"quality": Quality(metric="bits/byte", better="lower", train_length=16, scores=scores)})


def timed(length: int) -> Cost:
    return Cost(length=length, batch=64 // length, forward=times(0.0), forward_backward=times(0.5), step=times(0.5))


@dataclass
class Scene(Listener):
    """A comparison whose jobs are answered by `answer`, or by what a test says first."""

    folder: Path
    task: str
    said: Callable[[Job], Outcome | None] = lambda job: None
    jobs: list[Job] = field(default_factory=list)
    limits: list[Limits] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def run(self, job: Job, limits: Limits, listen: Callable) -> Outcome:
        self.jobs.append(job)
        self.limits.append(limits)
        return self.said(job) or answer(job)

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def compare(self, **changes: object) -> list[Trial]:
        self.jobs.clear(), self.limits.clear(), self.notices.clear()
        request = {"pairs": PAIRS, "tasks": (self.task,), "sizes": SIZES, "lengths": (16, 32), "budget": 60.0} | changes
        return [record for record in compare(Request(**request), self.folder, self) if isinstance(record, Trial)]

    def asked(self) -> list[tuple]:
        return [(job.kind, *(plan.position for plan in job.plans)) for job in self.jobs]


def planned(trials: int, budget: float = 60.0) -> int:
    """Steps of 0.5 s that a budget pays for, less the little that has passed, in whole tens."""
    return int((budget - 0.1 - trials * START) / (0.5 * trials)) // 10 * 10


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    scene = Scene(tmp_path / "out", text_task(write_text(tmp_path / "a.txt")))
    monkeypatch.setattr(runner, "run", scene.run)
    return scene


def test_what_is_asked_for_in_which_order(scene: Scene) -> None:
    trials = scene.compare(seeds=2, budget=120.0, limits=Limits(7.0, 100), threads=3)
    assert scene.asked()[0][0] == "references"
    assert scene.asked()[1:] == [
        ("memory", "none"),
        ("memory", "learned"),
        ("speed", "none", "learned"),
        *(("trial", position) for position in ("none", "learned", "none", "learned")),
    ]
    assert [job.plans[0].seed for job in scene.jobs[4:]] == [0, 0, 1, 1]
    assert {job.threads for job in scene.jobs} == {3}
    assert scene.limits[3] == Limits(14.0, 200), "timing holds all models at once"
    assert scene.limits[4] == Limits(7.0, 100)
    assert {trial.steps for trial in trials} == {planned(4, 120.0)}
    assert [trial.status for trial in trials] == ["refused", "ok", "ok", "ok", "ok"]
    assert [trial.index for trial in trials] == [2, 0, 1, 0, 1]
    assert trials[1].costs[1] == timed(32).model_copy(update={"memory": 32, "peak": 64})
    assert trials[1].tokens_per_second == pytest.approx(128)


def test_encodings_of_rows_and_columns_are_refused_on_a_row_of_tokens(scene: Scene) -> None:
    trials = scene.compare(pairs=(("softmax", "none"), ("softmax", "rope_2d")), steps=5)
    assert [(trial.position, trial.status) for trial in trials] == [("rope_2d", "refused"), ("none", "ok")]
    assert trials[0].reason.startswith("rope_2d reads a row and a column for each token, and here tokens stand")
    with pytest.raises(
        IncompatibleError, match=r"no pair of this grid composes:\n  softmax \+ irpe: irpe reads a row and"
    ):
        scene.compare(pairs=(("softmax", "irpe"),))
    assert scene.asked() == []


def test_encodings_of_rows_and_columns_run_where_a_row_of_tokens_is_an_image(scene: Scene) -> None:
    pairs = (("softmax", "rope_2d"), ("linformer", "swin_bias"))
    trials = scene.compare(pairs=pairs, tasks=("digits",), steps=5)
    assert [(trial.position, trial.status) for trial in trials] == [("swin_bias", "refused"), ("rope_2d", "ok")]
    assert trials[0].reason.startswith("linformer cannot use swin_bias")


def test_a_baseline_is_looked_up_before_the_folder_is_made(scene: Scene) -> None:
    with pytest.raises(SpecError, match="no method is named 'foo'; there are: linformer"):
        scene.compare(baseline="foo")
    assert not scene.folder.exists()
    scene.compare(steps=5)
    assert scene.compare(pairs=PAIRS[1:], steps=5, baseline="softmax + none")


def test_the_rest_is_measured_and_trained_as_the_whole_was_planned(scene: Scene) -> None:
    scene.said = lambda job: 1 / 0 if job.kind == "trial" and job.plans[0].position == "learned" else None
    with pytest.raises(ZeroDivisionError):
        scene.compare()
    scene.said = lambda job: None
    trials = scene.compare()
    assert scene.asked() == [("memory", "learned"), ("speed", "learned"), ("trial", "learned")]
    steps = planned(2)
    assert {trial.steps for trial in trials} == {steps}
    assert any(f"{steps} steps a trial, as " in text for text in scene.notices)
    assert scene.compare() == trials
    assert scene.asked() == []


def test_a_plan_that_cannot_be_read_is_made_anew(scene: Scene) -> None:
    scene.compare(pairs=PAIRS[:1])
    (scene.folder / "plan.json").write_text("{")
    trials = scene.compare(pairs=PAIRS[:2])
    assert {(trial.position, trial.steps) for trial in trials} == {
        ("none", planned(1)),
        ("none", planned(2)),
        ("learned", planned(2)),
    }
    assert any("plan.json could not be read; the steps are planned anew" in text for text in scene.notices)


def test_reference_lines_are_completed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    append = Store.append

    def once(store: Store, record: object) -> None:
        append(store, record)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "append", once)
        with pytest.raises(KeyboardInterrupt):
            scene.compare()
    content = (scene.folder / "results.jsonl").read_text()
    scene.compare()
    assert scene.asked()[0][0] == "references"
    lines = (scene.folder / "results.jsonl").read_text()
    assert lines.startswith(content)
    assert [line.count('"name":"rule"') for line in lines.splitlines()].count(1) == 1
    with Store.open(scene.folder) as store:
        assert [record.name for record in store.records if isinstance(record, Reference)] == ["rule", "other rule"]


def test_reference_lines_that_fail_are_a_line(scene: Scene) -> None:
    scene.said = lambda job: Outcome("timeout", reason="took too long") if job.kind == "references" else None
    assert len(scene.compare()) == 3
    assert "they failed (timeout): took too long" in scene.notices
    scene.said = lambda job: None
    scene.compare()
    assert scene.asked() == []
    scene.compare(retry_failed=True)
    assert [job.kind for job in scene.jobs] == ["references"]


def test_what_fails_alone_is_not_timed_with_the_others(scene: Scene) -> None:
    def said(job: Job) -> Outcome | None:
        if job.kind == "memory" and job.plans[0].position == "learned":
            return Outcome("error", {16: Cost(length=16, memory=1, peak=2)}, "the process was ended by SIGSEGV")
        return None

    scene.said = said
    trials = scene.compare()
    speed = next(job for job in scene.jobs if job.kind == "speed")
    assert [plan.lengths for plan in speed.plans] == [(16, 32), (16,)]
    assert [(cost.status, cost.step is not None) for cost in trials[2].costs] == [("ok", True), ("error", False)]
    scene.folder = scene.folder.with_name("other")
    scene.said = lambda job: Outcome("timeout", reason="too slow") if job.kind == "memory" else None
    trials = scene.compare(steps=5)
    assert "speed" not in {job.kind for job in scene.jobs}
    assert [cost.reason for cost in trials[1].costs] == ["too slow", "not tried, since 16 tokens ended so: too slow"]


def test_times_that_cannot_be_taken_cost_no_memory_and_no_trial(scene: Scene) -> None:
    scene.said = lambda job: Outcome("oom", reason="too many models") if job.kind == "speed" else None
    trials = scene.compare()
    assert "timing failed (oom): too many models; results have no times" in scene.notices
    assert "the budget pays for 0 steps a trial; each trains 20, the fewest" in scene.notices
    assert [(cost.memory, cost.step) for cost in trials[1].costs] == [(16, None), (32, None)]
    assert trials[1].tokens_per_second is None
    assert trials[1].status == "ok"


def test_another_precision_is_another_trial(scene: Scene) -> None:
    scene.compare(steps=5)
    trials = scene.compare(steps=5, precision="bf16-mixed", device="cpu")
    assert [trial.status for trial in trials] == ["refused", "ok", "ok"] * 2
    assert {trial.model for trial in trials} == {str(SIZES), f"{SIZES} precision=bf16-mixed"}
    scene.compare(steps=5, device="cpu" if runner.open_fabric("auto", "32-true").device.type == "cpu" else "auto")
    assert scene.asked() == [], "auto is the device that it comes to"


def test_files_that_a_task_leaves_out_are_told(scene: Scene, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    write_text(folder / "a.txt")
    (folder / "b.bin").write_bytes(b"\0\1")
    scene.task = text_task(folder)
    trials = scene.compare(steps=5)
    assert f"{scene.task} leaves out b.bin: binary" in scene.notices
    assert trials[0].data.note == str(folder)


def test_a_busy_machine_is_told(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 2)
    for load, told in ((2.0, False), (4.6, True)):
        monkeypatch.setattr("psutil.getloadavg", lambda load=load: (load, 0.0, 0.0))
        scene.compare(steps=5)
        text = "the machine is busy (load 4.6 on 2 cores): times will be unsteady, least with --threads 1"
        assert (text in scene.notices) == told
