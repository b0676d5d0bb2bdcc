"""Where the seconds of a benchmark's row go, beside those that its matrix products alone would take.

Forward + backward on one thread, in processor time. Whole calls are interleaved with the other contender's, the fastest of each.
The parts are those of the fastest of some rounds in which each operator is timed. The limit is the count of all products of the
tiles at the rate that `torch.bmm` reaches on tiles of this shape.

python -m bench.seconds causal-4096 hub-4096 bigbird-1024
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anyformer.compare.bench_calls import Calls, Inputs, own_calls
from anyformer.compare.bench_peers import peer_calls
from anyformer.compare.bench_record import Contender, Setting
from anyformer.ops.window_cut import block_rows
from bench.tile import HEADS, WIDTH, measure

PRODUCTS = 7  # two forward; the scores again and four backward
PARTS = {
    "products": ("aten::bmm", "aten::baddbmm", "aten::baddbmm_", "aten::addmm", "aten::addmm_", "aten::mm"),
    "softmax and its gradient": ("aten::softmax", "aten::_softmax", "aten::_softmax_backward_data"),
    "copies and zeros": ("aten::copy_", "aten::fill_", "aten::zero_", "aten::clone", "aten::cat"),
    "gathers and scatters": (
        "aten::index_select",
        "aten::index_add_",
        "aten::index_copy_",
        "aten::index_fill_",
        "aten::gather",
        "aten::scatter",
        "aten::scatter_",
        "aten::scatter_add_",
    ),
    "sums": ("aten::add_", "aten::add", "aten::sum", "aten::mul", "aten::mul_"),
}


@dataclass(frozen=True)
class Case:
    """One kind of row.

    Args:
        attention: the spec.  other: a peer, or "dense".
        tile: tiles at once, their rows and their columns.
        columns: columns that are computed for each query, at a length; None: the products that it does are counted.
    """

    attention: str
    other: str
    causal: bool
    tile: tuple[int, int, int]
    columns: Callable[[int], float] | None


def window(attention: str, other: str, left: int, right: int, *, causal: bool = False) -> Case:
    block = block_rows(left + right)
    columns = -(-(block + left + right) // 16) * 16
    return Case(attention, other, causal, (300_000 // (block * columns), block, columns), lambda n: columns)


def lists(n: int) -> float:
    """Blocks of 64: each reads the neighbours, the first and the last and three more; the first and the last read all."""
    blocks = n // 64
    near = [len({0, blocks - 1, *range(max(t - 1, 0), min(t + 2, blocks))}) for t in range(1, blocks - 1)]
    return 64 * (2 * blocks + sum(min(each + 3, blocks) for each in near)) / blocks


CASES = {
    "causal": window("Local(255, 0)", "lucidrains-local", 255, 0, causal=True),
    "local": window("Local(256)", "dense", 256, 256),
    "hub": window("Local(256) | Global([0])", "hf-longformer", 256, 256),
    "bigbird": Case("bigbird(block=64, random=3)", "dense", False, (4, 64, 512), lists),
    "bigbird-16384": Case("bigbird(block=64, random=3)", "hf-bigbird", False, (4, 64, 512), lists),
    "linear": Case("linear", "lucidrains-linear", True, (8, 128, 64), None),
}
DENSE_TO = 8192  # tokens up to which dense attention is measured; beyond, that time grows with their square


def rate(tile: tuple[int, int, int]) -> float:
    """Floating point operations a second of `torch.bmm` on tiles of this shape."""
    count, rows, columns = tile
    a, b = torch.randn(count, rows, WIDTH), torch.randn(count, WIDTH, columns)
    out = torch.empty(count, rows, columns)
    best = measure({"bmm": lambda: torch.bmm(a, b, out=out)}, 2.0)["bmm"]
    return 2 * count * rows * columns * WIDTH / best * 1e3


class Spent(TorchDispatchMode):
    """Milliseconds of processor time in each operator, those inside our own nodes included."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, float] = defaultdict(float)
        self.operations = 0  # of the products

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "anyformer":
            with self:
                return func.function(*args, **(kwargs or {}))
        start = time.thread_time()
        result = func(*args, **(kwargs or {}))
        self.by_name[func._schema.name] += (time.thread_time() - start) * 1e3
        if func._schema.name in PARTS["products"]:
            a, b = args[-2:]
            self.operations += 2 * a.numel() * b.shape[-1]
        return result


def parts(call: Callable[[], object], rounds: int) -> tuple[dict[str, float], int]:
    """Milliseconds of each part in the round that took least, and the floating point operations of its products."""
    best: dict[str, float] = {}
    operations = 0
    for _ in range(rounds):
        with Spent() as spent:
            call()
        found = {part: sum((spent.by_name[name] for name in names), 0.0) for part, names in PARTS.items()}
        if not best or sum(found.values()) < sum(best.values()):
            best, operations = found, spent.operations
    return best, operations


def report(name: str, seconds: float, rounds: int) -> None:
    kind, length = name.rsplit("-", 1)
    case, n = CASES.get(name) or CASES[kind], int(length)
    setting = Setting(heads=HEADS, head_dim=WIDTH, causal=case.causal, threads=1)
    inputs = Inputs(setting)
    own = own_calls(Contender(role="own", attention=case.attention, position="none"), setting, n, inputs)
    if case.other == "dense":
        other = own_calls(Contender(role="dense", attention="dense", position=""), setting, min(n, DENSE_TO), inputs)
    else:
        other = peer_calls(case.other, setting, n, inputs)
    contenders: dict[str, Calls] = {case.attention: own, case.other: other}
    if other.less is not None:
        contenders["its linear maps"] = other.less
    times = measure({key: each.forward_backward for key, each in contenders.items()}, seconds)
    theirs = times[case.other] - times.get("its linear maps", 0.0)
    if case.other == "dense":
        theirs *= (n / min(n, DENSE_TO)) ** 2
    print(f"{case.attention}, n = {n}, forward + backward, one thread")
    print(
        f"  whole {times[case.attention]:.1f} ms; {case.other} {theirs:.1f} ms: {theirs / times[case.attention]:.2f}x"
    )
    found, operations = parts(own.forward_backward, rounds)
    found["everything else"] = times[case.attention] - sum(found.values())
    for part, milliseconds in found.items():
        print(f"  {part:26} {milliseconds:8.1f} ms")
    reached = rate(case.tile)
    of = "the products that it does"
    if case.columns is not None:
        operations = PRODUCTS * 2 * HEADS * n * case.columns(n) * WIDTH
        of = f"the products of {case.columns(n):.0f} columns a query"
    limit = operations / reached * 1e3
    print(f"  limit {limit:.1f} ms: {of} at {reached / 1e9:.0f} GFLOP/s")
    print(f"  at the limit {theirs / limit:.2f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["causal-4096", "causal-16384", "hub-4096", "bigbird-1024"])
    parser.add_argument("--seconds", type=float, default=15, help="for each case")
    parser.add_argument("--rounds", type=int, default=10, help="in which each operator is timed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.cases:
        report(name, arguments.seconds, arguments.rounds)


if __name__ == "__main__":
    main()
