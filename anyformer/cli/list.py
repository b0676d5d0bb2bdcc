"""`anyformer list`: methods by family, and the composition matrix."""

import inspect
import textwrap
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from anyformer.errors import SpecError
from anyformer.registry import KINDS, Maker, list_methods

if TYPE_CHECKING:
    from anyformer.forms import Verdict

_CELLS = {"ok": ("+", "green"), "abs": ("a", "yellow"), "refused": ("-", "red")}


def run(kind: str, wildcard: str, matrix: bool, causal: bool, reasons: bool) -> int | None:
    """Print the list or the matrix."""
    if kind and kind not in KINDS:
        raise SpecError(f"there is no kind {kind!r}; type one of {', '.join(KINDS)}")
    console = Console()
    if matrix or reasons:
        _matrix(console, causal, reasons)
        return 0
    kinds = KINDS if not kind else (KINDS[[*map(str, KINDS)].index(kind)],)
    rows: dict[str, list[_Row]] = {}
    for method in {(each.kind, each.name): each for kind in kinds for each in list_methods(kind, wildcard)}.values():
        row = _Row(method.name, method.family, method.summary, method.paper)
        rows.setdefault(method.kind, []).append(row)
    if leaves := _leaves(wildcard) if {"attention", "pattern"} & {*kinds} else []:
        rows.setdefault("pattern", []).extend(leaves)
    if not rows:
        raise SpecError(f"no {kind or 'method'} matches {wildcard!r}; try: anyformer list {kind}".rstrip())
    for name in sorted(rows, key=KINDS.index):
        console.print(_table(name, sorted(rows[name], key=lambda row: row.family)))
    return 0


class _Row(NamedTuple):
    name: str
    family: tuple[str, ...]
    summary: str
    paper: str


def _leaves(wildcard: str) -> list[_Row]:
    """The patterns that the attention slot knows by a name."""
    from anyformer.pattern.leaves import SLOT_NAMES, SLOT_PAPERS

    found = []
    for name, leaf in SLOT_NAMES.items():
        if fnmatchcase(name, wildcard):
            knobs, summary = ", ".join(Maker(name, leaf).knobs), (inspect.getdoc(leaf) or "").split("\n\n")[0]
            found.append(
                _Row(f"{name}({knobs})", ("human-made pattern", leaf.__name__.lower()), summary, SLOT_PAPERS[name])
            )
    return found


def _table(kind: str, rows: list[_Row]) -> Table:
    table = Table(title=kind, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in ("name", "family", "what it is", "paper"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "name")
    for row in rows:
        table.add_row(row.name, " > ".join(row.family), row.summary, row.paper)
    return table


def _matrix(console: Console, causal: bool, reasons: bool) -> None:
    from anyformer.model.build import matrix

    cells = matrix(causal=causal)
    attentions = list(dict.fromkeys(attention for attention, _ in cells))
    edge = max(len(position) for _, position in cells)
    cell = len(str(len(attentions))) + 1
    fitting = max(1, (console.width - edge) // cell)
    title = f"{'causal' if causal else 'bidirectional'} composition"
    for first in range(0, len(attentions), fitting):
        columns = dict(enumerate(attentions[first : first + fitting], first + 1))
        _part(console, title, columns, cells, edge, cell)
    _wrapped(console, "+: composes. a: abs, it runs and is no longer relative.")
    _wrapped(console, "-: refused. --reasons says why.")
    if reasons:
        for (attention, position), verdict in cells.items():
            if verdict.reason:
                console.print(f"{attention} x {position}: {verdict.kind}: {verdict.reason}", markup=False)


def _part(
    console: Console,
    title: str,
    columns: dict[int, str],
    cells: "dict[tuple[str, str], Verdict]",
    edge: int,
    cell: int,
) -> None:
    """Some columns of the matrix under their numbers, with the names behind the numbers above."""
    console.print(title, style="bold")
    _wrapped(console, " ".join(f"{number}={attention}" for number, attention in columns.items()))
    lines = [Text(" " * edge + "".join(f"{number:>{cell}}" for number in columns), style="bold")]
    for position in dict.fromkeys(position for _, position in cells):
        line = Text(f"{position:<{edge}}")
        for attention in columns.values():
            letter, style = _CELLS[cells[attention, position].kind]
            line.append(f"{letter:>{cell}}", style)
        lines.append(line)
    for line in lines:
        console.print(line, soft_wrap=True)
    console.print()


def _wrapped(console: Console, text: str) -> None:
    for line in textwrap.wrap(text, console.width, break_long_words=False, break_on_hyphens=False):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
