"""The simplest patterns; larger ones are joined from them with `|`, `&` and `~`.

Windows and strides count tokens, `RandomBlocks` counts blocks. A query always means its place: the number of real
tokens before it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Bool
from torch import Tensor

from anyformer.errors import SpecError
from anyformer.pattern._algebra import PerHead, PerLayer
from anyformer.pattern._facts import Facts, Places, Traits, whole_number
from anyformer.pattern._global import Flagged, Global, global_tokens
from anyformer.pattern._random import Random, RandomBlocks
from anyformer.pattern.base import Pattern
from anyformer.pattern.layout import SOME, WHOLE, Cover, Grid
from anyformer.typing import Count, Size


@dataclass(frozen=True, repr=False)
class Full(Pattern):
    """Every query meets every key."""

    def meets(self, batch: Places, head: Places, q: Places, k: Places, facts: Facts) -> Bool[Tensor, "..."]:
        return q.new_ones((), dtype=torch.bool)

    def cover(self, grid: Grid) -> Cover:
        return grid.constant(WHOLE)

    def traits(self, causal: bool) -> Traits:
        return Traits(band=(None, None))

    def __repr__(self) -> str:
        return "Full()"


@dataclass(frozen=True, repr=False)
class Causal(Pattern):
    """A query meets itself and every key before it: k <= q."""

    def meets(self, batch: Places, head: Places, q: Places, k: Places, facts: Facts) -> Bool[Tensor, "..."]:
        return k <= q

    def cover(self, grid: Grid) -> Cover:
        return grid.intervals(lambda q: (torch.zeros_like(q), q))

    def traits(self, causal: bool) -> Traits:
        return Traits(band=(None, 0))

    def __repr__(self) -> str:
        return "Causal()"


@dataclass(frozen=True, repr=False, init=False)
class Local(Pattern):
    """A sliding window: -left <= k - q <= right. The query's own place is always in.

    Args:
        left: number of keys strictly before the query.
        right: number of keys strictly after it; None: as many as before.
    """

    left: int
    right: int

    def __init__(self, left: Count = 128, right: Count | None = None) -> None:
        object.__setattr__(self, "left", whole_number("Local", "left", left, 0, "Local(64) or Local(64, 0)"))
        object.__setattr__(
            self, "right", left if right is None else whole_number("Local", "right", right, 0, "Local(64, 0)")
        )

    def meets(self, batch: Places, head: Places, q: Places, k: Places, facts: Facts) -> Bool[Tensor, "..."]:
        return (k >= q - self.left) & (k <= q + self.right)

    def cover(self, grid: Grid) -> Cover:
        return grid.intervals(lambda q: (q - self.left, q + self.right))

    def traits(self, causal: bool) -> Traits:
        return Traits(band=(self.left, self.right), horizon=self.left)

    def __repr__(self) -> str:
        return f"Local({self.left})" if self.left == self.right else f"Local({self.left}, {self.right})"


@dataclass(frozen=True, repr=False)
class Strided(Pattern):
    """Every stride-th key in both directions: (q - k) % stride == 0.

    Args:
        stride: distance in tokens; 1 is `Full()`.
    """

    stride: Size = 64

    def __post_init__(self) -> None:
        whole_number("Strided", "stride", self.stride, 1, "Strided(64)")

    def meets(self, batch: Places, head: Places, q: Places, k: Places, facts: Facts) -> Bool[Tensor, "..."]:
        return (q - k) % self.stride == 0

    def cover(self, grid: Grid) -> Cover:
        if grid.stride % self.stride == 0:
            return grid.constant(WHOLE)  # only pairs at multiples of the grid's stride count
        if grid.stride > 1 or self.stride < 2 * grid.block:
            return grid.constant(SOME)
        first, last = grid.row_ends()
        most = max(grid.n, grid.m) // self.stride + 1
        step = torch.arange(-most, most + 1) * self.stride
        low, high = (
            first[:, None] + step,
            last[:, None] + step,
        )  # the keys that lie one multiple away from a row of tiles
        row = torch.arange(grid.rows)[:, None].expand_as(low)
        held = (high >= 0) & (low < grid.m)
        row, low, high = row[held], low[held].clamp(min=0), high[held].clamp(max=grid.m - 1)
        ends = torch.stack([low, high]) // grid.block
        tiles = (row * grid.columns + ends).flatten()  # a stretch of at most one block lies in at most two tiles
        return Cover.of_tiles(grid.tiles, tiles, torch.full_like(tiles, grid.block == 1, dtype=torch.bool))

    def traits(self, causal: bool) -> Traits:
        return Traits(stride=self.stride)

    def __repr__(self) -> str:
        return f"Strided({self.stride})"


@dataclass(frozen=True, repr=False, init=False)
class Dilated(Pattern):
    """A sliding window with gaps: k = q + i * dilation for i from -left to right.

    Args:
        left: number of keys strictly before the query; they reach back left * dilation tokens.
        right: number of keys strictly after it; None: as many as before.
        dilation: distance between neighbouring keys in tokens; 1 is `Local(left, right)`.
    """

    left: int
    right: int
    dilation: int

    def __init__(self, left: Count = 64, right: Count | None = None, dilation: Size = 4) -> None:
        given = {"left": (left, 0), "right": (left if right is None else right, 0), "dilation": (dilation, 1)}
        for name, (value, least) in given.items():
            object.__setattr__(self, name, whole_number("Dilated", name, value, least, "Dilated(4, 4, 2)"))

    def meets(self, batch: Places, head: Places, q: Places, k: Places, facts: Facts) -> Bool[Tensor, "..."]:
        inside = (k >= q - self.left * self.dilation) & (k <= q + self.right * self.dilation)
        return inside & ((q - k) % self.dilation == 0)

    def cover(self, grid: Grid) -> Cover:
        reach = Local(self.left * self.dilation, self.right * self.dilation)
        return reach.cover(grid) & Strided(self.dilation).cover(grid)

    def traits(self, causal: bool) -> Traits:
        band = (self.left, self.right) if self.dilation == 1 else None
        return Traits(band=band, horizon=self.left * self.dilation, stride=self.dilation)

    def __repr__(self) -> str:
        return f"Dilated({self.left}, {self.right}, {self.dilation})"


@dataclass(frozen=True, repr=False)
class Block(Pattern):
    """Tokens of the same block meet: q // size == k // size. How far one sees depends on its place in the block.

    Args:
        size: tokens a block.
    """

    size: Size = 128

    def __post_init__(self) -> None:
        whole_number("Block", "size", self.size, 1, "Block(64)")

    def meets(self, batch: Places, head: Places, q: Places, k: Places, facts: Facts) -> Bool[Tensor, "..."]:
        return q // self.size == k // self.size

    def cover(self, grid: Grid) -> Cover:
        return grid.intervals(lambda q: (q // self.size * self.size, q // self.size * self.size + self.size - 1))

    @property
    def side(self) -> int:
        return self.size

    def squares(self, batch: Places, head: Places, row: Places, facts: Facts) -> list[Tensor]:
        return [row]

    def traits(self, causal: bool) -> Traits:
        return Traits(horizon=self.size - 1, depends=frozenset({"place"}))

    def __repr__(self) -> str:
        return f"Block({self.size})"


@dataclass(frozen=True, repr=False)
class Columns(Pattern):
    """The last `count` places of every period are met by all later tokens: min(q, k) % period >= period - count.

    When causal these are the summary columns of the Sparse Transformer; else the rule holds in both directions.

    Args:
        period: tokens between one summary and the next.
        count: tokens a summary.
    """

    period: Size
    count: Size

    def __post_init__(self) -> None:
        whole_number("Columns", "period", self.period, 1, "Columns(128, 32)")
        if whole_number("Columns", "count", self.count, 1, "Columns(128, 32)") > self.period:
            raise SpecError(
                f"Columns: expected count as at most the period of {self.period}, got {self.count}; "
                "for example Columns(128, 32)"
            )

    def meets(self, batch: Places, head: Places, q: Places, k: Places, facts: Facts) -> Bool[Tensor, "..."]:
        earlier = torch.minimum(q, k)
        return (earlier >= 0) & (earlier % self.period >= self.period - self.count)

    def cover(self, grid: Grid) -> Cover:
        places = torch.arange(grid.m)
        places = places[places % self.period >= self.period - self.count]
        keys = grid.hub_keys(places, later=True)
        return keys if grid.facts.causal else keys | grid.hub_queries(places, later=True)

    def traits(self, causal: bool) -> Traits:
        return Traits(depends=frozenset({"place"}))

    def __repr__(self) -> str:
        return f"Columns({self.period}, {self.count})"


_ALL = (Full, Causal, Local, Strided, Dilated, Block, Columns, Global, Flagged, Random, RandomBlocks, PerHead, PerLayer)

LEAVES: Mapping[str, type[Pattern]] = MappingProxyType({leaf.__name__: leaf for leaf in _ALL})
"""What pattern expressions are made of."""

SLOT_NAMES: Mapping[str, Callable[..., Pattern]] = MappingProxyType(
    {
        "local": Local,
        "strided": Strided,
        "dilated": Dilated,
        "block_local": Block,
        "global_tokens": global_tokens,
        "random": Random,
        "per_head": PerHead,
    }
)
"""Leaves that have a name of their own in the attention slot."""

SLOT_PAPERS: Mapping[str, str] = MappingProxyType(
    {
        "local": "Parmar et al. 2018, 1802.05751; Beltagy et al. 2020, 2004.05150",
        "strided": "Child et al. 2019, 1904.10509",
        "dilated": "Beltagy et al. 2020, 2004.05150",
        "block_local": "Qiu et al. 2019, 1911.02972",
        "global_tokens": "Ainslie et al. 2020, 2004.08483",
        "random": "Zaheer et al. 2020, 2007.14062",
        "per_head": "Child et al. 2019, 1904.10509",
    }
)
"""Where each of these comes from."""
