"""The axes of one panel in the picture: circles, their names, reference lines, the direction that is better."""

import math
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from anyformer.compare.labels import Box, Circle, place, spread, ticks
from anyformer.compare.panel import Method, Numbers, Panel
from anyformer.compare.style import FAINT, GRID, MATPLOTLIB, Style
from anyformer.compare.text import count, listing, number, shorten

SMALLEST = 3.5  # radius of a circle in points
_MARGIN = 21  # letters that fit between an axes' right edge and whatever stands beside it


@dataclass(frozen=True)
class Scale:
    """Area in proportion to memory: ``heaviest`` bytes are drawn with radius ``largest``, in points."""

    heaviest: float | None
    largest: float

    def radius(self, memory: float | None) -> float:
        if not memory or not self.heaviest:
            return SMALLEST
        return max(SMALLEST, self.largest * math.sqrt(memory / self.heaviest))


class PanelAxes:
    """The axes of one panel being drawn."""

    def __init__(self, axes: Axes, panel: Panel, style: Style, numbers: Numbers | None, scale: Scale):
        self.axes = axes
        self.panel = panel
        self.style = style
        self.numbers = numbers
        self.scale = scale
        drawn = [(method, self.point(method)) for method in panel.finished]
        self.points = [(method, point) for method, point in drawn if point is not None]
        self.absent = [method.name for method, point in drawn if point is None]

    def draw(self) -> None:
        self.frame()
        self.reference_lines()
        for method, (x, y) in sorted(self.points, key=lambda entry: -self.radius(entry[0])):
            self.circle(method, x, y)
        self.names([self.arrow(), *self.note()])

    def point(self, method: Method) -> tuple[float, float] | None:
        x, y = method.rate(self.panel.cost_home, "step"), method.mean(self.panel.home)
        return None if x is None or y is None else (x, y)

    def radius(self, method: Method) -> float:
        return self.scale.radius(method.memory(self.panel.cost_home))

    def frame(self) -> None:
        axes, panel = self.axes, self.panel
        xs = [x for _, (x, _) in self.points] or [1.0]
        low, high = self.range()
        pad = 0.14 * math.log(max(xs) / min(xs)) + 0.25
        axes.set_xscale("log")
        axes.set_xlim(min(xs) * math.exp(-pad), max(xs) * math.exp(pad))
        axes.set_ylim((high, low) if panel.better == "lower" else (low, high))
        axes.xaxis.set_major_locator(FixedLocator(ticks(*axes.get_xlim()) if self.points else []))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(value)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0)
        lower = "lower is better, axis reversed" if panel.better == "lower" else "higher is better"
        axes.set_ylabel(f"{shorten(panel.metric, 40)} at {panel.home} tokens\n{lower}")
        axes.set_xlabel(f"speed: training tokens per second at {panel.cost_home} tokens, log scale")
        steps = "" if panel.steps is None else f", {panel.steps} steps"
        axes.set_title(f"{shorten(panel.task, 44)}{steps}", loc="left", fontsize=11, fontweight="bold", pad=10)

    def range(self) -> tuple[float, float]:
        """Covers the circles and the reference lines near them: a far line would press all circles into a strip."""
        ys = [y for _, (_, y) in self.points] or [value for _, value in self.panel.lines()] or [0.0]
        reach = max(max(ys) - min(ys), 0.05 * max(map(abs, ys)), 1e-9)
        near = [value for _, value in self.panel.lines() if min(ys) - reach <= value <= max(ys) + reach]
        rise = 0.16 * (max(ys + near) - min(ys + near)) or reach
        return min(ys + near) - rise, max(ys + near) + rise

    def reference_lines(self) -> None:
        """Dashed lines named in the right margin; one that lies outside is named at the edge, with an arrow."""
        lines = self.panel.lines()
        left, right = self.axes.get_xlim()
        low, high = sorted(self.axes.get_ylim())
        inside = [min(max(value, low), high) for _, value in lines]
        heights = [
            float(self.axes.transAxes.inverted().transform(self.axes.transData.transform((left, y)))[1]) for y in inside
        ]
        texts = spread(heights, 14.0 / self.axes.bbox.height, 0.0, 1.0)
        for (name, value), y, height in zip(lines, inside, texts, strict=True):
            arrow = "" if y == value else (" ↓" if (y == low) == (self.panel.better == "higher") else " ↑")
            if not arrow:
                self.axes.axhline(value, color=FAINT, linewidth=0.9, linestyle=(0, (5, 3)), zorder=1)
            told = f" {number(value, 3)}{arrow}"
            self.axes.annotate(
                shorten(name, _MARGIN - len(told)) + told,
                (right, y),
                (1.014, height),
                xycoords="data",
                textcoords="axes fraction",
                fontsize=7.6,
                color=FAINT,
                va="center",
                annotation_clip=False,
                gid="reference",
                arrowprops=None
                if arrow
                else {"arrowstyle": "-", "color": FAINT, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0},
            )

    def circle(self, method: Method, x: float, y: float) -> None:
        colour, glyph = self.style.colour(method.attention_family), self.style.glyph(method.position_family)
        radius = self.radius(method)
        values = list(method.values(self.panel.home).values())
        if len(values) > 1:
            self.axes.plot([x, x], [min(values), max(values)], color=colour, linewidth=1.4, zorder=2)
        known = bool(method.memory(self.panel.cost_home))
        self.axes.scatter(
            [x],
            [y],
            s=(2 * radius) ** 2,
            facecolor=colour if known else "none",
            edgecolor="white" if known else colour,
            linewidth=1.0,
            alpha=0.82,
            zorder=3,
        )
        if MATPLOTLIB[glyph]:
            self.axes.plot([x], [y], MATPLOTLIB[glyph], color="white" if known else colour, markersize=4.5, zorder=4)

    def arrow(self) -> Box:
        """Points to where the best methods lie; returns the pixels it takes."""
        scale = self.axes.figure.dpi / 72
        self.axes.annotate(
            "better",
            (1, 1),
            (-30, -24),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=8.5,
            color=FAINT,
            arrowprops={"arrowstyle": "-|>", "color": FAINT, "linewidth": 1.2},
        )
        box = self.axes.bbox
        return box.x1 - 66 * scale, box.y1 - 32 * scale, box.x1, box.y1

    def note(self) -> list[Box]:
        """Says which methods could not be drawn; returns the pixels it takes."""
        if not self.absent:
            return []
        text = f"not drawn, no speed or no finite quality: {shorten(listing(self.absent, 3), 44)}"
        self.axes.annotate(text, (0.012, 0.015), xycoords="axes fraction", fontsize=7.8, color=FAINT, zorder=5)
        box = self.axes.bbox
        return [(box.x0, box.y0, box.x1, box.y0 + 16 * self.axes.figure.dpi / 72)]

    def names(self, taken: list[Box]) -> None:
        if not self.points:
            return
        scale = self.axes.figure.dpi / 72  # pixels per point
        texts = [self.text(method) for method, _ in self.points]
        circles: list[Circle] = []
        sizes = []
        renderer = FigureCanvasAgg(self.axes.figure).get_renderer()  # pyright: ignore[reportArgumentType]
        for (method, (x, y)), text in zip(self.points, texts, strict=True):
            u, v = self.axes.transData.transform((x, y))
            circles.append((float(u), float(v), self.radius(method) * scale))
            probe = self.axes.text(0, 0, text, fontsize=8.8)
            extent = probe.get_window_extent(renderer)
            probe.remove()
            sizes.append((extent.width + 6, extent.height + 4))
        box = self.axes.bbox
        centres = place(circles, sizes, (box.x0, box.y0, box.x1, box.y1), taken)
        back = self.axes.transData.inverted().transform
        for (_, (x, y)), text, centre, (u, v, radius), (width, height) in zip(
            self.points, texts, centres, circles, sizes, strict=True
        ):
            away = math.hypot(max(abs(centre[0] - u) - width / 2, 0), max(abs(centre[1] - v) - height / 2, 0)) - radius
            leader = {"arrowstyle": "-", "color": FAINT, "linewidth": 0.7, "shrinkA": 1, "shrinkB": radius / scale}
            self.axes.annotate(
                text,
                (x, y),
                tuple(back(centre)),
                ha="center",
                va="center",
                fontsize=8.8,
                zorder=5,
                gid="name",
                bbox={"boxstyle": "square,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.78},
                arrowprops=leader if away > 8 else None,
            )

    def text(self, method: Method) -> str:
        return str(self.numbers[method.key]) if self.numbers else shorten(method.name, 26)
