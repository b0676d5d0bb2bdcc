"""Every attention and mixer beside its peer and dense attention, from the benchmarks in `results/attentions`.

The commands that made them stand in `results/attentions/commands.sh`.

python -m bench.attentions > results/attentions/table.md
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from anyformer.compare.bench_products import useful
from anyformer.compare.bench_record import DENSE, MEASURES, Bench, Cell, Contender, Measure, Setting, Summary, read
from anyformer.compare.text import DASH, TIMES, duration, number, size

FOLDER = Path(__file__).parents[1] / "results" / "attentions"
PARTS = ("patterns", "both", "pairs", "causal", "layers", "layers-causal")
PEERS = {
    "Local(256)": ("lucidrains-local",),
    "Local(256) | Global([0])": ("hf-longformer",),
    "bigbird": ("hf-bigbird",),
    "reformer": ("lucidrains-reformer", "hf-reformer"),
    "routing": ("lucidrains-routing",),
    "sinkhorn": ("lucidrains-sinkhorn",),
    "linformer": ("lucidrains-linformer",),
    "nystrom": ("lucidrains-nystrom",),
    "performer": ("lucidrains-performer",),
    "efficient": ("lucidrains-linear",),
    "topk": ("lucidrains-topk",),
    "longformer": ("hf-longformer",),
    "fnet": ("hf-fnet",),
    "gmlp": ("lucidrains-gmlp",),
    "amlp": ("lucidrains-amlp",),
    "mla": ("hf-mla",),
}
"""The peers of a method. Of those that another package has no method for, only dense attention tells how fast they are."""
CAUSAL_PEERS = {
    "Local(255, 0)": ("lucidrains-local",),
    "linear": ("lucidrains-linear",),
    "performer": ("lucidrains-performer",),
    "reformer": ("lucidrains-reformer",),
    "routing": ("lucidrains-routing",),
    "sinkhorn": ("lucidrains-sinkhorn",),
    "gmlp": ("lucidrains-gmlp",),
    "mla": ("hf-mla",),
}
"""The same of those that look back only."""

_FROM = 2048  # tokens from which on a method must beat dense attention, or 3 times its crossover if that is longer
_SHORTEST, _LONGEST = 16, 2**15  # tokens between which a crossover is looked for
_LINEAR = 1.1  # exponent up to which a cost is linear


@dataclass(frozen=True)
class Method:
    """One method of our own in one benchmark.

    Args:
        setting: what it was timed with.
        cells: by length.  dense: those of dense attention.  peers: those of its peers, by name.
        summary: growth and break-even; None where the benchmark was stopped before its end.
    """

    contender: Contender
    setting: Setting
    cells: dict[int, Cell]
    dense: dict[int, Cell]
    peers: dict[str, dict[int, Cell]]
    summary: Summary | None

    @property
    def name(self) -> str:
        """Without its position, which is none."""
        return self.contender.name.removesuffix(" + none")

    @property
    def direction(self) -> str:
        return "causal" if self.setting.causal else "both"

    @property
    def crossover(self) -> float:
        """The length from which on its formula asks for fewer multiply-adds than dense attention's; infinite if none."""
        return crossover(self.contender, self.setting)

    @property
    def linear(self) -> bool:
        """Whether its multiply-adds grow with the length only."""
        low, high = (operations(self.contender, self.setting, length) for length in (2**12, 2**14))
        return low > 0 and math.log(high / low) / math.log(4) <= _LINEAR

    def beside(self, cells: dict[int, Cell], length: int, measure: Measure) -> float:
        """How many times faster than these cells' method it is; NaN where either was not timed."""
        return ratio(cells.get(length), self.cells.get(length), measure)

    def beats_peers(self) -> bool | None:
        """Whether it is nowhere slower than a peer beyond the scatter of rounds; None where it has none, or none was timed."""
        found = [
            slower(self.cells.get(length), cells.get(length), measure)
            for cells in self.peers.values()
            for length in self.cells
            for measure in MEASURES
        ]
        known = [each for each in found if each is not None]
        return not any(known) if known else None

    def ties(self) -> bool:
        """Whether a peer's median is below its own somewhere, though their rounds overlap."""
        return any(
            self.beside(cells, length, measure) < 1
            for cells in self.peers.values()
            for length in self.cells
            for measure in MEASURES
        )

    def beats_dense(self) -> bool | None:
        """Whether it beats dense attention forward + backward at all lengths where it must; None where it need not."""
        least = max(_FROM, 3 * self.crossover)
        due = [self.beside(self.dense, length, "forward_backward") > 1 for length in self.cells if length >= least]
        return all(due) if due else None

    def memory_grows_linearly(self) -> bool | None:
        """Whether its memory does, where its cost does."""
        growth = None if self.summary is None else self.summary.forward_backward.memory
        return growth.slope <= _LINEAR if growth is not None and self.linear else None


def ratio(other: Cell | None, own: Cell | None, measure: Measure) -> float:
    """Median seconds of one cell over those of another; NaN where either has none."""
    costs = [None if cell is None else cell.cost(measure) for cell in (other, own)]
    if costs[0] is None or costs[1] is None:
        return math.nan
    return costs[0].time.median / costs[1].time.median


