"""Tables as the tiles of a window read them, and their gradients."""

import torch
from torch import Tensor

from anyformer.ops.tile import SHUT, Place


class OffsetTable:
    """A table [h left+right+1 d] among the w = block + span - 1 offsets that a tile holds, 0 at those beyond the window.

    Args:
        table: by rising offset.
        block: rows of a tile.
        span: columns of a tile.
        dtype: of the values and of the gradient.
        learning: whether there is to be a gradient.
        falling: whether tiles read it by falling offset, as a key meets the rows.
    """

    def __init__(
        self, table: Tensor, block: int, span: int, dtype: torch.dtype, *, learning: bool, falling: bool = False
    ):
        self.block, self.falling, self.inside = block, falling, slice(block - 1, block - 1 + table.shape[1])
        values = table.new_zeros(table.shape[0], block + span - 1, table.shape[2], dtype=dtype)
        values[:, self.inside] = table
        self.values = values.flip(1) if falling else values
        self.sums = torch.zeros_like(values) if learning else None

    def of(self, place: Place) -> Tensor:
        """The values [w d] that the tiles of a place read."""
        return self._part(self.values, place)

    def sums_of(self, place: Place) -> Tensor | None:
        """Where their gradient is summed up."""
        return None if self.sums is None else self._part(self.sums, place)

    def gradient(self) -> Tensor | None:
        """[h left+right+1 d], once every place is done."""
        if self.sums is None:
            return None
        return (self.sums.flip(1) if self.falling else self.sums)[:, self.inside]

    def _part(self, table: Tensor, place: Place) -> Tensor:
        skip, wide = place.chunk.skip, self.block + place.chunk.span - 1
        start = table.shape[1] - skip - wide if self.falling else skip
        return table[place.head, start : start + wide]


class GlobalBias:
    """The bias [b|1 h n g] of the columns of global keys, finite, and its gradient."""

    def __init__(self, bias: Tensor, rows: int, block: int, dtype: torch.dtype, *, learning: bool):
        self.block, self.n = block, bias.shape[2]
        self.values = bias.new_zeros(*bias.shape[:2], rows, bias.shape[3], dtype=dtype)
        self.values[:, :, : self.n] = bias.clamp(min=SHUT)
        self.sums = torch.zeros_like(self.values) if learning else None

    def of(self, place: Place) -> Tensor:
        """The values [C q g] of a place."""
        return self._part(self.values, place)

    def sums_of(self, place: Place) -> Tensor | None:
        """Where their gradient is summed up."""
        return None if self.sums is None else self._part(self.sums, place)

    def gradient(self) -> Tensor | None:
        """[b|1 h n g], once every place is done."""
        return None if self.sums is None else self.sums[:, :, : self.n]

    def _part(self, table: Tensor, place: Place) -> Tensor:
        sample = place.sample if table.shape[0] > 1 else 0
        start, count = place.chunk.start * self.block, place.chunk.count
        return table[sample, place.head, start : start + count * self.block].view(count, self.block, -1)
