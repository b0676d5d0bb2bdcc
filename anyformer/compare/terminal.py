"""The table on the terminal, grouped by family of attention, as wide as the terminal."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from anyformer.compare.caveats import panel_caveats, run_caveats
from anyformer.compare.panel import Method, Panel
from anyformer.compare.text import DASH, count, listing, number, shorten, signed, size

_GAP = 2  # blanks between columns
_OUTSIDE = "no attention"
_NARROWEST = 24  # room for names; longer ones go on in the next line, while numbers are never cut
_SPARE = 2  # columns up to this rank go before names twice as long are folded


def tables(panels: Sequence[Panel], notices: Sequence[str] = ()) -> RenderableType:
    """One table a panel, with the caveats below. Texts are not read as rich markup."""
    parts: list[RenderableType] = []
    if not panels:
        parts.append(Text("No trial has finished, so there is nothing to compare."))
    for panel in panels:
        # a sentence about a mark is of use only where the marked column is
        caveats = [sentence for sentence in panel_caveats(panel) if "†" not in sentence]
        parts += [Text(), PanelTable(panel), *_notes(caveats)]
    return Group(*parts, *_notes(run_caveats(panels, notices)))


@dataclass(frozen=True)
class Column:
    """Numbers under one heading, one for each method; the columns with the lowest `rank` go first where room is short."""

    name: str
    head: tuple[str, str]
    rank: int
    cells: dict[str, Text] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return max(cell_len(text) for text in (*self.head, *(cell.plain for cell in self.cells.values())))


class PanelTable:
    """The methods of one panel by family, best first, then the lines without attention."""

    def __init__(self, panel: Panel) -> None:
        self.panel = panel
        self.methods = {f"  {_named(method)}": method for method in panel.ranked()}
        self.lines = {f"  {name}": value for name, value in panel.lines()}
        self.families: dict[str, list[str]] = {}
        for name, method in self.methods.items():
            self.families.setdefault(method.attention_family[0], []).append(name)
        if self.lines:
            self.families[_OUTSIDE] = list(self.lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        room = options.max_width
        longest = max(map(cell_len, [*self.methods, *self.lines, *self.families]), default=0)
        shown = self.columns()
        dropped: list[Column] = []
        while len(shown) > 1:
            least = min(shown, key=lambda column: column.rank)
            names = min(longest, 2 * _NARROWEST if least.rank <= _SPARE else _NARROWEST)
            if sum(each.width + _GAP for each in shown) + names <= room:
                break
            dropped.append(least)
            shown.remove(least)
        width = max(min(longest, room - sum(each.width + _GAP for each in shown)), 8)
        yield self._table(shown, width)
        if dropped:
            left_out = listing([column.name for column in dropped], len(dropped))
            yield Text(f"no room here for: {left_out}", style="dim")

    def columns(self) -> list[Column]:
        """Every column there is, in order."""
        panel = self.panel
        far, home, cost = max(panel.lengths, default=panel.home), panel.home, panel.cost_home
        arrow = "↓" if panel.better == "lower" else "↑"
        quality = Column("quality", (f"{shorten(panel.metric, 20)} {arrow}", f"at {home}"), 9)
        difference = Column("difference to the baseline", ("minus", "baseline"), 5)
        lengths = [Column(f"quality at {n}", ("", f"at {n}"), 6 if n == far else 1) for n in panel.lengths if n != home]
        speed = Column("speed", ("tokens/s ↑", f"at {cost}"), 8)
        memory = Column("memory", ("memory ↓", f"at {cost}"), 7)
        size_ = Column("parameters", ("", "parameters"), 2)
        status = Column("status", ("", "status"), 3)
        differences = panel.differences(home)
        for name, method in self.methods.items():
            quality.cells[name] = _quality(method, home) if method.ok else Text(method.status, style=_style(method))
            difference.cells[name] = _difference(panel, method, differences)
            for column, n in zip(lengths, (n for n in panel.lengths if n != home), strict=True):
                column.cells[name] = _quality(method, n)
            speed.cells[name] = Text(count(method.rate(cost, "step")))
            memory.cells[name] = Text(size(method.memory(cost)))
            size_.cells[name] = Text(count(method.parameters.total if method.parameters else None))
            status.cells[name] = Text(method.status, style=_style(method))
        for name, value in self.lines.items():
            quality.cells[name] = Text(_brief(value), style="dim")
        return [quality, difference, *lengths, speed, memory, size_, status]

    def _table(self, columns: Sequence[Column], width: int) -> Table:
        steps = "" if self.panel.steps is None else f", {self.panel.steps} steps"
        title = Text(f"{self.panel.task}{steps}", style="bold")
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
        table.add_column("\nmethod", no_wrap=True, width=width)
        for column in columns:
            justify = "left" if column.name == "status" else "right"
            table.add_column("\n".join(column.head), justify=justify, no_wrap=True)
        for family, names in self.families.items():
            table.add_row(Text(family, style="bold cyan"))
            for name in names:
                style = "dim" if name in self.lines else ""
                table.add_row(_folded(name, width, style), *(column.cells.get(name, Text()) for column in columns))
        return table


def _named(method: Method) -> str:
    counted = f" ({len(method.ok)} of {len(method.trials)} seeds)" if method.ok and method.failed else ""
    return method.name + counted


def _folded(name: str, width: int, style: str) -> Text:
    lines = textwrap.wrap(name.strip(), width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return Text("\n".join(lines), style=style)


def _quality(method: Method, length: int) -> Text:
    """The mean, and half the range of the seeds to as many decimals."""
    mean, values = _brief(method.mean(length)), list(method.values(length).values())
    if len(values) < 2 or "e" in mean:
        return Text(mean)
    return Text(f"{mean} ±{(max(values) - min(values)) / 2:.{len(mean.partition('.')[2])}f}")


def _brief(value: float | None) -> str:
    """Four digits, and never more than four decimals."""
    text = number(value)
    return text if value is None or "e" in text or len(text.partition(".")[2]) <= 4 else f"{value:.4f}"


def _difference(panel: Panel, method: Method, differences: dict) -> Text:
    if panel.baseline is not None and method.key == panel.baseline.key:
        return Text("baseline", style="dim")
    found = differences.get(method.key)
    return Text(signed(found[0].interval.mean) if found else DASH)


def _style(method: Method) -> str:
    return {"ok": "green", "refused": "dim"}.get(method.status, "red")


def _notes(sentences: Sequence[str]) -> list[RenderableType]:
    return [Text(f"! {sentence}", style="yellow") for sentence in sentences]
