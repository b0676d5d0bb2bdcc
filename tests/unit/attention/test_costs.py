"""What decides between the ways through softmax attention, and what says which was taken."""

import json
import re
from pathlib import Path

import pytest
import torch

import anyformer as af
from anyformer.attention import _costs
from anyformer.attention._costs import Costs, costs, costs_file, keep, machine
from anyformer.attention._ways import ways
from anyformer.errors import SpecError


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache" / "costs.json"
    monkeypatch.setenv("ANYFORMER_COSTS", str(path))
    costs.cache_clear()
    yield path
    costs.cache_clear()


def test_kept_costs_hold_and_others_machines_stay(file: Path) -> None:
    assert costs() == Costs()
    file.parent.mkdir()
    file.write_text(json.dumps({"another machine": {}}))
    assert costs() == Costs()
    mine = Costs(tile=2.5, biased=100, learned=50)
    assert keep(mine) == file
    assert costs() == mine
    assert set(json.loads(file.read_text())) == {"another machine", machine()}


def test_where_costs_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ANYFORMER_COSTS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert costs_file() == tmp_path / "anyformer" / "costs.json"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "holds no costs (Expecting"),
        ("[]", "holds no costs; delete it or run 'anyformer doctor --measure' again"),
        ("tile", "expected biased, learned, tile as positive numbers, got {'tile': 1}"),
        ("negative", "expected biased, learned, tile as positive numbers, got {'tile': -1.0"),
    ],
)
def test_a_file_of_something_else(file: Path, content: str, message: str) -> None:
    file.parent.mkdir()
    known = {"tile": {"tile": 1}, "negative": {"tile": -1.0, "biased": 1, "learned": 1}}
    file.write_text(json.dumps({machine(): known[content]}) if content in known else content)
    with pytest.raises(SpecError, match=re.escape(message)):
        costs()


def test_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_costs, "_LENGTHS", (16, 32))
    monkeypatch.setattr(_costs, "_ROUNDS", 1)
    found = _costs.measure()
    assert found.tile > 0
    assert {found.biased, found.learned} <= {16, 32, 64}


def test_costs_choose_and_the_way_is_told(file: Path) -> None:
    q, k, v = (torch.randn(1, 2, 40, 4) for _ in range(3))

    def taken(**facts: object) -> list[str]:
        with ways() as seen:
            af.attend(q, k, v, **facts)
        return list(seen)

    assert taken(causal=True, position="alibi") == ["fused"]
    assert taken(causal=True, position="alibi", impl="reference") == ["written out"]
    assert taken(pattern=af.Local(2)) == ["fused"]
    keep(Costs(tile=0.01, biased=10, learned=10))
    assert taken(causal=True, position="alibi") == ["windows"]
    assert taken(pattern=af.Local(2)) == ["windows"]
    q, k, v = (torch.randn(1, 2, 520, 4) for _ in range(3))
    assert taken(pattern=af.Strided(130)) == ["block lists"]


def test_the_way_of_a_layer_with_a_learned_term(file: Path) -> None:
    layer, x = af.MultiHead(8, 2, position="t5", max_length=64), torch.randn(1, 40, 8)
    for learned, way in ((50, "written out"), (10, "windows")):
        keep(Costs(tile=1.5, biased=50, learned=learned))
        with ways() as seen:
            layer(x)
        assert list(seen) == [way]
