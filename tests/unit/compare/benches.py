"""Benchmarks made up by hand."""

import io

from rich.console import Console

from anyformer.compare.bench import setting_of
from anyformer.compare.bench_record import DENSE, Bench, Cell, Contender, Cost, Noise, Ratio, Run
from anyformer.compare.bench_summary import summarise
from anyformer.compare.bench_table import tables
from anyformer.compare.record import Environment, Timing

SMALL = {"heads": 2, "head_dim": 8, "threads": 1}


def own(attention: str, position: str = "none") -> Contender:
    return Contender(role="own", attention=attention, position=position)


def timing(seconds: float) -> Timing:
    return Timing(median=seconds, low=seconds * 0.9, high=seconds * 1.1, min=seconds * 0.8, rounds=3)


def cell(contender: Contender, length: int, seconds: float, ratio: float | None, dense_from: int | None = None) -> Cell:
    found = None if ratio is None else Ratio(median=ratio, low=ratio, high=ratio)
    cost = Cost(time=timing(seconds), memory=1024 * length, rate=1e9, ratio=found)
    return Cell(
        contender=contender,
        name=contender.name,
        length=length,
        forward=cost,
        forward_backward=cost,
        dense_from=dense_from,
    )


def made_up() -> Bench:
    """Dense attention that grows with the square and is not timed at the longest, a window and a refused pair."""
    window, refused = own("local(16)"), own("fnet")
    cells, lengths = [], (1024, 2048, 4096)
    for n in lengths:
        known = 2048 if n == 4096 else None
        cells.append(cell(DENSE, n, (n / 1024) ** 2 * 1e-2, None, known))
        cells.append(cell(window, n, n / 1024 * 2e-2, n / 2048, known))
        cells.append(Cell(contender=refused, name="fnet + none", length=n, status="refused", reason="it is a mixer"))
    run = Run(
        setting=setting_of(SMALL), lengths=lengths, seconds=1.0, environment=Environment(fingerprint="x", cores=2)
    )
    summaries = [summarise(each, [one for one in cells if one.contender == each]) for each in (DENSE, window, refused)]
    noise = Noise(load=(0.5, 0.7), calibration=(1e-3, 2e-3, 1e-3))
    return Bench(run=run, cells=tuple(cells), summaries=tuple(summaries), noise=noise)


def printed(found: Bench, width: int = 144) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(tables(found, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
