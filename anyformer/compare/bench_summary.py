"""What the cells of a benchmark say of a method over all lengths: growth, and break-even with dense attention."""

from collections.abc import Sequence

from anyformer.compare.bench_record import BreakEven, Cell, Contender, Growth, Measure, Summary, Trend
from anyformer.compare.stats import crossover, exponent


def summarise(contender: Contender, cells: Sequence[Cell]) -> Summary:
    """The summary of one method from its cells."""
    return Summary(
        contender=contender,
        name=contender.name,
        forward=trend(contender, cells, "forward"),
        forward_backward=trend(contender, cells, "forward_backward"),
    )


def trend(contender: Contender, cells: Sequence[Cell], measure: Measure) -> Trend:
    """The trend of one kind of call. Extrapolated seconds of dense attention itself are left out of its growth."""
    dense = contender.role == "dense"
    known = [(cell.length, cost) for cell in cells if (cost := cell.cost(measure)) and not (dense and cell.dense_from)]
    return Trend(
        time=growth([(length, cost.time.median) for length, cost in known]),
        memory=growth([(length, cost.memory) for length, cost in known]),
        break_even=BreakEven(verdict="unknown") if dense else break_even(cells, measure),
    )


def growth(points: Sequence[tuple[int, float | int | None]]) -> Growth | None:
    """Slope on log axes over the largest doublings; None below two points."""
    known = [(length, float(value)) for length, value in points if value is not None]
    found = exponent([length for length, _ in known], [value for _, value in known])
    return None if found is None else Growth(slope=found.slope, lengths=found.lengths, short=found.short)


def break_even(cells: Sequence[Cell], measure: Measure) -> BreakEven:
    """From which length on the method is faster than dense attention, between measured lengths on log axes."""
    points = sorted(
        (cell.length, cost.ratio.median, cell.dense_from is not None)
        for cell in cells
        if (cost := cell.cost(measure)) and cost.ratio
    )
    if not points:
        return BreakEven(verdict="unknown")
    lengths, ratios = [point[0] for point in points], [point[1] for point in points]
    found = crossover(lengths, [1 / ratio for ratio in ratios], [1.0] * len(ratios))
    if found is None:
        verdict = "lost" if any(ratio > 1 for ratio in ratios) else "never"
        return BreakEven(verdict=verdict, length=lengths[-1], extrapolated=points[-1][2])
    if all(ratio > 1 for ratio in ratios):
        return BreakEven(verdict="first", length=lengths[0], extrapolated=points[0][2])
    leaning = next((extrapolated for length, _, extrapolated in points if length >= found), points[-1][2])
    return BreakEven(verdict="between", length=found, extrapolated=leaning)
