"""`anyformer check`: legality first, then every law with its measured error."""

import torch
from rich.console import Console
from rich.table import Table

from anyformer.errors import IncompatibleError
from anyformer.model.build import check, position_slot, slot
from anyformer.testing import laws

_STYLES = {"holds": "green", "broken": "bold red", "silent": "dim"}


def run(attention: str, position: str, causal: bool | None) -> int | None:
    """Print the verdict and the table of laws; 1 if a law is broken."""
    console, broken = Console(), 0
    torch.set_num_threads(1)
    slot(attention)
    position_slot(position)  # a wrong name or knob is wrong in both directions
    verdicts, refused = {}, {}
    for direction in (False, True) if causal is None else (causal,):
        try:
            verdicts[direction] = check(attention, position, causal=direction, dim=32, max_length=64)
        except ValueError as error:
            refused["causal" if direction else "both directions"] = str(error)
    if not verdicts and len(set(refused.values())) == 1:
        raise IncompatibleError(next(iter(refused.values())))
    reasons = "\n".join(f"{direction}: refused: {reason}" for direction, reason in refused.items())
    if not verdicts:
        raise IncompatibleError(reasons)
    if refused:
        console.print(reasons, markup=False)
    for direction, verdict in verdicts.items():
        case = laws.Case(attention, position, causal=direction)
        table = Table(title=f"{case}: {verdict.kind}", title_justify="left", title_style="bold")
        for heading in ("law", "says", "result", "error", "limit", "worst input"):
            table.add_column(heading, overflow="fold")
        for result in laws.examine(case):
            broken += result.status == "broken"
            worst = result.worst
            numbers = ("", "") if worst is None else (f"{worst.error:.1e}", f"{worst.limit:.0e}")
            style = _STYLES[result.status]
            table.add_row(result.law.name, result.law.title, f"[{style}]{result.status}[/]", *numbers, result.note)
        console.print(table)
    return 1 if broken else 0
