"""Position encodings in pictures: four panels, one for each kind, a line an encoding."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from anyformer.compare.style import COLOURS, GRID, INK
from anyformer.registry import find
from anyformer.spec import parse

PANELS = {
    "absolute": ("absolute",),
    "relative": ("relative",),
    "rotary, complex, convolution, vision": ("rotary", "complex", "convolution", "xpos", "randomized", "vision"),
    "since the survey": ("since the survey",),
}
"""Each panel, and the twigs or else the roots of the families in it."""
_MARKS = "osD^v<>PX*"
_SIZE = (13.0, 9.0)

Curves = Mapping[str, Mapping[int, float]]
"""For each encoding, in the order of the legend, its value at each length."""


def panel_of(position: str) -> str:
    """The panel an encoding is drawn in; "" for the model without positions, which belongs to none."""
    places = {name: title for title, group in PANELS.items() for name in group}
    family = find("position", parse(position).name).family
    return next((places[name] for name in reversed(family) if name in places), "")


def draw(
    path: Path,
    title: str,
    curves: Curves,
    labels: Mapping[str, str],
    *,
    everywhere: Sequence[str] = (),
    unit: tuple[str, str],
    scale: Literal["linear", "log"] = "linear",
    top: float | None = None,
) -> None:
    """Write the picture.

    Args:
        labels: of each encoding in the legend.
        everywhere: names of curves that are drawn in all panels.
        unit: what the axes say, below and beside.
        scale: of the values; lengths double.
        top: largest value to be seen.
    """
    figure = Figure(figsize=_SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    for kind, axes in zip(PANELS, figure.subplots(2, 2, sharey=True).flat, strict=True):
        for name in everywhere:
            axes.plot(*_points(curves[name]), color=INK, lw=2.2, ls=":", label=labels[name])
        for number, name in enumerate(name for name in curves if panel_of(name) == kind):
            axes.plot(*_points(curves[name]), **_look(number), label=labels[name])
        lengths = sorted({length for curve in curves.values() for length in curve})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, list(map(str, lengths)))
        axes.set_yscale(scale)
        axes.set_ylim(top=None if top is None else min(top, axes.get_ylim()[1]))
        axes.grid(color=GRID)
        axes.set_xlabel(unit[0])
        axes.set_ylabel(unit[1])
        axes.set_title(kind, loc="left", fontsize=11)
        axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(title, fontsize=12)
    figure.savefig(path, dpi=110)


def _points(curve: Mapping[int, float]) -> tuple[list[int], list[float]]:
    return list(curve), list(curve.values())


def _look(number: int) -> dict[str, Any]:
    colour, mark = COLOURS[number % len(COLOURS)], _MARKS[number % len(_MARKS)]
    return {"color": colour, "marker": mark, "markersize": 4.5, "lw": 1.4}
