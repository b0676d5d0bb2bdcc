"""BigBird: a window of blocks, global blocks at both ends, and random blocks.

Paper: Zaheer et al. 2020, "Big Bird: Transformers for Longer Sequences", 2007.14062 (the internal construction, ITC).
Rule, with i and j the blocks of query and key and e the number of blocks that hold a real token:
    |i - j| <= (window - 1) / 2,  or i or j is one of the first or last global blocks of 0..e-1,  or j is drawn for row
    i.
Deviations: every key counts once however often it is listed; the last global block is the last one with a real token,
found for each sample, so padding moves nothing; draws come from a hash, equal in training and evaluation; where fewer
blocks are left than are to be drawn, all are taken (with the uniform plan, random >= e - 4 gives full attention).
Causal (not in the paper): without future blocks and last global blocks; draws come from the blocks up to the query's
own.
"""

from dataclasses import dataclass, fields
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from anyformer.errors import SpecError
from anyformer.pattern._facts import Facts, Places, Traits, whole_number
from anyformer.pattern._hash import any_equal, pick_outside, row_key
from anyformer.pattern.base import Pattern
from anyformer.pattern.layout import Cover, Grid
from anyformer.typing import Count, Size

summary = "a window of blocks, global blocks at both ends and random blocks"
paper = "Zaheer et al. 2020, 2007.14062"
family = ("human-made pattern", "combined")

Plan = Literal["uniform", "google"]

_SHORT = (1024, 2048, 3072, 4096)  # lengths in tokens for which the authors' code draws below token 1024 only
_STREAM = 3  # so that draws have nothing in common with those of other patterns


def bigbird(
    block: Size = 64, random: Count = 3, window: Size = 3, globals: Count = 2, plan: Plan = "uniform", seed: Count = 0
) -> "BigBird":
    """The pattern of BigBird; see the module.

    Args:
        block: tokens a block.
        random: blocks drawn for each block of queries and each head, outside its window and the global blocks.
        window: blocks of the window, the own one included; odd.
        globals: blocks that see all and are seen by all: the first half (rounded up) of them at the start, the others
            at the end.
        plan: where draws come from. "uniform": the whole sequence, as the paper says. "google": as the authors' code
            does, only from tokens below 1024 where the length is 1024, 2048, 3072 or 4096, else from the first 2 *
            random + 5 blocks, of which row 1 never draws the last but one and the last but one row never draws 1;
            shorter sequences as "uniform".
        seed: root of the draws, joined with the layer's.

    Raises:
        SpecError: a size is out of range, the window is even, or there is no such plan.
    """
    return BigBird(block, random, window, globals, plan, seed)


