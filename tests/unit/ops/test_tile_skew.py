"""Tiles by offset and by column."""

import torch

from anyformer.ops.skew import by_column, by_offset, by_tile, diagonal_sums, toeplitz


def test_toeplitz_reads_by_offset():
    values = torch.arange(7.0)  # 3 rows, 5 columns
    assert toeplitz(values, 5).tolist() == [[2, 3, 4, 5, 6], [1, 2, 3, 4, 5], [0, 1, 2, 3, 4]]


def test_skewing_and_back():
    tile = torch.randn(2, 3, 5)
    skewed = by_offset(tile, torch.empty(2, 3, 7))
    assert skewed[0, 2].tolist() == [*tile[0, 2].tolist(), 0, 0]
    assert skewed[0, 0].tolist() == [0, 0, *tile[0, 0].tolist()]
    assert torch.equal(by_column(skewed, 5), tile)


def test_diagonal_sums_are_the_adjoint_of_toeplitz():
    values, tile = torch.randn(7, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    assert abs((toeplitz(values, 5) * tile).sum() - (values * diagonal_sums(tile)).sum()) < 1e-12


def test_tiles_share_what_a_key_makes_of_each_offset():
    rows, columns, tiles = 2, 5, 3
    met = torch.arange(9 * 6).view(9, 6)  # keys by falling offset, from 4 to -1 columns before the row
    found = by_tile(met, rows, columns)
    assert found.shape == (tiles, rows, columns)
    for t in range(tiles):
        for row in range(rows):
            for column in range(columns):
                assert found[t, row, column] == met[t * rows + column, row - column + columns - 1]
    assert len(found.unique()) == found.numel()
