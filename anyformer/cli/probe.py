"""`anyformer probe`: experiments on where networks know positions from."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table

from anyformer.errors import SpecError

if TYPE_CHECKING:
    from anyformer.probe.results import Row

EXPERIMENTS = ("cnn-padding",)


def run(
    experiment: str, out: str, seeds: int, depths: list[int] | None, size: int | None, steps: int | None, quick: bool
) -> int | None:
    """Run an experiment, show what comes of it, and write lines, table and picture."""
    if experiment not in EXPERIMENTS:
        raise SpecError(f"there is no experiment {experiment!r}; type one of {', '.join(EXPERIMENTS)}")
    from anyformer.probe import padding, results

    given = {"size": size, "depths": tuple(sorted(set(depths))) if depths else None, "steps": steps, "seeds": seeds}
    sizes = {"size": 12, "depths": (1, 2), "steps": 10, "channels": 4, "fitted": 16, "held": 8} if quick else {}
    sizes |= {name: value for name, value in given.items() if value is not None}
    setting, folder, console = padding.Setting(**sizes), Path(out), Console()
    results.admit(folder)
    torch.set_num_threads(1)  # the networks are too small to gain from more
    found: list[padding.Reading] = []
    with console.status("drawing images") as status:
        for reading in padding.readings(setting, status.update):
            found.append(reading)
            results.append(folder, reading)
            if not console.is_terminal:
                console.print(f"seed {reading.seed}: {reading.net}: {reading.seconds:.1f} s", markup=False)
    results.write_table(folder, found)
    results.draw(folder, found)
    console.print(_table(results.rows(found)))
    console.print("Rank correlation of maps read out of the features: 1 is the map, 0 is nothing.", markup=False)
    for name in (results.LINES, results.TABLE, results.PICTURE):
        console.print(f"{folder / name}", markup=False, highlight=False)
    return 0


def _table(rows: "list[Row]") -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("kernels", "padding", "depth", "accuracy", "column", "row", "middle", "waves", "waves"):
        table.add_column(heading, no_wrap=True)
    for row in rows:
        accuracy = "" if row.accuracy is None else f"{row.accuracy:.2f}"
        known = (row.net.kind, row.net.padding, str(row.net.depth), accuracy)
        table.add_row(*known, *(f"{rank:.2f}" for rank in row.spearman))
    return table
