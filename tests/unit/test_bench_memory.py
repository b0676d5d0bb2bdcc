"""The benchmark of the largest tensor: what it sees, what it calls broken, what it does not run, and its table."""

import json
from pathlib import Path

import pytest
import torch

import anyformer as af
import bench.memory as bench

N = 1024


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "N", N)
    monkeypatch.setattr(bench.resource, "setrlimit", lambda *_: None)  # it would hold for the tests after this one
    bench.numbers.cache_clear()


def test_it_sees_what_our_operators_make_inside() -> None:
    q, k, v = (torch.randn(1, 1, 512, 8, requires_grad=True) for _ in range(3))
    with bench.Largest() as largest:
        af.attend(q, k, v, pattern=af.Local(32)).sum().backward()
    assert largest.most > 3 * q.numel()  # windows of weights, which are in no result
    assert largest.maker.startswith("aten.")


@pytest.mark.parametrize(
    ("attention", "position", "causal", "status"),
    [("linear", "rope", True, "ok"), ("Local(64)", "swin_bias", False, "ok"), ("softmax", "fire", True, "broken")],
)
def test_a_tensor_of_all_pairs_is_broken(attention: str, position: str, causal: bool, status: str) -> None:
    found = bench.measure(attention, position, causal)
    assert found["status"] == status
    assert (found["largest"] >= N * N) == (status == "broken")


def test_what_is_not_run() -> None:
    assert bench.reason_not_to_run("topk", "none", False) == "all pairs by its equation"
    assert bench.reason_not_to_run("linear", "rnn", True) == "added to tokens, not to pairs"
    assert bench.reason_not_to_run("linear", "floater", True) == "added to tokens, not to pairs"
    assert bench.reason_not_to_run(bench.CARRIER, "rnn", True) == ""
    assert bench.reason_not_to_run("linear", "alibi", True) == ""


def test_a_case_has_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: object) -> dict:
        while True:
            pass

    monkeypatch.setattr(bench, "measure", endless)
    late = bench.line("linear", "rope", True, 0.05)  # seconds
    assert (late["status"], late["reason"]) == ("late", "took longer than 0.05 s")


def test_lines_are_written_and_a_table_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [("linear", "rope", True), ("topk", "none", False), ("linear", "alibi", True)]
    monkeypatch.setattr(bench, "cases", lambda: iter(wanted))
    measure = bench.measure
    whole = {"status": "broken", "largest": 32 * N * N, "maker": "aten.addmm", "peak": 1, "seconds": 1.0}
    monkeypatch.setattr(bench, "measure", lambda *case: whole if case[1] == "alibi" else measure(*case))
    assert bench.main(["--only", "linear x rope", "--out", str(tmp_path)]) == 0
    assert bench.main(["--out", str(tmp_path)]) == 1
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [line["status"] for line in lines] == ["ok", "not run", "broken"]
    table = (tmp_path / "table.md").read_text()
    assert "2 cases ran, 1 failed" in table
    assert "* linear x alibi, causal: 32.00 n^2 numbers in aten.addmm" in table
    assert "All pairs by their own equation, and so not run: `topk`." in table
