"""What the engine must show, from the benchmarks in `results/engine`: each row with its goal, the figure, and whether it holds.

The commands that made them stand in `results/engine/commands.sh`.

python -m bench.engine > results/engine/table.md
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from anyformer.compare.bench_record import Bench, Cell, Measure, read

FOLDER = Path(__file__).parents[1] / "results" / "engine"
DENSE = "dense"


@dataclass(frozen=True)
class Row:
    """One line of the table: what is claimed, and whether the measured figure reaches the goal."""

    what: str
    goal: str
    measured: float
    holds: bool
    unit: str = "x"

    def __str__(self) -> str:
        measured = "not measured" if math.isnan(self.measured) else f"{self.measured:.2f}{self.unit}"
        return f"| {self.what} | {self.goal} | {measured} | {'yes' if self.holds else '**no**'} |"


def seconds(bench: Bench, name: str, length: int, measure: Measure) -> float:
    """Median seconds of a contender at a length; NaN where its benchmark gave none, so that no goal is reached by it."""
    (cell,) = [each for each in bench.cells if name in _names(each) and each.length == length]
    cost = cell.cost(measure)
    return math.nan if cost is None else cost.time.median


def _names(cell: Cell) -> tuple[str, str]:
    """What a cell is called, and the same without the attention's knobs."""
    return cell.name, f"{cell.name.split('(')[0]} + {cell.contender.position}"


def speeds(folder: str, name: str, other: str, goals: dict[tuple[int, Measure], float]) -> list[Row]:
    """How many times faster than another contender, against the least it must be."""
    bench, rows = read(FOLDER / folder), []
    for (length, measure), goal in goals.items():
        found = seconds(bench, other, length, measure) / seconds(bench, name, length, measure)
        told = measure.replace("_", " + ")
        rows.append(
            Row(f"{name}, {told}, faster than {other} at {length}", f"at least {goal:g}x", found, found >= goal)
        )
    return rows


def overhead(folder: str, name: str, plain: str, length: int, measure: Measure, goal: float) -> Row:
    """The time with an encoding over that without."""
    bench = read(FOLDER / folder)
    found = seconds(bench, name, length, measure) / seconds(bench, plain, length, measure)
    told = measure.replace("_", " + ")
    return Row(f"{name}, {told}, over {plain} at {length}", f"at most {goal:g}x", found, found <= goal)


def growth(
    folder: str, name: str, of: Callable[[Bench, str, int], float], lengths: tuple[int, int], goal: float
) -> Row:
    """The exponent between two lengths."""
    bench = read(FOLDER / folder)
    low, high = (of(bench, name, length) for length in lengths)
    found = math.log(high / low) / math.log(lengths[1] / lengths[0])
    what = "memory" if of is memory else "time"
    return Row(
        f"{name}, exponent of {what} from {lengths[0]} to {lengths[1]}", f"at most {goal:g}", found, found <= goal, ""
    )


def memory(bench: Bench, name: str, length: int) -> float:
    """Peak bytes beyond the inputs, forward + backward."""
    (cell,) = [each for each in bench.cells if name in _names(each) and each.length == length]
    assert cell.forward_backward is not None
    assert cell.forward_backward.memory is not None
    return float(cell.forward_backward.memory)


def both(bench: Bench, name: str, length: int) -> float:
    return seconds(bench, name, length, "forward_backward")


def table() -> list[Row]:
    """Every row whose benchmark has been run, in the order of the goals."""
    f: Measure = "forward"
    fb: Measure = "forward_backward"
    local, hub, big, causal = (
        f"{name} + none" for name in ("Local(256)", "Local(256) | Global([0])", "bigbird", "Local(255, 0)")
    )
    inputs = 3 * 65536 * 512 * 4
    parts: dict[str, Callable[[], list[Row]]] = {
        "dense": lambda: [
            *speeds("dense", local, DENSE, {(2048, f): 2.2, (4096, f): 4.4, (16384, f): 18, (65536, f): 72}),
            *speeds("dense", local, DENSE, {(2048, fb): 2.0, (4096, fb): 4.2, (16384, fb): 17, (65536, fb): 68}),
            at_most(
                "peak extra memory over q, k and v at 65536", memory(read(FOLDER / "dense"), local, 65536) / inputs, 4
            ),
            growth("dense", local, memory, (16384, 65536), 1.05),
        ],
        "short": lambda: speeds("short", "Local(64) + none", DENSE, {(1024, f): 2.5, (1024, fb): 2.0}),
        "peers-4096": lambda: [
            *speeds("peers-4096", hub, "hf-longformer", {(4096, fb): 7}),
            *speeds("peers-4096", big, "hf-bigbird", {(4096, fb): 3}),
        ],
        "peers-16384": lambda: [
            *speeds("peers-16384", hub, "hf-longformer", {(16384, fb): 9}),
            *speeds("peers-16384", big, "hf-bigbird", {(16384, fb): 8}),
        ],
        "bigbird": lambda: speeds("bigbird", big, DENSE, {(1024, fb): 1.0, (2048, fb): 1.4}),
        "causal": lambda: [
            *speeds("causal", causal, "lucidrains-local", {(4096, fb): 4, (16384, fb): 4}),
            *speeds("causal", "linear + none", "lucidrains-linear", {(16384, fb): 2}),
            growth("causal", "linear + none", both, (4096, 16384), 1.05),
        ],
        "terms": lambda: [
            overhead("terms", "Local(256) + t5", local, 4096, fb, 1.25),
            *(overhead("terms", "Local(256) + alibi", local, 4096, measure, 1.15) for measure in (f, fb)),
        ],
        "alibi": lambda: [
            overhead("alibi", "softmax + alibi", "softmax + none", length, measure, 1.15)
            for length in (4096, 16384)
            for measure in (f, fb)
        ],
        "layers": lambda: [
            overhead("layers", each.name, DENSE, length, measure, 1.1)
            for each in read(FOLDER / "layers").contenders[1:]
            for length in (128, 256, 512)
            for measure in (f, fb)
        ],
    }
    return [row for name, rows in parts.items() if (FOLDER / name).is_dir() for row in rows()]


def at_most(what: str, found: float, goal: float) -> Row:
    return Row(what, f"at most {goal:g}x", found, found <= goal)


def main() -> None:
    print("| what | goal | measured | holds |\n|---|---|---|---|")
    for row in table():
        print(row)


if __name__ == "__main__":
    main()
