"""`anyformer report`: table, chart and page again, from the lines alone."""

from pathlib import Path

from rich.console import Console

from anyformer.compare import report


def run(folder: str, baseline: str | None) -> int | None:
    """Write the chart and the page beside the results, and print the table."""
    show(report.write(folder, baseline=baseline), Path(folder), Console())
    return 0


def show(made: report.Report, folder: Path, console: Console) -> None:
    """Print the table and say where the chart and the page lie."""
    console.print(made.table())
    for name in ("report.html", "chart.png", "results.jsonl"):
        console.print(f"{folder / name}", markup=False, highlight=False)
