"""The picture, by matplotlib: quality over speed, one circle a method, its area the memory of a training step."""

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import matplotlib
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from anyformer.compare.axes import PanelAxes, Scale
from anyformer.compare.panel import Numbers, Panel
from anyformer.compare.style import FAINT, INK, MATPLOTLIB, Style, branches
from anyformer.compare.text import shorten, size

NAMED = 16  # with more methods than this, circles are numbered and named in a list beside the chart
RC: Any = {
    "font.size": 9.5,
    "text.parse_math": False,
    "svg.hashsalt": "anyformer",
    "svg.fonttype": "path",
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.8,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
}


# fonts for letters that matplotlib's own font lacks; only installed ones are asked for, as it warns about the others
FALLBACKS = ("Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "PingFang SC", "Microsoft YaHei")


@contextmanager
def _look() -> Iterator[None]:
    fonts = ["DejaVu Sans", *(name for name in FALLBACKS if name in font_manager.get_font_names())]
    with matplotlib.rc_context({**RC, "font.family": fonts}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


@_look()
def draw(panels: Sequence[Panel], style: Style, numbers: Numbers, title: str, subtitle: str, foot: str) -> Figure:
    """One axes a panel, two a row. ``numbers`` gives every method (by key) its number in the report."""
    shown = [panel for panel in panels if panel.finished]
    rows, columns = max(1, math.ceil(len(shown) / 2)), min(2, max(1, len(shown)))
    figure = Figure(figsize=(12, 3 + 5 * rows), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    numbered = len({method.key for panel in shown for method in panel.finished}) > NAMED
    figure.text(
        0.03, 1 - 0.32 / figure.get_figheight(), shorten(title, 90), fontsize=15, fontweight="bold", va="center"
    )
    figure.text(0.03, 1 - 0.6 / figure.get_figheight(), shorten(subtitle, 150), fontsize=9, color=FAINT, va="center")
    figure.text(0.03, 0.14 / figure.get_figheight(), shorten(foot, 170), fontsize=8, color=FAINT, va="center")
    if not shown:
        figure.text(0.5, 0.5, "No trial has finished: nothing to draw.", ha="center", fontsize=13, color=FAINT)
        return figure
    grid = figure.add_gridspec(
        rows,
        columns,
        left=0.07,
        right=0.70 if numbered else 0.885,
        top=1 - 1.15 / figure.get_figheight(),
        bottom=1.72 / figure.get_figheight(),
        wspace=0.58,
        hspace=0.42,
    )
    scale = Scale(_heaviest(shown), 11.0 if numbered else 17.0)
    for place_, panel in enumerate(shown):
        axes = figure.add_subplot(grid[place_ // columns, place_ % columns])
        PanelAxes(axes, panel, style, numbers if numbered else None, scale).draw()
    if numbered:
        _key(figure, shown, style, numbers)
    _legend(figure, shown, style, scale)
    return figure


@_look()
def render(figure: Figure, kind: Literal["png", "svg"]) -> bytes:
    """The picture as a file's content, the same bytes for the same records; the PNG is 1800 pixels wide."""
    content = io.BytesIO()
    metadata = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
    figure.savefig(content, format=kind, dpi=150, metadata=metadata)
    return content.getvalue()


def _heaviest(panels: Sequence[Panel]) -> float | None:
    every = [method.memory(panel.cost_home) for panel in panels for method in panel.finished]
    return max((memory for memory in every if memory), default=None)


def _key(figure: Figure, panels: Sequence[Panel], style: Style, numbers: Numbers) -> None:
    methods = {method.key: method for panel in panels for method in panel.finished}
    height = figure.get_figheight()
    step = min(0.19, (height - 2.6) / len(methods))
    for row, method in enumerate(sorted(methods.values(), key=lambda method: numbers[method.key])):
        y = 1 - (1.05 + row * step) / height
        points = min(8.0, 72 * step * 0.7)
        colour = style.colour(method.attention_family)
        figure.text(0.795, y, str(numbers[method.key]), fontsize=points, ha="right", color=colour, fontweight="bold")
        figure.text(0.802, y, shorten(method.name, 34), fontsize=points)


def _legend(figure: Figure, panels: Sequence[Panel], style: Style, scale: Scale) -> None:
    methods = [method for panel in panels for method in panel.finished]
    attention = dict.fromkeys(method.attention_family[0] for method in methods)
    position = branches(method.position_family for method in methods)
    colours = [_mark("o", style.colours[name], 8.0, shorten(name, 28)) for name in attention]
    glyphs = [
        _mark(MATPLOTLIB[style.glyphs[name]], INK, 5.5, shorten(told, 27))
        if name != "none"
        else _mark("", INK, 1.0, "none (no mark)")
        for name, told in position.items()
    ]
    bottom = 0.24 / figure.get_figheight()
    _column(figure, colours, "attention: colour", 0.06, bottom, 3)
    _column(figure, glyphs, "position: mark inside", 0.47, bottom, 2)
    _memory(figure, scale, 0.725, bottom)


def _memory(figure: Figure, scale: Scale, left: float, bottom: float) -> None:
    width, height = 3.2, 0.95  # inches
    axes = figure.add_axes(
        (left, bottom, width / figure.get_figwidth(), height / figure.get_figheight()),
        xlim=(0, width),
        ylim=(0, height),
    )
    axes.set_axis_off()
    if scale.heaviest is None:
        axes.text(0, height, "memory was not measured:\nall circles alike", fontsize=8.2, color=FAINT, va="top")
        return
    axes.text(0, height - 0.02, "memory of a training step: area", fontsize=8.2, fontweight="bold", va="top")
    x = 0.0
    for share in (1.0, 0.25, 0.0625):
        radius = scale.radius(scale.heaviest * share)
        x += radius / 72 + 0.04
        axes.scatter([x], [0.4], s=(2 * radius) ** 2, color="#C4C9D2", linewidth=0)
        axes.text(x + radius / 72 + 0.06, 0.4, size(scale.heaviest * share), fontsize=8.2, va="center")
        x += radius / 72 + 0.72


def _mark(marker: str, colour: str, width: float, label: str) -> Line2D:
    return Line2D(
        [], [], linestyle="", marker=marker, color=colour, markersize=width, markeredgecolor=colour, label=label
    )


def _column(figure: Figure, handles: list[Line2D], title: str, left: float, bottom: float, columns: int) -> None:
    legend = figure.legend(
        handles=handles,
        title=title,
        loc="upper left",
        bbox_to_anchor=(left - 0.01, bottom + 1.0 / figure.get_figheight()),
        frameon=False,
        fontsize=8.2,
        ncols=columns,
        title_fontproperties={"size": 8.2, "weight": "bold"},
        alignment="left",
        handletextpad=0.4,
        columnspacing=1.2,
    )
    legend.get_title().set_color(INK)
