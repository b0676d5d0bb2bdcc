"""What the ways through softmax attention cost: the model by which "auto" chooses, measured once for a machine.

`anyformer doctor --measure` keeps what it measures in a file; without one the built-in numbers hold. `ANYFORMER_COSTS` pins
them: the name of another file, or `built-in`.
"""

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from anyformer.errors import SpecError
from anyformer.ops.softmax import dense, fused
from anyformer.ops.window import window_attention

BUILT_IN = "built-in"
ROW = 128
"""Queries of a tile that a window is cut into."""

LOOKED_UP = 10.0
"""Pairs of the fused dense kernel that cost as much as one pair whose key is looked up."""

_LENGTHS = (128, 256, 384, 512, 768, 1024, 1536)
_ROUNDS = 4
_HEADS, _WIDTH, _REACH = 4, 64, 256


@dataclass(frozen=True)
class Costs:
    """What decides between tiles and the dense kernels.

    Args:
        tile: pairs of the fused dense kernel that cost as much as one pair in a tile.
        biased: queries from which on tiles add a bias by offset to all pairs faster than the fused kernel.
        learned: the same against the written-out softmax, which a learned term takes on the dense path.
    """

    tile: float = 1.5
    biased: int = 768
    learned: int = 256


@lru_cache(maxsize=1)
def costs() -> Costs:
    """The costs of this machine: those measured for it, else the built-in ones. Read once a process.

    Raises:
        SpecError: the file holds something else.
    """
    path = costs_file()
    if os.environ.get("ANYFORMER_COSTS") == BUILT_IN or not path.is_file():
        return Costs()
    found = _read(path).get(machine())
    if found is None:
        return Costs()
    names = {field.name for field in fields(Costs)}
    if not isinstance(found, dict) or set(found) != names or not all(_positive(value) for value in found.values()):
        raise SpecError(f"{path}: expected {', '.join(sorted(names))} as positive numbers, got {found!r}; delete it")
    return Costs(**found)


def costs_file() -> Path:
    """Where costs are kept: what ANYFORMER_COSTS names, else the user's cache folder."""
    if named := os.environ.get("ANYFORMER_COSTS"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anyformer" / "costs.json"


def machine() -> str:
    """What costs depend on: processor, instructions, torch and its threads."""
    processor = platform.processor() or platform.machine()
    return f"{processor} {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, {torch.get_num_threads()} threads"


def keep(measured: Costs) -> Path:
    """Remember the costs of this machine beside those of others, and use them from now on."""
    path = costs_file()
    known = _read(path) if path.is_file() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps({**known, machine(): asdict(measured)}, indent=2) + "\n")
    os.replace(temporary, path)
    costs.cache_clear()
    return path


def measure() -> Costs:
    """Time the ways against each other, forward and backward, in some seconds."""
    q, k, v = (torch.randn(1, _HEADS, _LENGTHS[-1], _WIDTH, requires_grad=True) for _ in range(3))
    n = q.shape[2]
    window, whole = _race(
        (q, k, v),
        lambda q, k, v: window_attention(q, k, v, left=_REACH, right=_REACH, scale=1.0, want_lse=False)[0],
        lambda q, k, v: fused(q, k, v, allowed=None, bias=None, lower_triangle=False, scale=1.0, dropout=0.0),
    )
    tile = window / (2 * _REACH + ROW) / (whole / n)
    return Costs(round(tile, 2), _crossing((q, k, v), _fused), _crossing((q, k, v), _written_out))


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _crossing(tensors: tuple[Tensor, ...], other: Callable[[Tensor], Attend]) -> int:
    """The first length at which tiles add a bias to all pairs faster than another way."""
    for n in _LENGTHS:
        q, k, v = (x[:, :, :n].detach().requires_grad_() for x in tensors)
        bias = torch.zeros(_HEADS, n)
        tiles, theirs = _race(
            (q, k, v),
            lambda q, k, v, n=n, bias=bias: window_attention(
                q, k, v, left=n - 1, right=0, bias=bias, scale=1.0, want_lse=False
            )[0],
            other(torch.zeros(1, _HEADS, n, n)),
        )
        if tiles < theirs:
            return n
    return 2 * _LENGTHS[-1]


def _fused(bias: Tensor) -> Attend:
    allowed = torch.ones_like(bias, dtype=torch.bool).tril()
    return lambda q, k, v: fused(q, k, v, allowed=allowed, bias=bias, lower_triangle=False, scale=1.0, dropout=0.0)


def _written_out(bias: Tensor) -> Attend:
    allowed = torch.ones_like(bias, dtype=torch.bool).tril()
    return lambda q, k, v: dense(q, k, v, allowed=allowed, bias=bias, scale=1.0)[0]


def _race(tensors: tuple[Tensor, ...], *ways: Attend) -> list[float]:
    """The least seconds of each way, forward and backward, over interleaved rounds."""
    best = [float("inf")] * len(ways)
    for number in range(1 + _ROUNDS):
        for index, way in enumerate(ways):
            started = time.perf_counter()
            torch.autograd.grad(way(*tensors).sum(), tensors)
            if number:  # the first warms up
                best[index] = min(best[index], time.perf_counter() - started)
    return best


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _read(path: Path) -> dict:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SpecError(
            f"{path} holds no costs ({error}); delete it or run 'anyformer doctor --measure' again"
        ) from None
    if not isinstance(known, dict):
        raise SpecError(f"{path} holds no costs; delete it or run 'anyformer doctor --measure' again")
    return known
