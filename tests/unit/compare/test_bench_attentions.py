"""The table of all attentions: which goals hold, from benchmarks made up by hand."""

import math

import pytest
from benches import SMALL, cell, own

from anyformer.compare.bench import setting_of
from anyformer.compare.bench_record import DENSE, Bench, Cell, Contender, Run
from anyformer.compare.bench_summary import summarise
from anyformer.compare.record import Environment
from bench.attentions import Method, costs, crossover, goals, methods

LENGTHS = (1024, 4096)


_DENSE = (1.0, 16.0)


def _cell(contender: Contender, length: int, seconds: float, dense: float) -> Cell:
    if math.isinf(seconds):
        return Cell(contender=contender, name=contender.name, length=length, status="oom", reason="too much")
    return cell(contender, length, seconds, dense / seconds)


def made(name: str, seconds: tuple[float, float], peer: str = "", theirs: tuple[float, float] = (1.0, 1.0)) -> Method:
    """The method of a benchmark in which dense attention takes 1 and 16 seconds."""
    contender = own(name)
    others = [Contender(role="peer", attention=peer)] if peer else []
    timed = {DENSE: _DENSE, contender: seconds} | dict.fromkeys(others, theirs)
    cells = [
        _cell(each, length, took, dense)
        for each, times in timed.items()
        for length, took, dense in zip(LENGTHS, times, _DENSE, strict=True)
    ]
    summaries = tuple(summarise(each, [one for one in cells if one.contender == each]) for each in timed)
    run = Run(
        setting=setting_of(SMALL), lengths=LENGTHS, seconds=1.0, environment=Environment(fingerprint="x", cores=2)
    )
    (found,) = methods(Bench(run=run, cells=tuple(cells), summaries=summaries))
    return found


@pytest.mark.parametrize(
    ("seconds", "theirs", "dense", "peers"),
    [
        ((2.0, 8.0), (2.0, 9.0), True, True),  # at 1024 it need not beat dense attention
        ((2.0, 8.0), (1.6, 9.0), True, False),
        ((0.5, 17.0), (2.0, 17.0), False, True),
    ],
)
def test_goals(seconds: tuple[float, float], theirs: tuple[float, float], dense: bool, peers: bool) -> None:
    found = made("performer(features=8)", seconds)
    assert found.beats_dense() is dense
    assert found.beats_peers() is None  # this one has knobs that no peer was timed with
    found = made("performer", seconds, "lucidrains-performer", theirs)
    assert found.beats_peers() is peers
    assert found.linear
    assert found.memory_grows_linearly() is True
    assert f"| {'yes' if peers else '**no**'} | {'yes' if dense else '**no**'} | yes |" in list(goals([found]))[-1]
    assert "lucidrains-performer" in list(costs([found]))[-1]


def test_a_peer_that_is_faster_within_the_scatter_of_rounds_ties() -> None:
    found = made("performer", (2.0, 8.0), "lucidrains-performer", (1.9, 9.0))  # each a tenth to both sides
    assert found.beats_peers() is True
    assert found.ties()
    assert "| tied | yes | yes |" in list(goals([found]))[-1]


def test_where_a_peer_has_no_time_there_is_no_goal() -> None:
    found = made("topk", (2.0, 8.0), "lucidrains-topk", (math.inf, math.inf))
    assert found.beats_peers() is None
    assert found.memory_grows_linearly() is None  # its cost is quadratic


@pytest.mark.parametrize(
    ("name", "expected"), [("linear", 64), ("performer", 512), ("topk", math.inf), ("entmax", math.inf)]
)
def test_a_crossover_is_where_the_formulas_meet(name: str, expected: float) -> None:
    setting = setting_of({"heads": 2, "head_dim": 64})
    assert crossover(own(name), setting) == pytest.approx(expected, rel=0.05)
