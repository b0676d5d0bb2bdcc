"""What the experiment leaves: lines of JSON, a table, a picture."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from anyformer.errors import SpecError
from anyformer.probe.data import MAPS, maps
from anyformer.probe.padding import KERNELS, PADDINGS, Net, Reading

LINES, TABLE, PICTURE = "results.jsonl", "table.md", "maps.png"


def admit(folder: Path) -> None:
    """Make the folder, and refuse one that holds results already.

    Raises:
        SpecError: it cannot be made, is a file, or holds results.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(
            f"--out: cannot make the folder {str(folder)!r}: {error.strerror}; give another place"
        ) from None
    if (folder / LINES).exists():
        raise SpecError(f"--out: {str(folder / LINES)!r} exists and is left alone; give another folder, or remove it")


def append(folder: Path, reading: Reading) -> None:
    """Add one line."""
    with (folder / LINES).open("a", encoding="utf-8") as file:
        file.write(json.dumps(reading.line()) + "\n")


@dataclass(frozen=True)
class Row:
    """One network, means over seeds.

    Args:
        accuracy: of telling shapes apart; None: it was not trained.
        pixels: width of the maps.
        spearman, mae: one a map.
    """

    net: Net
    accuracy: float | None
    pixels: int
    spearman: tuple[float, ...]
    mae: tuple[float, ...]


def rows(found: Sequence[Reading]) -> list[Row]:
    """The table."""
    made = []
    for net in dict.fromkeys(each.net for each in found):
        same = [each for each in found if each.net == net]
        known = [each.accuracy for each in same if each.accuracy is not None]
        spearman = tuple(fmean(each.scores[name].spearman for each in same) for name in MAPS)
        mae = tuple(fmean(each.scores[name].mae for each in same) for name in MAPS)
        made.append(Row(net, fmean(known) if known else None, same[0].pixels, spearman, mae))
    return made


def write_table(folder: Path, found: Sequence[Reading]) -> None:
    """The table in Markdown."""
    seeds = len({each.seed for each in found})
    lines = [
        "Rank correlation (Spearman) / mean absolute error of the map that a linear layer reads out of frozen features, on",
        f"images that it was not fitted to, over {seeds} seed{'s' if seeds > 1 else ''}. Accuracy: of naming held-out shapes.",
        "",
        f"| features | accuracy | pixels | {' | '.join(MAPS)} |",
        f"|{'---|' * (len(MAPS) + 3)}",
    ]
    for row in rows(found):
        accuracy = "" if row.accuracy is None else f"{row.accuracy:.2f}"
        scores = (f"{rank:.2f} / {error:.2f}" for rank, error in zip(row.spearman, row.mae, strict=True))
        lines.append(f"| {row.net} | {accuracy} | {row.pixels} | {' | '.join(scores)} |")
    (folder / TABLE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw(folder: Path, found: Sequence[Reading]) -> None:
    """The maps read from one held-out image: a row a network, the deepest of its kind, and the maps themselves above."""
    depth = max(each.net.depth for each in found)
    chosen = [
        each
        for net in (Net(kernel, padding, depth) for kernel in KERNELS for padding in PADDINGS)
        for each in found
        if each.net == net and each.seed == 0
    ]
    chosen += [each for each in found if each.net.kind in ("attention", "pixels") and each.seed == 0]
    figure = Figure(figsize=(1.3 * len(MAPS) + 2.6, 1.15 * (len(chosen) + 1)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(chosen) + 1, len(MAPS))
    truth = maps(max(each.pixels for each in found))
    for line, pictures in enumerate([truth, *(each.drawn for each in chosen)]):
        for column, picture in enumerate(pictures):
            axes = grid[line, column]
            axes.imshow(picture.numpy(), cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
            if line == 0:
                axes.set_title(MAPS[column], fontsize=8)
            elif column:
                score = chosen[line - 1].scores[MAPS[column]]
                axes.set_xlabel(f"{score.spearman:.2f}", fontsize=7, labelpad=1)
        name = "wanted" if line == 0 else str(chosen[line - 1].net).replace(", ", ",\n")
        grid[line, 0].set_ylabel(name, fontsize=7, rotation=0, ha="right", va="center")
        if line:
            grid[line, 0].set_xlabel(f"{chosen[line - 1].scores[MAPS[0]].spearman:.2f}", fontsize=7, labelpad=1)
    figure.savefig(folder / PICTURE, dpi=110)
