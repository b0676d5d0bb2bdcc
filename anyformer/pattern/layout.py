"""Where a pattern's pairs lie, in tiles of block x block tokens, found by arithmetic and never through an N x N table.

Every pattern answers for each tile: NONE of its pairs is allowed, SOME may be, or the WHOLE tile is. These three values
are ordered, so union is the maximum, intersection the minimum and complement 2 - x (Kleene's logic); a `Cover` holds
them as runs along the rows of tiles, so that work follows the number of runs. A `BlockLayout` lists the tiles that are
not NONE.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from anyformer.pattern._facts import Facts

NONE, SOME, WHOLE = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Cover:
    """Runs of equal value along the tiles of one head, numbered row after row.

    Args:
        edges: first tile of each run, then the number of tiles.
        value: NONE, SOME or WHOLE.
    """

    edges: Int[Tensor, "e"]
    value: UInt8[Tensor, "r"]

    @staticmethod
    def of_runs(total: int, start: Int[Tensor, "r"], stop: Int[Tensor, "r"], value: UInt8[Tensor, "r"]) -> "Cover":
        """Ascending, disjoint runs start..stop-1 (empty ones are dropped); NONE everywhere else."""
        edges = torch.cat(
            [start.new_zeros(1), torch.stack([start, stop], dim=1).flatten(), start.new_full((1,), total)]
        )
        values = torch.cat([torch.stack([torch.zeros_like(value), value], dim=1).flatten(), value.new_zeros(1)])
        kept = edges.diff() > 0
        return Cover(torch.cat([edges[:-1][kept], edges[-1:]]), values[kept])

    @staticmethod
    def of_tiles(total: int, tiles: Int[Tensor, "t"], whole: Bool[Tensor, "t"]) -> "Cover":
        """Tiles in any order; one that comes twice is WHOLE if either is."""
        ranked = torch.unique(tiles * 2 + whole)  # of equal tiles the whole one comes last
        tiles, whole = ranked >> 1, (ranked & 1).to(torch.uint8)
        last = torch.ones_like(tiles, dtype=torch.bool)
        last[:-1] = tiles.diff() != 0
        tiles = tiles[last]
        return Cover.of_runs(total, tiles, tiles + 1, whole[last] + SOME)

    def join(self, other: "Cover", merge: Callable[[Tensor, Tensor], Tensor]) -> "Cover":
        """Tile by tile `merge(self, other)`."""
        edges = torch.unique(torch.cat([self.edges, other.edges]))
        mine, theirs = (
            each.value[torch.searchsorted(each.edges, edges[:-1], right=True) - 1] for each in (self, other)
        )
        value = merge(mine, theirs)
        kept = torch.ones_like(value, dtype=torch.bool)
        kept[1:] = value[1:] != value[:-1]
        return Cover(torch.cat([edges[:-1][kept], edges[-1:]]), value[kept])

    def __or__(self, other: "Cover") -> "Cover":
        return self.join(other, torch.maximum)

    def __and__(self, other: "Cover") -> "Cover":
        return self.join(other, torch.minimum)

    def __invert__(self) -> "Cover":
        return replace(self, value=WHOLE - self.value)

    def size(self, value: int) -> int:
        """Number of tiles with this value."""
        return int(self.edges.diff()[self.value == value].sum())

    def tiles(self, least: int = SOME, most: int = WHOLE) -> tuple[Int[Tensor, "t"], Bool[Tensor, "t"]]:
        """Tiles with a value from `least` to `most`, ascending, and whether each is WHOLE."""
        kept = (self.value >= least) & (self.value <= most)
        start, count = self.edges[:-1][kept], self.edges.diff()[kept]
        before = count.cumsum(0) - count
        tiles = torch.arange(int(count.sum())) + (start - before).repeat_interleave(count)
        return tiles, (self.value[kept] == WHOLE).repeat_interleave(count)


@dataclass(frozen=True, eq=False)
class Grid:
    """The pairs of one head of one sample, cut into tiles: what a pattern's `cover` is asked about.

    Only some pairs count: those of real rows and columns; when causal, those with k <= q; with a stride, those with
    (q - k) % stride == 0. A cover may say what it likes about the others: `domain` removes them in the end.

    Args:
        n, m: number of queries and keys; query i has place i + m - n.
        block: side of a tile in tokens.
        head: number of the head.
        facts: of this sample alone: `length` is set, `lengths` is None.
        stride: 1, or (for n == m) tokens are ordered by place % stride first and by place second.
    """

    n: int
    m: int
    block: int
    head: int
    facts: Facts
    stride: int = 1

    @property
    def rows(self) -> int:
        return -(-self.n // self.block)

    @property
    def columns(self) -> int:
        return -(-self.m // self.block)

    @property
    def tiles(self) -> int:
        return self.rows * self.columns

    @property
    def length(self) -> int:
        """Number of real keys."""
        assert self.facts.length is not None
        return self.facts.length

    def slot(self, place: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Index of a key in the order of this grid."""
        if self.stride == 1:
            return place
        residue = place % self.stride
        return self._start(residue) + place // self.stride

    def order(self) -> Int[Tensor, "m"]:
        """Places in the order of this grid."""
        places = torch.arange(self.m)
        order = torch.empty_like(places)
        order[self.slot(places)] = places
        return order

    def query_places(self) -> Int[Tensor, "n"]:
        """Place of each query, in the order of this grid."""
        return torch.arange(self.m - self.n, self.m) if self.stride == 1 else self.order()

    def row_ends(self) -> tuple[Int[Tensor, "rows"], Int[Tensor, "rows"]]:
        """Places of the first and of the last query of each row of tiles."""
        first = torch.arange(self.rows) * self.block
        last = (first + self.block - 1).clamp(max=self.n - 1)
        places = self.query_places()
        return places[first], places[last]

    def constant(self, value: int) -> Cover:
        """The same value everywhere; SOME says that nothing is known."""
        return Cover(torch.tensor([0, self.tiles]), torch.tensor([value], dtype=torch.uint8))

    def domain(self) -> Cover:
        """The pairs that count."""
        return self.intervals(lambda q: (torch.zeros_like(q), torch.full_like(q, self.m - 1)))

    def intervals(self, bounds: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Cover:
        """Query q may meet the keys low..high, where `low, high = bounds(q)` never fall as q grows and leave no gap
        between the keys of q and those of q + 1. Exact for both SOME and WHOLE."""
        first, last = self.row_ends()
        (low, start), (stop, high) = zip(self._slots(first, bounds), self._slots(last, bounds), strict=True)
        # all keys of the row of tiles: low..high-1; keys that all its queries share: start..stop-1
        base, size = torch.arange(self.rows) * self.columns, self.block
        opens, closes = low // size, torch.where(high > low, -(-high // size), low // size)
        enters = -(-start // size)
        leaves = torch.where(stop == self.m, self.columns, stop // size)
        shared = leaves > enters
        enters, leaves = torch.where(shared, enters, opens), torch.where(shared, leaves, opens)
        runs = [(opens, enters, SOME), (enters, leaves, WHOLE), (leaves, closes, SOME)]
        starts, stops = (torch.stack([run[i] + base for run in runs], dim=1).flatten() for i in (0, 1))
        values = torch.tensor([run[2] for run in runs], dtype=torch.uint8).repeat(self.rows)
        return Cover.of_runs(self.tiles, starts, stops, values)

    def hubs(self, places: Int[Tensor, "p"]) -> Cover:
        """Tokens at these (ascending) places see all and are seen by all; when causal they are only seen."""
        if self.facts.causal:
            return self.hub_keys(places, later=True)
        return self.hub_keys(places, later=False) | self.hub_queries(places, later=False)

    def hub_keys(self, places: Int[Tensor, "p"], *, later: bool) -> Cover:
        """Keys at these (ascending) places meet every query; with `later` only queries at or after them."""
        places = places[(places >= 0) & (places < self.m)]
        column, count = torch.unique(self.slot(places) // self.block, return_counts=True)
        whole = count == self._width(column, self.m)
        tiles = (torch.arange(self.rows) * self.columns)[:, None] + column  # [rows, columns with a hub]
        whole = whole.expand_as(tiles)
        if later:
            if self.stride > 1:
                return Cover.of_tiles(self.tiles, tiles.flatten(), torch.zeros_like(whole).flatten())
            first, last = self.row_ends()
            earliest = places[torch.searchsorted(places, column * self.block)]
            whole = whole & (column * self.block + self._width(column, self.m) - 1 <= first[:, None])
            meets = earliest <= last[:, None]
            tiles, whole = tiles[meets], whole[meets]
        return Cover.of_tiles(self.tiles, tiles.flatten(), whole.flatten())

    def hub_queries(self, places: Int[Tensor, "p"], *, later: bool) -> Cover:
        """Queries at these (ascending) places meet every key; with `later` only keys at or after them."""
        offset = self.m - self.n if self.stride == 1 else 0
        slots = self.slot(places[(places >= self.m - self.n) & (places >= 0) & (places < self.m)]) - offset
        row, count = torch.unique(slots // self.block, return_counts=True)
        if later and self.stride == 1:
            earliest = slots[torch.searchsorted(slots, row * self.block)] + offset
            start, value = earliest // self.block, torch.full_like(row, SOME, dtype=torch.uint8)
        else:
            whole = (count == self._width(row, self.n)) & (not later)
            start, value = torch.zeros_like(row), whole.to(torch.uint8) + SOME
        return Cover.of_runs(self.tiles, row * self.columns + start, (row + 1) * self.columns, value)

    def pairs(self, q: Int[Tensor, "p"], k: Int[Tensor, "p"]) -> Cover:
        """Single pairs of places, in any order; those outside are left out."""
        inside = (q >= self.m - self.n) & (q < self.m) & (k >= 0) & (k < self.m)
        q, k = q[inside], k[inside]
        row = (q - (self.m - self.n) if self.stride == 1 else self.slot(q)) // self.block
        tiles = row * self.columns + self.slot(k) // self.block
        return Cover.of_tiles(self.tiles, tiles, torch.full_like(tiles, self.block == 1, dtype=torch.bool))

    def squares(self, row: Int[Tensor, "p"], column: Int[Tensor, "p"], side: int) -> Cover:
        """Query places row * side .. (row + 1) * side - 1 meet key places column * side .. (column + 1) * side - 1."""
        if self.stride > 1:
            return self.constant(SOME)
        top, bottom = self._cut(row * side - (self.m - self.n), side, self.n)
        left, right = self._cut(column * side, side, self.m)
        held = (top <= bottom) & (left <= right)
        top, bottom, left, right = top[held], bottom[held], left[held], right[held]
        high = bottom // self.block - top // self.block + 1
        wide = right // self.block - left // self.block + 1
        count = high * wide
        within = torch.arange(int(count.sum())) - (count.cumsum(0) - count).repeat_interleave(count)
        top, bottom, left, right, wide = (each.repeat_interleave(count) for each in (top, bottom, left, right, wide))
        i, j = top // self.block + within // wide, left // self.block + within % wide
        whole = (i * self.block >= top) & (i * self.block + self._width(i, self.n) - 1 <= bottom)
        whole &= (j * self.block >= left) & (j * self.block + self._width(j, self.m) - 1 <= right)
        return Cover.of_tiles(self.tiles, i * self.columns + j, whole)

    def _cut(self, start: Tensor, side: int, size: int) -> tuple[Tensor, Tensor]:
        return start.clamp(min=0), (start + side).clamp(max=size) - 1

    def _width(self, tile: Tensor, size: int) -> Tensor:
        """Number of real tokens of a row or column of tiles."""
        return (size - tile * self.block).clamp(max=self.block)

    def _start(self, residue: Tensor) -> Tensor:
        """Slot of the first place of a residue class."""
        return residue * (self.m // self.stride) + residue.clamp(max=self.m % self.stride)

    def _slots(self, q: Tensor, bounds: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The slots low..high-1 of the keys of q that count."""
        low, high = bounds(q)
        if self.facts.causal:
            high = torch.minimum(high, q)
        residue = q % self.stride
        start = self._start(residue)
        size = self._start(residue + 1) - start
        before = -((residue - low) // self.stride)  # smallest rank whose place is at least low
        after = (high - residue) // self.stride + 1
        return start + before.clamp(min=0).minimum(size), start + after.clamp(min=0).minimum(size)


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """The tiles a pattern needs, as compressed rows. Shared between calls: never write into its tensors.

    Group g = sample * heads + head. Its row of tiles i keeps the columns `keys[offsets[g, i] : offsets[g, i + 1]]`,
    ascending. Row i holds queries i * block .. (i + 1) * block - 1, column j keys j * block .. (j + 1) * block - 1; the
    last of each may be shorter. With an `order`, query and key number i is the token at place `order[i]`.

    Args:
        n, m: number of queries and keys.
        block: side of a tile in tokens.
        batch: number of samples with tiles of their own; 1: all alike.
        heads: number of heads with tiles of their own; 1: all alike.
        order: places sorted by residue class, where the pattern has a stride; else None.
        offsets: bounds of each row of tiles in `keys`.
        keys: columns.
        whole: every pair of the tile is allowed, causality included, so that it needs no mask but the padding's.
    """

    n: int
    m: int
    block: int
    batch: int
    heads: int
    order: Int[Tensor, "m"] | None
    offsets: Int[Tensor, "g edges"]
    keys: Int[Tensor, "nnz"]
    whole: Bool[Tensor, "nnz"]

    @property
    def rows(self) -> int:
        return -(-self.n // self.block)

    @property
    def columns(self) -> int:
        return -(-self.m // self.block)

    @property
    def density(self) -> float:
        """Share of tiles kept."""
        return len(self.keys) / max(self.offsets.shape[0] * self.rows * self.columns, 1)

    def tiles(self) -> tuple[Int[Tensor, "nnz"], Int[Tensor, "nnz"], Int[Tensor, "nnz"]]:
        """Group, row and column of every kept tile."""
        counts = self.offsets.diff(dim=1).flatten()
        line = torch.arange(len(counts)).repeat_interleave(counts)
        return line // max(self.rows, 1), line % max(self.rows, 1), self.keys.long()

    def lists(
        self, chosen: Bool[Tensor, "nnz"]
    ) -> tuple[Int[Tensor, "batch heads rows"], Int[Tensor, "batch heads rows columns"]]:
        """The chosen tiles as FlexAttention's lists: their number in each row, and their columns, filled up with 0."""
        group, row, column = (part[chosen] for part in self.tiles())
        line = group * self.rows + row
        counts = torch.bincount(line, minlength=self.batch * self.heads * self.rows)
        rank = torch.arange(len(line)) - (counts.cumsum(0) - counts)[line]
        table = torch.zeros(len(counts), self.columns, dtype=torch.int32)
        table[line, rank] = column.int()
        shape = (self.batch, self.heads, self.rows)
        return counts.int().view(shape), table.view(*shape, self.columns)


def assemble(grids: list[Grid], covers: list[Cover], batch: int, heads: int) -> BlockLayout:
    """The layout of one cover a group."""
    grid = grids[0]
    offsets, keys, wholes, held = [], [], [], 0
    for cover in covers:
        tiles, whole = cover.tiles()
        edges = torch.arange(grid.rows + 1) * grid.columns
        offsets.append(torch.searchsorted(tiles, edges) + held)
        keys.append((tiles % max(grid.columns, 1)).to(torch.int32))
        wholes.append(whole)
        held += len(tiles)
    order = None if grid.stride == 1 else grid.order()
    return BlockLayout(
        grid.n, grid.m, grid.block, batch, heads, order, torch.stack(offsets), torch.cat(keys), torch.cat(wholes)
    )
