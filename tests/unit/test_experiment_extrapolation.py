"""The extrapolation experiment: a run of two steps, that it goes on where it was, its table and its picture."""

import json
from pathlib import Path

import pytest

import experiments.extrapolation as experiment
from anyformer.registry import names
from experiments._encodings import PANELS, panel_of

ASKED = ("none", "alibi", "learned", "randomized", "rope_2d")


def run(folder: Path) -> list[dict]:
    experiment.main(["--steps", "2", "--items", "1", "--seeds", "2", "--positions", *ASKED, "--out", str(folder)])
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_a_stopped_run_goes_on_and_its_table_is_made_of_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "LENGTHS", (256, 512))
    first = run(tmp_path)
    assert [(line["position"], line.get("seed")) for line in first] == [
        ("rope_2d", None),
        *((name, seed) for seed in (0, 1) for name in ASKED[:-1]),
    ]
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    again = run(tmp_path)
    assert [{**line, "seconds": 0} for line in again] == [{**line, "seconds": 0} for line in first]
    found = {(line["position"], line["seed"]): line["scores"] for line in again if line["status"] == "ok"}
    assert set(found["alibi", 0]) == set(found["randomized", 1]) == {"256", "512"}
    assert set(found["learned", 0]) == {"256"}
    assert found["none", 0] != found["none", 1]
    table = (tmp_path / "table.md").read_text()
    mean = (found["alibi", 0]["512"] + found["alibi", 1]["512"]) / 2
    assert f"| {mean:.3f} |" in table
    assert "* rope_2d: refused. rope_2d reads a row and a column" in table
    assert "* learned: no score from 512 on. unsupported: learned: position 511 needs a table" in table
    assert (tmp_path / "extrapolation.png").stat().st_size > 5000


def test_every_encoding_is_compared_and_drawn() -> None:
    assert set(experiment.encodings()) >= set(names("position"))
    assert {panel_of(name) for name in experiment.encodings() if name != "none"} == set(PANELS)
