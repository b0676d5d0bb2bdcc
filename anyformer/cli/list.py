"""`anyformer list`: methods by family, and the composition matrix."""

from itertools import groupby

from rich.console import Console
from rich.table import Table

from anyformer.errors import SpecError
from anyformer.registry import KINDS, Method, list_methods

_STYLES = {"ok": "green", "abs": "yellow", "refused": "red"}


def run(kind: str, wildcard: str, matrix: bool, causal: bool, reasons: bool) -> int | None:
    """Print the list or the matrix."""
    if kind and kind not in KINDS:
        raise SpecError(f"there is no kind {kind!r}; type one of {', '.join(KINDS)}")
    console = Console()
    if matrix or reasons:
        _matrix(console, causal, reasons)
        return 0
    found = [method for each in ([kind] if kind else KINDS) for method in list_methods(each, wildcard)]  # type: ignore[arg-type]
    if not kind:  # the kind "attention" covers mixers and patterns
        found = list({(method.kind, method.name): method for method in found}.values())
    if not found:
        raise SpecError(f"no {kind or 'method'} matches {wildcard!r}; try: anyformer list {kind}".rstrip())
    for name, methods in groupby(
        sorted(found, key=lambda each: (KINDS.index(each.kind), each.family)), key=lambda each: each.kind
    ):
        console.print(_table(name, list(methods)))
    return 0


def _table(kind: str, methods: list[Method]) -> Table:
    table = Table(title=kind, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in ("name", "family", "what it is", "paper"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "name")
    for method in methods:
        table.add_row(method.name, " > ".join(method.family), method.summary, method.paper)
    return table


def _matrix(console: Console, causal: bool, reasons: bool) -> None:
    from anyformer.model.build import matrix

    cells = matrix(causal=causal)
    attentions = list(dict.fromkeys(attention for attention, _ in cells))
    positions = list(dict.fromkeys(position for _, position in cells))
    table = Table(
        title=f"{'causal' if causal else 'bidirectional'} composition", title_justify="left", title_style="bold"
    )
    table.add_column("position")
    for attention in attentions:
        table.add_column(attention, justify="center")
    for position in positions:
        row = [cells[attention, position].cell for attention in attentions]
        table.add_row(position, *(f"[{_STYLES.get(cell, 'cyan')}]{cell}[/]" for cell in row))
    console.print(table)
    console.print(
        "ok: composes. abs: runs, no longer relative. not yet: an exact form is not written. refused: --reasons says why."
    )
    if reasons:
        for (attention, position), verdict in cells.items():
            if verdict.reason:
                console.print(f"{attention} x {position}: {verdict.kind}: {verdict.reason}", markup=False)
