"""A benchmark on the terminal: costs by length, growth and break-even by method, and what a reader must know."""

import statistics

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from anyformer.compare.bench_record import DENSE, Bench, Cell, Cost, Summary
from anyformer.compare.caveats import STEADY
from anyformer.compare.text import DASH, TIMES, duration, listing, number, plain, shorten, size

WIDE, NARROW = 144, 100
_UNITS = {"µs": 1e6, "ms": 1e3, "s": 1.0, "min": 1 / 60}


def tables(bench: Bench, width: int = WIDE) -> RenderableType:
    """The tables, then the notes. Texts are not read as rich markup.

    Args:
        width: columns of the terminal; in less than `WIDE` minimum and quartiles are left out, in less than `NARROW` the rates too.
    """
    parts: list[RenderableType] = [_costs(bench, width)]
    if bench.summaries:
        parts += [Text(), _growth(bench, width)]
    parts += [Text(f"! {sentence}", style="yellow") for sentence in notes(bench)]
    return Group(*parts)


def notes(bench: Bench) -> tuple[str, ...]:
    """What a reader must know before believing a number, from the lines themselves."""
    return tuple(
        sentence for sentence in (*_faults(bench), _extrapolated(bench), _short(bench), *_noise(bench)) if sentence
    )


def _table(title: str, width: int, *columns: str) -> Table:
    table = Table(
        title=Text(title, style="bold"),
        title_justify="left",
        pad_edge=False,
        box=None,
        padding=(0, 2 if width >= NARROW else 1, 0, 0),
    )
    table.add_column("method", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _costs(bench: Bench, width: int) -> Table:
    ratio = f"speed\n{TIMES} dense"
    spread = "median (min, quartiles)" if width >= WIDE else "median"
    both = "forward + backward" if width >= WIDE else "forward\n+ backward"
    columns = [f"forward\n{spread}", ratio, f"{both}\n{spread}", ratio, "memory\nf + b"]
    if width >= NARROW:
        columns.append("GFLOP/s\nf, f + b")
    table = _table(str(bench.run.setting), width, *columns)
    hidden = _never_tried(bench)
    for length in bench.run.lengths:
        table.add_row(Text(f"{length} tokens", style="bold cyan"))
        for cell in bench.cells:
            if cell.length == length and cell.contender not in hidden:
                table.add_row(_name(cell, width, indent="  "), *_row(cell, width >= WIDE)[: len(columns)])
    return table


def _name(line: Cell | Summary, width: int, indent: str = "") -> Text:
    short = shorten(plain(line.name), 32 if width >= NARROW else 24)
    return Text(indent + short, style="bold" if line.contender == DENSE else "")


def _row(cell: Cell, detail: bool) -> list[Text]:
    dense, marked = cell.contender == DENSE, cell.dense_from is not None
    forward, both = cell.forward, cell.forward_backward
    if forward is None or both is None:
        return [Text(cell.status, style="dim" if cell.status == "refused" else "red")]
    rates = [number(cost.rate / 1e9, 3) for cost in (forward, both) if cost.rate]
    return [
        Text(_time(forward, detail, marked and dense)),
        Text(_ratio(forward, marked)),
        Text(_time(both, detail, marked and dense)),
        Text(_ratio(both, marked)),
        Text(size(both.memory)),
        Text(", ".join(rates) or DASH),
    ]


def _time(cost: Cost, detail: bool, marked: bool) -> str:
    time = cost.time
    median, unit = duration(time.median).split()
    mark = "≈" if marked else ""
    if not detail:
        return f"{mark}{median} {unit}"
    least, low, high = (number(each * _UNITS[unit], 3) for each in (time.min, time.low, time.high))
    return f"{mark}{median} {unit} ({least}, {low}{DASH}{high})"


def _ratio(cost: Cost, marked: bool) -> str:
    return DASH if cost.ratio is None else f"{'≈' if marked else ''}{number(cost.ratio.median, 3)}{TIMES}"


def _growth(bench: Bench, width: int) -> Table:
    table = _table(
        "growth (exponent of the length) and break-even with dense attention (tokens)",
        width,
        "time\nforward",
        "break-even\nforward",
        "time\nf + b",
        "break-even\nf + b",
        "memory\nf + b",
    )
    hidden = _never_tried(bench)
    for summary in bench.summaries:
        if summary.contender not in hidden:
            table.add_row(_name(summary, width), *_trends(summary))
    return table


def _trends(summary: Summary) -> list[Text]:
    forward, both = summary.forward, summary.forward_backward
    even = [DASH if each.break_even.verdict == "unknown" else str(each.break_even) for each in (forward, both)]
    cells = [forward.time, even[0], both.time, even[1], both.memory]
    return [Text(DASH if each is None else str(each)) for each in cells]


def _never_tried(bench: Bench) -> set:
    return {each for each in bench.contenders if all(cell.status == "refused" for cell in bench.of(each))}


def _faults(bench: Bench) -> list[str]:
    found: dict[tuple[str, str, str], list[int]] = {}
    for cell in bench.cells:
        if cell.status != "ok":
            found.setdefault((cell.name, cell.status, cell.reason), []).append(cell.length)
    every = len(bench.run.lengths)
    return [
        f"{plain(name)}{'' if len(lengths) == every else f' at {listing([str(n) for n in lengths])}'}: {status}: {plain(reason)}"
        for (name, status, reason), lengths in found.items()
    ]


def _extrapolated(bench: Bench) -> str:
    leaning = {cell.length: cell.dense_from for cell in bench.cells if cell.dense_from}
    if not leaning:
        return ""
    pairs = [f"{length} from {at}" for length, at in sorted(leaning.items())]
    return (
        "≈ dense attention was not timed at every length, but extrapolated by its count of operations, so quadratically: "
        f"{listing(pairs)} tokens."
    )


def _short(bench: Bench) -> str:
    trends = [trend for summary in bench.summaries for trend in (summary.forward, summary.forward_backward)]
    if not any(growth and growth.short for trend in trends for growth in (trend.time, trend.memory)):
        return ""
    return "† fitted below 1024 tokens, where fixed costs hide the slope."


def _noise(bench: Bench) -> list[str]:
    if bench.noise is None:
        return ["stopped before the end: there are no growth and no break-even."]
    found, cores = [], bench.run.environment.cores
    if bench.noise.load:
        start, end = bench.noise.load[0], bench.noise.load[-1]
        found.append(f"load of the machine {start:.1f} before and {end:.1f} after, on {cores} cores.")
    if bench.noise.calibration:
        least, most = min(bench.noise.calibration), max(bench.noise.calibration)
        middle = statistics.median(bench.noise.calibration)
        busy = " Times are that unsteady: trust ratios, not absolute times." if most / least > STEADY else ""
        found.append(
            f"the same matrix product took {duration(middle)} in the median of rounds, {duration(least)} at least and "
            f"{most / least:.1f} times that at most.{busy}"
        )
    return found
