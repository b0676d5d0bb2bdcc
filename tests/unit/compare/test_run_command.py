"""The command in one process: what it prints and writes, what it refuses before training, and that it goes on where it stopped."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from small import MODEL, text_task, write_text

from anyformer.cli import main as cli
from anyformer.compare import run as runner
from anyformer.compare.record import Reference, Trial
from anyformer.compare.store import Store, read


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "a.txt")


def compare(out: Path, data: Path, *more: str, attentions: tuple[str, ...] = ("softmax", "linformer")) -> int:
    given = ["compare", "--attention", *attentions, "--position", "none", "learned", "--task", text_task(data)]
    given += ["--model", MODEL, "--items", "4", "--lengths", "8", "32", "--threads", "1", "--out", str(out), *more]
    with pytest.raises(SystemExit) as stop:
        cli.main(given)
    return int(stop.value.code or 0)


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def trials(out: Path) -> list[Trial]:
    return [record for record in read(out).records if isinstance(record, Trial)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, data: Path) -> tuple[Path, int, str]:
    """A grid of two legal and two refused pairs, three seeds, on a budget that pays for the fewest steps."""
    out = tmp_path_factory.mktemp("run") / "out"
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setenv("COLUMNS", "120")
        code = compare(out, data, "--seeds", "3", "--budget", "1s")
    return out, code, printed.getvalue()


def test_every_cell_has_a_line(finished: tuple[Path, int, str]) -> None:
    out, code, _ = finished
    assert code == 0
    found = trials(out)
    assert [(trial.attention, trial.position, trial.seed, trial.status) for trial in found] == [
        ("linformer", "none", 0, "refused"),
        ("linformer", "learned", 0, "refused"),
        *(("softmax", position, seed, "ok") for seed in range(3) for position in ("none", "learned")),
    ]
    assert all("linformer cannot be causal" in trial.reason for trial in found[:2])
    assert {trial.steps for trial in found} == {20}, "refused pairs stand in the table of the others"
    assert {record["kind"] for record in lines(out)} == {"trial", "reference"}
    assert all(line["trial"] and line["status"] for line in lines(out))
    assert len({line["key"] for line in lines(out)}) == len(lines(out))
    assert sorted(path.name for path in out.iterdir()) == [
        ".lock",
        "chart.png",
        "chart.svg",
        "plan.json",
        "report.html",
        "results.jsonl",
    ]


def test_a_line_says_what_was_measured(finished: tuple[Path, int, str]) -> None:
    trial = trials(finished[0])[2]
    assert trial.label == "softmax + none"
    assert (trial.attention_family, trial.position_family) == (("full",), ("none",))
    assert (trial.model, trial.batch, trial.steps) == (MODEL.replace(")", ", rate=0.003)"), 4, 20)
    assert [score.length for score in trial.quality.scores] == [8, 16, 32], "the trained length is always scored"
    assert [cost.status for cost in trial.costs] == ["ok", "ok", "ok"]
    assert all(cost.memory and cost.peak and cost.step and cost.forward for cost in trial.costs)
    home = trial.costs[1]
    assert trial.tokens_per_second == pytest.approx(64 / home.step.median)
    assert len(trial.environment.calibration) >= 6
    assert trial.environment.device == "cpu"
    assert trial.data.fingerprint
    learned = trials(finished[0])[3]
    assert [score.status for score in learned.quality.scores] == ["ok", "ok", "unsupported"]
    assert [cost.status for cost in learned.costs] == ["ok", "ok", "unsupported"]
    assert learned.parameters.position == 16 * 16


def test_seeds_change_the_result_and_pair_the_methods(finished: tuple[Path, int, str]) -> None:
    values = {(trial.position, trial.seed): trial.quality.scores[1].value for trial in trials(finished[0])[2:]}
    assert len(set(values.values())) == 6


def test_the_terminal_shows_it(finished: tuple[Path, int, str]) -> None:
    out, _, printed = finished
    text = " ".join(printed.split())
    assert "the budget pays for 0 steps a trial; each trains 20, the fewest" in text
    assert "6 trials of 20 steps" in text
    for name in ("softmax + none", "softmax + learned", "linformer + none", "unigram", "chance", "refused"):
        assert name in text
    values = [trial.quality.scores[1].value for trial in trials(out)[2:] if trial.position == "none"]
    assert f"{sum(values) / 3:.3f} ±{(max(values) - min(values)) / 2:.3f}" in text
    assert "…" not in printed
    for name in ("report.html", "chart.png", "results.jsonl"):
        assert str(out / name) in printed.replace("\n", "")


def test_the_same_command_again_runs_nothing(
    finished: tuple[Path, int, str], data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    before = (finished[0] / "results.jsonl").read_bytes()
    monkeypatch.setattr(runner, "run", _never)
    for more in ((), ("--retry-failed",)):
        assert compare(finished[0], data, "--seeds", "3", "--budget", "1s", *more) == 0
        assert (finished[0] / "results.jsonl").read_bytes() == before
        assert "6 trials of 20 steps, 6 of them finished before" in capsys.readouterr().out


def _never(*job: object) -> None:
    raise AssertionError(f"nothing may run, but {job} was asked for")


def test_what_is_refused_is_refused_before_anything_runs(
    finished: tuple[Path, int, str],
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(runner, "run", _never)
    out = finished[0]

    def refused(folder: Path, *more: str) -> str:
        assert compare(folder, data, *more) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "cannot write to /proc/anyformer" in refused(Path("/proc/anyformer"))
    assert "is a file. Expected a folder" in refused(data)
    with Store.open(tmp_path / "busy"):
        assert "another process is writing to" in refused(tmp_path / "busy")
    assert "no method is named 'softmax + rope'; there are: linformer + learned, " in refused(
        out, "--baseline", "softmax + rope"
    )
    assert "--device gpux --precision 32-true: " in refused(tmp_path / "a", "--device", "gpux")
    assert "--device cpu --precision 31: " in refused(tmp_path / "a", "--device", "cpu", "--precision", "31")
    assert "--precision 16-mixed is for GPUs" in refused(tmp_path / "a", "--device", "cpu", "--precision", "16-mixed")
    assert "--budget: expected a time above 0" in refused(tmp_path / "a", "--budget", "0")
    assert not (tmp_path / "a").exists()


def test_other_data_under_the_same_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    data = write_text(tmp_path / "mine.txt")
    out = tmp_path / "out"
    assert compare(out, data, "--steps", "2", attentions=("softmax",)) == 0
    write_text(data, seed=1)
    capsys.readouterr()
    assert compare(out, data, "--steps", "2", attentions=("softmax",)) == 2
    assert "on other data" in capsys.readouterr().err
    assert compare(out, data, "--steps", "2", "--force", attentions=("softmax",)) == 0
    assert len({trial.data.fingerprint for trial in trials(out)}) == 2
    assert len(trials(out)) == 4


def test_only_illegal_pairs_leave_their_lines(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture) -> None:
    for _ in range(2):
        assert compare(tmp_path / "out", data, attentions=("linformer",)) == 2
        error = capsys.readouterr().err
        assert "no pair of this grid composes" in error
        assert "linformer + none: linformer cannot be causal" in error
        assert [(trial.status, trial.steps) for trial in trials(tmp_path / "out")] == [("refused", None)] * 2
        assert len(lines(tmp_path / "out")) == 2


def test_failed_trials_are_run_again_only_when_asked(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "out"
    given = ("--steps", "2", "--budget", "1s", "--timeout", "0.01")
    assert compare(out, data, *given, attentions=("softmax",)) == 0
    assert [trial.status for trial in trials(out)] == ["timeout", "timeout"]
    assert {record.status for record in read(out).records if isinstance(record, Reference)} == {"timeout"}
    before = len(lines(out))
    assert compare(out, data, *given[:-2], attentions=("softmax",)) == 0
    assert len(lines(out)) == before
    assert compare(out, data, *given[:-2], "--retry-failed", attentions=("softmax",)) == 0
    assert [trial.status for trial in trials(out)] == ["ok", "ok"]
    assert "unigram" in {record.name for record in read(out).records}
