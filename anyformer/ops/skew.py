"""Between two ways to index a tile of scores: by (row, column) and by (row, offset), offset = column - row + rows - 1.

A row of `w = rows + columns - 1` values indexed by offset is a Toeplitz tile; a matrix [rows w] indexed by offset is
the same memory as a tile [rows columns] read with a row stride of w - 1. Both ways cost one pass and no index tensor.
"""

import torch
from torch import Tensor


def toeplitz(values: Tensor, columns: int) -> Tensor:
    """values [w] by offset -> tile [rows columns] with tile[i, j] = values[j - i + rows - 1]."""
    return values.unfold(0, columns, 1).flip(0)


def by_column(skewed: Tensor, columns: int) -> Tensor:
    """skewed [t rows w] by offset, contiguous -> a view [t rows columns] of it by column."""
    tiles, rows, width = skewed.shape
    start = skewed.storage_offset() + rows - 1
    return skewed.as_strided((tiles, rows, columns), (rows * width, width - 1, 1), start)


def by_offset(tile: Tensor, skewed: Tensor) -> Tensor:
    """tile [t rows columns] by column -> `skewed` [t rows w] by offset, 0 where the tile has no column."""
    skewed.zero_()
    by_column(skewed, tile.shape[-1]).copy_(tile)
    return skewed


def by_tile(met: Tensor, rows: int, columns: int) -> Tensor:
    """met [s w], for the keys that overlapping tiles share one row of values by falling offset -> a view [t rows columns] of it.

    Tile t begins with key t * rows, so that a pair of row and key has one place in `met`, whatever tiles hold the key.
    """
    slots, width = met.shape
    tiles = (slots - columns) // rows + 1
    return met.as_strided((tiles, rows, columns), (rows * width, 1, width - 1), met.storage_offset() + columns - 1)


def diagonal_sums(tile: Tensor) -> Tensor:
    """tile [rows columns] -> [w]: the adjoint of `toeplitz`."""
    rows, columns = tile.shape
    skewed = torch.empty(1, rows, rows + columns - 1, dtype=tile.dtype, device=tile.device)
    return by_offset(tile[None], skewed)[0].sum(0)