def slower(own: Cell | None, other: Cell | None, measure: Measure) -> bool | None:
    """Whether three quarters of one's rounds took longer than three quarters of the other's; None where either has no time."""
    costs = [None if cell is None else cell.cost(measure) for cell in (own, other)]
    if costs[0] is None or costs[1] is None:
        return None
    return costs[0].time.low > costs[1].time.high


@cache
def work(contender: Contender, setting: Setting, length: int) -> dict[Measure, float] | None:
    """`useful`, asked once: to count the pairs of a union takes long."""
    return useful(contender, setting, length)


def operations(contender: Contender, setting: Setting, length: int) -> float:
    """Floating point operations of a forward, by formula; NaN where the method does not say."""
    found = work(contender, setting, length)
    return math.nan if found is None else found["forward"]


def crossover(contender: Contender, setting: Setting) -> float:
    """The least length, to a fiftieth, from which on a method's formula asks for less than dense attention's."""

    def less(length: int) -> bool:
        return operations(contender, setting, length) < operations(DENSE, setting, length)

    high = _SHORTEST
    while not less(high):
        if high >= _LONGEST:
            return math.inf
        high *= 2
    if high == _SHORTEST:
        return 0.0
    low = high // 2
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        low, high = (low, middle) if less(middle) else (middle, high)
    return float(high)


def methods(bench: Bench) -> list[Method]:
    """Those of our own in a benchmark, in its order."""
    cells = {each: {cell.length: cell for cell in bench.of(each)} for each in bench.contenders}
    by_name = {each.name: cells[each] for each in bench.contenders if each.role == "peer"}
    summaries = {each.contender: each for each in bench.summaries}
    found = []
    for each in bench.contenders:
        if each.role == "own":
            known, name = CAUSAL_PEERS if bench.run.setting.causal else PEERS, each.name.removesuffix(" + none")
            named = known.get(name) or known.get(name.split("(")[0], ())
            peers = {name: by_name[name] for name in named if name in by_name}
            found.append(Method(each, bench.run.setting, cells[each], cells[DENSE], peers, summaries.get(each)))
    return found


def costs(found: list[Method]) -> Iterator[str]:
    """A line for each method and length: seconds, how many times faster than dense attention and peers, work and memory."""
    yield (
        "| method | direction | tokens | forward | forward + backward | speed over dense f, f+b | over its peers f, f+b "
        "| useful GFLOP f, f+b | memory f+b |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for method in found:
        for length, cell in method.cells.items():
            yield _line(method, length, cell)


def _line(method: Method, length: int, cell: Cell) -> str:
    start = f"| {_escaped(method.name)} | {method.direction} | {length} |"
    if cell.forward is None or cell.forward_backward is None:
        return f"{start} {cell.status}: {_escaped(cell.reason)} | | | | | |"
    mark = "≈" if cell.dense_from is not None else ""
    dense = ", ".join(mark + _times(method.beside(method.dense, length, measure)) for measure in MEASURES)
    peers = "; ".join(
        f"{', '.join(_times(method.beside(cells, length, measure)) for measure in MEASURES)} {name}"
        if length in cells and cells[length].forward is not None
        else f"{name}: {cells[length].status if length in cells else 'not timed'}"
        for name, cells in method.peers.items()
    )
    asked = work(method.contender, method.setting, length)
    told = DASH if asked is None else ", ".join(number(asked[measure] / 1e9, 3) for measure in MEASURES)
    taken = f"{duration(cell.forward.time.median)} | {duration(cell.forward_backward.time.median)}"
    return f"{start} {taken} | {dense} | {peers or DASH} | {told} | {size(cell.forward_backward.memory)} |"


def goals(found: list[Method]) -> Iterator[str]:
    """A line for each method: growth, crossover by formula, measured break-even, and whether each goal holds."""
    yield (
        "| method | direction | exponent of time f+b | of memory f+b | crossover by formula | break-even f+b "
        "| not slower than its peers | beats dense from max(2048, 3 crossovers) | memory grows linearly |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for method in found:
        trend = None if method.summary is None else method.summary.forward_backward
        time, memory = (DASH, DASH) if trend is None else (trend.time or DASH, trend.memory or DASH)
        even = DASH if trend is None else trend.break_even
        cross = "never" if math.isinf(method.crossover) else f"{method.crossover:.0f}"
        peers = "tied" if method.beats_peers() and method.ties() else _held(method.beats_peers())
        held = [peers, _held(method.beats_dense()), _held(method.memory_grows_linearly())]
        yield (
            f"| {_escaped(method.name)} | {method.direction} | {time} | {memory} | {cross} | {even} | {' | '.join(held)} |"
        )


def _held(found: bool | None) -> str:
    return DASH if found is None else "yes" if found else "**no**"


def _times(value: float) -> str:
    return DASH if math.isnan(value) else f"{number(value, 3)}{TIMES}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    found = [each for part in PARTS if (FOLDER / part).is_dir() for each in methods(read(FOLDER / part))]
    print(*goals(found), "", *costs(found), sep="\n")


if __name__ == "__main__":
    main()
