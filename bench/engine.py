"""What the engine must show, from the benchmarks in `results/engine`: each row with its goal, the figure, and whether it holds.

The commands that made them stand in `results/engine/commands.sh`.

python -m bench.engine > results/engine/table.md
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from anyformer.compare.bench_record import Bench, Measure, read

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
        return f"| {self.what} | {self.goal} | {self.measured:.2f}{self.unit} | {'yes' if self.holds else '**no**'} |"


def seconds(bench: Bench, name: str, length: int, measure: Measure) -> float:
    """Median seconds of a contender at a length."""
    (cell,) = [each for each in bench.cells if each.name == name and each.length == length]
    cost = cell.cost(measure)
    if cost is None:
        raise ValueError(f"{name} at {length}: {cell.status}: {cell.reason}")
    return cost.time.median


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
    (cell,) = [each for each in bench.cells if each.name == name and each.length == length]
    assert cell.forward_backward is not None
    assert cell.forward_backward.memory is not None
    return float(cell.forward_backward.memory)


def both(bench: Bench, name: str, length: int) -> float:
    return seconds(bench, name, length, "forward_backward")


def table() -> list[Row]:
    """Every row, in the order of the goals."""
    f: Measure = "forward"
    fb: Measure = "forward_backward"
    local, hub, big = "Local(256) + none", "Local(256) | Global([0]) + none", "bigbird + none"
    rows = speeds("dense", local, DENSE, {(2048, f): 2.2, (4096, f): 4.4, (16384, f): 18, (65536, f): 72})
    rows += speeds("dense", local, DENSE, {(2048, fb): 2.0, (4096, fb): 4.2, (16384, fb): 17, (65536, fb): 68})
    rows += speeds("short", "Local(64) + none", DENSE, {(1024, f): 2.5, (1024, fb): 2.0})
    for length, (far, far_big) in {4096: (7, 3), 16384: (9, 8)}.items():
        rows += speeds(f"peers-{length}", hub, "hf-longformer", {(length, fb): far})
        rows += speeds(f"peers-{length}", big, "hf-bigbird", {(length, fb): far_big})
    rows += speeds("bigbird", big, DENSE, {(1024, fb): 1.0, (2048, fb): 1.4})
    causal = "Local(255, 0) + none"
    rows += speeds("causal", causal, "lucidrains-local", {(4096, fb): 4, (16384, fb): 4})
    rows += speeds("causal", "linear + none", "lucidrains-linear", {(16384, fb): 2})
    rows += [growth("causal", "linear + none", both, (4096, 16384), 1.05)]
    rows += [overhead("terms", "Local(256) + t5", local, 4096, fb, 1.25)]
    rows += [overhead("terms", "Local(256) + alibi", local, 4096, measure, 1.15) for measure in (f, fb)]
    for length in (4096, 16384):
        rows += [overhead("alibi", "softmax + alibi", "softmax + none", length, measure, 1.15) for measure in (f, fb)]
    inputs = 3 * 65536 * 512 * 4
    needed = memory(read(FOLDER / "dense"), local, 65536) / inputs
    rows += [
        Row(
            f"{local}, forward + backward, peak extra memory over q, k and v at 65536",
            "at most 4x",
            needed,
            needed <= 4,
        )
    ]
    rows += [growth("dense", local, memory, (16384, 65536), 1.05)]
    rows += [growth("alibi", "softmax + alibi", memory, (4096, 16384), 1.05)]
    layers = read(FOLDER / "layers")
    for contender in layers.contenders[1:]:
        for length in (128, 256, 512):
            for measure in (f, fb):
                name = contender.name
                found = seconds(layers, name, length, measure) / seconds(layers, DENSE, length, measure)
                told = measure.replace("_", " + ")
                rows.append(Row(f"layer {name}, {told}, over dense at {length}", "at most 1.1x", found, found <= 1.1))
    return rows


def main() -> None:
    print("| what | goal | measured | holds |\n|---|---|---|---|")
    for row in table():
        print(row)


if __name__ == "__main__":
    main()
