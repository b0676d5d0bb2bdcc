"""One row for every attention on recall and on nested lists, from the comparisons in `results/quality`.

The commands that made them stand in `results/quality/commands.sh`.

python -m bench.quality > results/quality/table.md
"""

from collections.abc import Iterator
from pathlib import Path

from anyformer.compare.group import panels
from anyformer.compare.panel import Method, Panel
from anyformer.compare.store import read
from anyformer.model.build import short_name

FOLDER = Path(__file__).parents[1] / "results" / "quality"
TASKS = ("mqar", "listops")


def table(found: dict[str, Panel]) -> Iterator[str]:
    """The lines without attention, then the methods by family; refusals and failures under the table."""
    yield f"| attention | {' | '.join(found)} |"
    yield "|---|" + "---:|" * len(found)
    for task, panel in found.items():
        for name, value in panel.lines():
            cells = (f"{value:.1%}" if each == task else "" for each in found)
            yield f"| *{name}* | {' | '.join(cells)} |"
    columns = {task: {method.key: method for method in panel.methods} for task, panel in found.items()}
    every = {key: method for column in columns.values() for key, method in column.items()}
    for key, method in sorted(every.items(), key=lambda item: item[1].attention_family):
        cells = (_cell(columns[task].get(key), panel.home) for task, panel in found.items())
        yield f"| {_name(method)} | {' | '.join(cells)} |"
    yield ""
    for task, column in columns.items():
        for method in column.values():
            for trial in method.failed[:1]:
                yield f"* {_name(method)} on {task}: {trial.status}: {trial.reason}"


def _name(method: Method) -> str:
    return f"`{short_name(method.key[0])}`".replace("|", "\\|")


def _cell(method: Method | None, length: int) -> str:
    """Mean over seeds, with the lowest and the highest; or why there is none."""
    if method is None:
        return "not run"
    values = sorted(method.values(length).values())
    if not values:
        return method.status
    seeds = f"{values[0]:.1%} to {values[-1]:.1%}" if len(values) > 1 else "one seed"
    failed = f", {len(method.failed)} failed" if method.failed else ""
    return f"{sum(values) / len(values):.1%} ({seeds}{failed})"


def main() -> None:
    """Print the table."""
    found = {task: panels(read(FOLDER / task).records)[0] for task in TASKS}
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
