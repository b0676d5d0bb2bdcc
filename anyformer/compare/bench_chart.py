"""The picture of a benchmark: seconds and bytes over the length on log axes, one line a method, dense attention bold."""

from collections.abc import Callable

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from anyformer.compare.bench_record import DENSE, Bench, Cell, Contender
from anyformer.compare.chart import RC
from anyformer.compare.labels import ticks
from anyformer.compare.style import COLOURS, FAINT, GRID, INK, MATPLOTLIB
from anyformer.compare.text import duration, plain, shorten, size

_MARKS = ("dot", "square", "triangle", "diamond", "star", "plus", "cross")


def _short(seconds: float) -> str:
    value, unit = duration(seconds).split()
    return f"{value.rstrip('0').rstrip('.') if '.' in value else value} {unit}"


_PANELS: tuple[tuple[str, Callable[[Cell], float | None], Callable[[float], str]], ...] = (
    ("forward", lambda cell: cell.forward.time.median if cell.forward else None, _short),
    (
        "forward + backward",
        lambda cell: cell.forward_backward.time.median if cell.forward_backward else None,
        _short,
    ),
    (
        "extra memory, forward + backward",
        lambda cell: cell.forward_backward.memory if cell.forward_backward else None,
        size,
    ),
)


@matplotlib.rc_context(RC)
def draw(bench: Bench) -> Figure:
    """Three axes: forward, forward and backward, memory. Colours tell attentions apart, marks positions; peers are dotted, and
    what was extrapolated is dashed."""
    shown = [each for each in bench.contenders if any(cell.status == "ok" for cell in bench.of(each))]
    rows = -(-len(shown) // 4)
    height = 5.6 + 0.24 * rows
    figure = Figure(figsize=(15, height), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(
        0.04, 1 - 0.32 / height, "faster than dense attention from which length?", fontsize=15, fontweight="bold"
    )
    run = bench.run
    figure.text(0.04, 1 - 0.58 / height, shorten(f"{run.setting}; {run.environment.processor}", 150), color=FAINT)
    bottom = (0.9 + 0.24 * rows) / height
    grid = figure.add_gridspec(1, 3, left=0.06, right=0.98, top=1 - 1.1 / height, bottom=bottom, wspace=0.22)
    handles: dict[str, Line2D] = {}
    for place, (title, value, text) in enumerate(_PANELS):
        axes = figure.add_subplot(grid[place])
        _frame(axes, bench, title, text)
        for contender in shown:
            line = _line(axes, bench, contender, value)
            handles.setdefault(plain(contender.name), line)
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(FixedLocator(ticks(low, high, binary=text is size)))
    if not shown:
        figure.text(0.5, 0.5, "Nothing was timed.", ha="center", fontsize=13, color=FAINT)
        return figure
    figure.legend(
        handles=list(handles.values()),
        labels=[shorten(name, 46) for name in handles],
        loc="lower left",
        bbox_to_anchor=(0.04, 0.01),
        ncols=4,
        frameon=False,
        fontsize=9,
        handlelength=3.2,
    )
    return figure


def _frame(axes: Axes, bench: Bench, title: str, text: Callable[[float], str]) -> None:
    lengths = list(bench.run.lengths)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axes.set_xlabel("tokens")
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _line(axes: Axes, bench: Bench, contender: Contender, value: Callable[[Cell], float | None]) -> Line2D:
    dense = contender == DENSE
    timed: list[tuple[int, float]] = []
    guessed: list[tuple[int, float]] = []
    for cell in bench.of(contender):
        if found := value(cell):
            (guessed if dense and cell.dense_from else timed).append((cell.length, float(found)))
    colour, mark = (INK, "dot") if dense else _look(bench, contender)
    (line,) = axes.plot(*_columns(timed), linestyle=":" if contender.role == "peer" else "-")
    (dashed,) = axes.plot(*_columns([*timed[-1:], *guessed] if guessed else []), linestyle="--")
    for each in (line, dashed):
        each.set(color=colour, marker=MATPLOTLIB[mark], markersize=4.5, linewidth=3.0 if dense else 1.6)
        each.set_zorder(4 if dense else 3)
    return line


def _columns(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [length for length, _ in points], [found for _, found in points]


def _look(bench: Bench, contender: Contender) -> tuple[str, str]:
    others = [each for each in bench.contenders if each != DENSE]
    attentions = list(dict.fromkeys(each.attention for each in others))
    positions = list(dict.fromkeys(each.position for each in others))
    place, mark = attentions.index(contender.attention), positions.index(contender.position)
    return COLOURS[place % len(COLOURS)], _MARKS[mark % len(_MARKS)]
