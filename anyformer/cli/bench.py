"""`anyformer bench`: the length from which an attention is faster than dense attention on this machine."""

import shlex
import sys
import time
from pathlib import Path

from rich.console import Console

from anyformer.compare.bench import Request, bench, setting_of
from anyformer.compare.bench_chart import draw
from anyformer.compare.bench_record import RESULTS, Bench, read
from anyformer.compare.bench_table import WIDE, tables
from anyformer.compare.chart import render

DEFAULT_ATTENTIONS = ("local(256)", "bigbird", "linear")
DEFAULT_LENGTHS = (1024, 2048, 4096, 8192)
CHART = "bench"


def run(
    attentions: list[str],
    positions: list[str],
    peers: list[str],
    lengths: list[int],
    heads: int,
    head_dim: int,
    batch: int,
    causal: bool,
    what: str,
    dtype: str,
    threads: int,
    seconds: float,
    out: str,
) -> int | None:
    """Time everything, write the lines and the chart, print the tables."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)  # nobody looks at a file through a narrow window
    request = Request(
        attentions=tuple(attentions or (() if peers else DEFAULT_ATTENTIONS)),
        positions=tuple(positions or ("none",)),
        peers=tuple(peers),
        lengths=tuple(lengths or DEFAULT_LENGTHS),
        setting=setting_of(
            {
                "heads": heads,
                "head_dim": head_dim,
                "batch": batch,
                "causal": causal,
                "what": what,
                "dtype": dtype,
                "threads": threads,
            }
        ),
        seconds=seconds,
        command=shlex.join(["anyformer", *sys.argv[1:]]),
    )
    folder = Path(out or time.strftime("runs/bench-%Y%m%d-%H%M%S"))
    stopped = False
    with console.status("starting") as status:
        try:
            bench(request, folder, lambda text: status.update(text))
        except KeyboardInterrupt:
            stopped = True
    lines = folder / RESULTS
    if stopped and not (lines.is_file() and lines.stat().st_size):
        console.print("stopped before anything was timed")
        return 130
    _show(read(folder), folder, console)
    return 130 if stopped else 0


def _show(found: Bench, folder: Path, console: Console) -> None:
    figure = draw(found)
    for kind in ("png", "svg"):
        (folder / f"{CHART}.{kind}").write_bytes(render(figure, kind))
    console.print(tables(found, console.width))
    console.print(f"\n{folder / RESULTS}, {folder / CHART}.png, {folder / CHART}.svg", markup=False, highlight=False)
