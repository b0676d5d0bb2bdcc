"""The digits experiment: a run of one epoch, that it goes on where it was, and its table."""

import json
from pathlib import Path

import pytest

import experiments.digits as experiment

SHORT = {"nothing": ("none",), "row and column": ("rope_2d", "peg(grid=True)")}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "POSITIONS", SHORT)
    monkeypatch.setattr(experiment, "FOLDS", 1)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("short")
def test_a_stopped_run_goes_on_and_its_table_is_made_of_its_lines(tmp_path: Path) -> None:
    experiment.main(["--epochs", "1", "--out", str(tmp_path)])
    first = lines(tmp_path)
    assert [line.get("position") for line in first] == [None, None, None, "none", "rope_2d", "peg(grid=True)"]
    assert all(0 <= line["test"] <= 1 for line in first)
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    experiment.main(["--epochs", "1", "--out", str(tmp_path)])
    again = lines(tmp_path)
    assert [{**line, "seconds": 0} for line in again] == [{**line, "seconds": 0} for line in first]
    table = (tmp_path / "table.md").read_text()
    assert table.count("| 1 |") == 6
    told = {line["position"]: line["test"] for line in again if "position" in line}
    assert f"| none | nothing | {100 * told['none']:.1f} ± 0.0 |" in table


def test_the_kept_table_is_made_of_the_kept_lines() -> None:
    kept = lines(experiment.FOLDER)
    assert (experiment.FOLDER / "table.md").read_text() == experiment.table(kept)
    assert len(kept) == 5 * (3 + sum(len(names) for names in experiment.POSITIONS.values()))