@dataclass(frozen=True, repr=False)
class BigBird(Pattern):
    """The value that `bigbird` returns, with its knobs."""

    block: Size = 64
    random: Count = 3
    window: Size = 3
    globals: Count = 2
    plan: Plan = "uniform"
    seed: Count = 0

    def __post_init__(self) -> None:
        for name, least in (("block", 1), ("random", 0), ("window", 1), ("globals", 0), ("seed", 0)):
            whole_number("bigbird", name, getattr(self, name), least, "bigbird(block=64, random=3)")
        if self.window % 2 == 0:
            raise SpecError(
                f"bigbird: expected window as an odd number of blocks, got {self.window}; for example window=3"
            )
        if self.plan not in ("uniform", "google"):
            raise SpecError(
                f"bigbird: expected plan as 'uniform' or 'google', got {self.plan!r}; for example plan='uniform'"
            )

    @property
    def reach(self) -> int:
        """Blocks of the window on each side."""
        return self.window // 2

    @property
    def leading(self) -> int:
        """Global blocks at the start."""
        return self.globals - self.globals // 2

    @property
    def trailing(self) -> int:
        """Global blocks at the end."""
        return self.globals // 2

    def targets(self, batch: Places, head: Places, row: Places, facts: Facts) -> list[Tensor]:
        """Blocks drawn for each block of queries, one tensor a draw; -1 where there was nothing left to draw."""
        row = row.long()
        key = row_key((_STREAM, self.seed, facts.seed, facts.layer), head, row)
        count = None if facts.causal else self._blocks(batch, row, facts)
        last = row if count is None else count - 1 - self.trailing
        high, segment = (last, False) if self.plan == "uniform" else self._segment(count, last)
        start = (row - self.reach).clamp(min=self.leading)
        width = (torch.minimum(row + self.reach, high) - start + 1).clamp(min=0)
        holes = [(start, width)]
        if self.plan == "google":
            end = 2 * self.random + 5
            one, last_but_one = torch.full_like(row, 1), torch.full_like(row, end - 2)
            before = (row == last_but_one) & (row - self.reach > 1) & (self.leading <= 1) & segment
            behind = (row == 1) & (row + self.reach < last_but_one) & (last_but_one <= high) & segment
            holes = [(one, before.long()), *holes, (last_but_one, behind.long())]
        return pick_outside(key, self.random, self.leading, high, holes)

    def meets(self, batch: Places, head: Places, q: Places, k: Places, facts: Facts) -> Bool[Tensor, "..."]:
        row, column = q // self.block, k // self.block
        met = (row - column).abs() <= self.reach
        met = met | self._is_global(batch, column, facts) | any_equal(self.targets(batch, head, row, facts), column)
        return met if facts.causal else met | self._is_global(batch, row, facts)

    def cover(self, grid: Grid) -> Cover:
        side, reach = self.block, self.reach * self.block
        near = grid.intervals(lambda q: (q // side * side - reach, q // side * side + side - 1 + reach))
        zero = torch.zeros((), dtype=torch.int64)
        places = torch.arange(grid.m)
        hubs = grid.hubs(places[self._is_global(zero, places // side, grid.facts)])
        if self.random == 0:
            return near | hubs
        rows = torch.arange((grid.m - grid.n) // side, (grid.m - 1) // side + 1)
        targets = torch.stack(self.targets(zero, zero + grid.head, rows, grid.facts))
        return near | hubs | grid.squares(rows.expand_as(targets)[targets >= 0], targets[targets >= 0], side)

    @property
    def side(self) -> int:
        return self.block

    def squares(self, batch: Places, head: Places, row: Places, facts: Facts) -> list[Tensor]:
        near = [row + step for step in range(-self.reach, 1 if facts.causal else self.reach + 1)]
        leading = [torch.full_like(row, index) for index in range(self.leading)]
        return [*near, *leading, *self._last(batch, facts), *self.targets(batch, head, row, facts)]

    def full_squares(self, batch: Places, facts: Facts) -> list[Tensor]:
        if facts.causal:
            return []
        return [*(torch.full_like(batch, index) for index in range(self.leading)), *self._last(batch, facts)]

    def _last(self, batch: Places, facts: Facts) -> list[Tensor]:
        """The global blocks at the end."""
        if facts.causal or not self.trailing:
            return []
        count = self._blocks(batch, batch, facts)
        return [count - 1 - index for index in range(self.trailing)]

    def traits(self, causal: bool) -> Traits:
        drawn = {"place", "head", "layer"} if self.random else {"place"}
        return Traits(depends=frozenset(drawn if causal else drawn | {"lengths"}))

    def _blocks(self, batch: Places, like: Places, facts: Facts) -> Tensor:
        """Number of blocks that hold a real token."""
        return (facts.length_of(batch, like) + self.block - 1) // self.block

    def _is_global(self, batch: Places, index: Places, facts: Facts) -> Tensor:
        met = (index >= 0) & (index < self.leading)
        if facts.causal or self.trailing == 0:
            return met
        count = self._blocks(batch, index, facts)
        return met | ((index >= (count - self.trailing).clamp(min=0)) & (index < count))

    def _segment(self, count: Tensor | None, last: Tensor) -> tuple[Tensor, Tensor | bool]:
        """Last block to draw from in the authors' plan, and whether it ends the segment of 2 * random + 5 blocks."""
        end = torch.full_like(last, 2 * self.random + 4 - self.trailing)
        if count is None:
            return torch.minimum(last, end), True
        short = torch.zeros_like(count, dtype=torch.bool)
        for length in _SHORT:
            short = short | (count * self.block == length)
        long = (count > 2 * self.random + 5) & ~short
        below = torch.full_like(last, 1024 // self.block - 1)
        return torch.where(short, torch.minimum(below, last), torch.where(long, end, last)), long

    def __repr__(self) -> str:
        always = ("block", "random")
        shown = [
            field.name for field in fields(self) if field.name in always or getattr(self, field.name) != field.default
        ]
        return f"bigbird({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"
