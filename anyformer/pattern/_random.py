"""The leaves that draw keys at random: `Random` draws tokens, `RandomBlocks` blocks."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from anyformer.errors import SpecError
from anyformer.pattern._facts import Facts, Places, Traits, whole_number
from anyformer.pattern._hash import any_equal, pick, pick_outside, row_key
from anyformer.pattern.base import Pattern
from anyformer.pattern.layout import Cover, Grid
from anyformer.typing import Count, Size

_TOKENS, _BLOCKS = 1, 2  # so that draws of tokens and of blocks have nothing in common


@dataclass(frozen=True, repr=False)
class Random(Pattern):
    """Each query meets `keys` different keys drawn at random, of all real places, when causal of those up to its own.

    The draws are a function of (seed, layer, head, query) and of the number of places drawn from: padding moves none of
    them, a longer text does, unless causal. Where there are not more places than `keys`, all are met. Meant for a few
    keys a query.

    Args:
        keys: draws a query.
        seed: root of the draws, joined with the layer's.
        mutual: whether a query also meets the keys that drew it. When causal those lie ahead, so it changes nothing.
    """

    keys: Size = 16
    seed: Count = 0
    mutual: bool = False

    def __post_init__(self) -> None:
        whole_number("Random", "keys", self.keys, 1, "Random(3, seed=0)")
        whole_number("Random", "seed", self.seed, 0, "Random(3, seed=0)")
        if not isinstance(self.mutual, bool):
            raise SpecError(
                f"Random: expected mutual as True or False, got {self.mutual!r}; for example Random(3, mutual=True)"
            )

    def targets(self, batch: Places, head: Places, q: Places, facts: Facts) -> list[Tensor]:
        """Places that each query draws, one tensor a draw; -1 where there was nothing left to draw."""
        row = q.long()
        key = row_key((_TOKENS, self.seed, facts.seed, facts.layer), head, row)
        return pick(key, self.keys, row + 1 if facts.causal else facts.length_of(batch, row))

    def meets(self, batch: Places, head: Places, q: Places, k: Places, facts: Facts) -> Bool[Tensor, "..."]:
        met = any_equal(self.targets(batch, head, q, facts), k)
        return met | any_equal(self.targets(batch, head, k, facts), q) if self.mutual else met

    def cover(self, grid: Grid) -> Cover:
        cover = self._drawn(grid, torch.arange(grid.m - grid.n, grid.m), swapped=False)
        if not self.mutual or grid.facts.causal:
            return cover
        return cover | self._drawn(grid, torch.arange(grid.m), swapped=True)

    def traits(self, causal: bool) -> Traits:
        return Traits(
            depends=frozenset({"head", "layer", "place"} if causal else {"head", "layer", "place", "lengths"})
        )

    def _drawn(self, grid: Grid, rows: Tensor, *, swapped: bool) -> Cover:
        zero = torch.zeros((), dtype=torch.int64)
        targets = torch.stack(self.targets(zero, zero + grid.head, rows, grid.facts))
        rows, targets = rows.expand_as(targets)[targets >= 0], targets[targets >= 0]
        return grid.pairs(targets, rows) if swapped else grid.pairs(rows, targets)

    def __repr__(self) -> str:
        return f"Random({self.keys}, seed={self.seed}{', mutual=True' if self.mutual else ''})"


@dataclass(frozen=True, repr=False)
class RandomBlocks(Pattern):
    """Each block of queries meets `count` different blocks of keys drawn at random; see `Random`.

    Args:
        block: tokens a block.
        count: draws a block of queries.
        seed: root of the draws, joined with the layer's.
        avoid: blocks less than this many blocks away are not drawn: 0 avoids none, 1 the own block, 2 also its
            neighbours.
    """

    block: Size
    count: Size
    seed: Count = 0
    avoid: Count = 0

    def __post_init__(self) -> None:
        for name, least in (("block", 1), ("count", 1), ("seed", 0), ("avoid", 0)):
            whole_number("RandomBlocks", name, getattr(self, name), least, "RandomBlocks(64, 3, seed=0)")

    def targets(self, batch: Places, head: Places, row: Places, facts: Facts) -> list[Tensor]:
        """Blocks that each block of queries draws, one tensor a draw; -1 where there was nothing left to draw."""
        row = row.long()
        key = row_key((_BLOCKS, self.seed, facts.seed, facts.layer), head, row)
        high = row if facts.causal else (facts.length_of(batch, row) - 1) // self.block
        start = (row - self.avoid + 1).clamp(min=0)
        width = (torch.minimum(row + self.avoid - 1, high) - start + 1).clamp(min=0)
        return pick_outside(key, self.count, 0, high, [(start, width)])

    def meets(self, batch: Places, head: Places, q: Places, k: Places, facts: Facts) -> Bool[Tensor, "..."]:
        return any_equal(self.targets(batch, head, q // self.block, facts), k // self.block)

    def cover(self, grid: Grid) -> Cover:
        zero = torch.zeros((), dtype=torch.int64)
        rows = torch.arange((grid.m - grid.n) // self.block, (grid.m - 1) // self.block + 1)
        targets = torch.stack(self.targets(zero, zero + grid.head, rows, grid.facts))
        return grid.squares(rows.expand_as(targets)[targets >= 0], targets[targets >= 0], self.block)

    def traits(self, causal: bool) -> Traits:
        return Traits(
            depends=frozenset({"head", "layer", "place"} if causal else {"head", "layer", "place", "lengths"})
        )

    def __repr__(self) -> str:
        avoid = f", avoid={self.avoid}" if self.avoid else ""
        return f"RandomBlocks({self.block}, {self.count}, seed={self.seed}{avoid})"
