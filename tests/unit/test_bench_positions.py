"""The benchmark of encodings: its lines, that it goes on where it was, cells that are not tried, its table and chart."""

import json
from pathlib import Path

import pytest

import bench.positions as bench


def run(folder: Path, *more: str) -> list[dict]:
    asked = ["rnn", "rope_2d"]
    bench.main(["--positions", *asked, "--lengths", "64", "256", "--out", str(folder), *more])
    return [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def _without_a_limit_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.resource, "setrlimit", lambda *_: None)  # it would hold for the tests after this one
    monkeypatch.setattr(bench, "LENGTHS", (64, 256))


def test_a_line_a_cell_and_a_table_of_them(tmp_path: Path) -> None:
    first = run(tmp_path)
    assert [(line["position"], line["length"]) for line in first] == [
        (name, length) for name in ("rnn", "rope_2d") for length in (64, 256)
    ]
    assert all(line["status"] == "ok" and min(line["forward"]) > 0 for line in first)
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    assert run(tmp_path)[:-1] == first[:-1]
    table = (tmp_path / "table.md").read_text()
    assert all(f"| {name} | " in table for name in ("rnn", "rope_2d"))
    assert (tmp_path / "positions.png").stat().st_size > 5000


def test_a_cell_that_takes_too_long_is_not_tried(tmp_path: Path) -> None:
    lines = run(tmp_path, "--limit", "0")
    assert [line["status"] for line in lines] == ["ok", "not tried"] * 2
    assert lines[1]["reason"].endswith(" s, from those at 64 tokens")
    assert f"* rnn at 256: not tried. {lines[1]['reason']}" in (tmp_path / "table.md").read_text()


def test_an_encoding_costs_what_it_adds() -> None:
    line = {"forward": [0.5, 0.2], "forward_backward": [0.1, 0.2]}
    assert bench.own(line, "forward") == pytest.approx(0.3)
    assert bench.own(line, "forward_backward") == pytest.approx(0.0002)
