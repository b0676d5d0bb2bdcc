"""The table on the terminal, grouped by family of attention."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from anyformer.compare.caveats import panel_caveats, run_caveats
from anyformer.compare.panel import Method, Panel
from anyformer.compare.text import DASH, count, number, shorten, signed, size


def tables(panels: Sequence[Panel], notices: Sequence[str] = ()) -> RenderableType:
    """One table a panel, with the caveats below. Texts are not read as rich markup."""
    parts: list[RenderableType] = []
    if not panels:
        parts.append(Text("No trial has finished, so there is nothing to compare."))
    for panel in panels:
        parts += [_table(panel), *_notes(panel_caveats(panel))]
    return Group(*parts, *_notes(run_caveats(panels, notices)))


def _table(panel: Panel) -> Table:
    steps = "" if panel.steps is None else f", {panel.steps} steps"
    table = Table(
        title=Text(f"{panel.task}{steps}", style="bold"),
        title_justify="left",
        expand=False,
        pad_edge=False,
        box=None,
        padding=(0, 2, 0, 0),
    )
    far = panel.lengths[-1] if panel.lengths else panel.home
    arrow = "↓" if panel.better == "lower" else "↑"
    table.add_column("method", overflow="ellipsis", max_width=38, no_wrap=True)
    table.add_column(f"{shorten(panel.metric, 20)} {arrow}\nat {panel.home}", justify="right")
    table.add_column("minus\nbaseline", justify="right")
    if far > panel.home:
        table.add_column(f"\nat {far}", justify="right")
    table.add_column(f"tokens/s ↑\nat {panel.cost_home}", justify="right")
    table.add_column(f"memory ↓\nat {panel.cost_home}", justify="right")
    table.add_column("\nparameters", justify="right")
    table.add_column("\nstatus")
    differences = panel.differences(panel.home)
    families: dict[str, list[Method]] = {}
    for method in panel.ranked():
        families.setdefault(method.attention_family[0], []).append(method)
    for family, methods in families.items():
        table.add_row(Text(family, style="bold cyan"))
        for method in methods:
            table.add_row(*_row(panel, method, far, differences))
    if panel.lines():
        table.add_row(Text("no attention", style="bold cyan"))
    for name, value in panel.lines():
        table.add_row(Text(f"  {name}", style="dim"), Text(number(value), style="dim"))
    return table


def _row(panel: Panel, method: Method, far: int, differences: dict) -> list[Text]:
    is_baseline = panel.baseline is not None and method.key == panel.baseline.key
    found = differences.get(method.key)
    difference = "baseline" if is_baseline else signed(found[0].interval.mean) if found else DASH
    failed = f" ({len(method.failed)} of {len(method.trials)} failed)" if method.ok and method.failed else ""
    style = {"ok": "green", "refused": "dim"}.get(method.status, "red")
    cells = [
        Text(f"  {method.name}"),
        Text(_quality(method, panel.home)),
        Text(difference, style="dim" if is_baseline else ""),
    ]
    if far > panel.home:
        cells.append(Text(_quality(method, far)))
    cells += [Text(count(method.rate(panel.cost_home, "step"))), Text(size(method.memory(panel.cost_home)))]
    cells += [
        Text(count(method.parameters.total if method.parameters else None)),
        Text(method.status + failed, style=style),
    ]
    return cells


def _quality(method: Method, length: int) -> str:
    values = list(method.values(length).values())
    spread = f" ±{number((max(values) - min(values)) / 2, 2)}" if len(values) > 1 else ""
    return number(method.mean(length)) + spread


def _notes(sentences: Sequence[str]) -> list[RenderableType]:
    return [Padding(Text(f"! {sentence}", style="yellow"), (0, 0, 0, 0)) for sentence in sentences]
