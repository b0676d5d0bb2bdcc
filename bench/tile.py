"""How much faster than dense attention the tiled layouts are: interleaved rounds in one process, the fastest of each.

On one thread the clock counts processor time, so that others on the machine disturb little; on more it is the wall's.

python -m bench.tile --threads 1 --seconds 10 local-4096 bigbird-2048
"""

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anyformer.ops.blocks import block_attention
from anyformer.ops.window import window_attention

HEADS, WIDTH, BLOCK = 8, 64, 64
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def window(left: int, right: int, **extras: Any) -> Attend:
    scale = WIDTH**-0.5
    return lambda q, k, v: window_attention(q, k, v, left=left, right=right, **extras, scale=scale, want_lse=False)[0]


def bigbird(n: int, **extras: Any) -> Attend:
    """Blocks of 64: the neighbours, the first and the last, three at random; the first and the last read all."""
    blocks, draw = n // BLOCK, random.Random(0)
    offsets, keys = [], []
    for _ in range(HEADS):
        row = [len(keys)]
        for block in range(blocks):
            fixed = {0, blocks - 1, *range(max(block - 1, 0), min(block + 2, blocks))}
            others = sorted(set(range(blocks)) - fixed)
            every = block in (0, blocks - 1)
            keys += sorted(fixed | set(others if every else draw.sample(others, min(3, len(others)))))
            row.append(len(keys))
        offsets.append(row)
    lists = {"block": BLOCK, "offsets": torch.tensor(offsets), "keys": torch.tensor(keys, dtype=torch.int32)}
    return lambda q, k, v: block_attention(q, k, v, **lists, **extras, scale=WIDTH**-0.5, want_lse=False)[0]


def cases(name: str) -> tuple[int, dict[str, Attend]]:
    """The length and the contenders of a case such as local-4096."""
    kind, n = name.rsplit("-", 1)
    length = int(n)
    reach = {"narrow": (64, 64), "causal": (255, 0)}.get(kind, (256, 256))
    if kind == "bigbird":
        bias = torch.randn(HEADS, 2 * length - 1, requires_grad=True)
        return length, {"bigbird": bigbird(length), "with bias": bigbird(length, bias=bias)}
    bias = torch.randn(HEADS, sum(reach) + 1, requires_grad=True)
    table = torch.randn(HEADS, sum(reach) + 1, WIDTH, requires_grad=True)
    first = torch.zeros(1, 1, dtype=torch.long)
    return length, {
        kind: window(*reach),
        "with bias": window(*reach, bias=bias),
        "with a global key": window(*reach, global_keys=first),
        "with a query table": window(*reach, query_table=table),
    }


def measure(runs: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Milliseconds of the fastest of many interleaved rounds."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run()
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < 2 or time.perf_counter() < end:
        for name, run in runs.items():
            start = clock()
            run()
            best[name] = min(best[name], (clock() - start) * 1e3)
        rounds += 1
    return best


def report(name: str, seconds: float) -> None:
    n, contenders = cases(name)
    q, k, v = (torch.randn(1, HEADS, n, WIDTH, requires_grad=True) for _ in range(3))
    gradient = torch.randn(1, HEADS, n, WIDTH)

    def forward(attend: Attend) -> Callable[[], object]:
        return torch.no_grad()(lambda: attend(q, k, v))

    def both(attend: Attend) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), gradient)

    everyone = {"dense": F.scaled_dot_product_attention} | contenders
    print(f"{name}, {torch.get_num_threads()} threads")
    for title, kind in (("forward", forward), ("forward+backward", both)):
        best = measure({key: kind(attend) for key, attend in everyone.items()}, seconds)
        for key, milliseconds in best.items():
            print(f"  {title:17} {key:20} {milliseconds:9.2f} ms  {best['dense'] / milliseconds:6.2f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["narrow-1024", "local-2048", "local-4096", "bigbird-2048"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=10, help="for each case and direction")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.cases:
        report(name, arguments.seconds)


if __name__ == "__main__":
    main()
