"""Decomposed relative positions: each query meets a learned vector of the row offset and one of the column offset.

Paper: Li et al. 2021, 2112.01526 (MViTv2); also in ViTDet and SAM.
Equation: s_ij = q_i . k_j / sqrt(d) + q_i . R[y_i - y_j] + q_i . C[x_i - x_j]; the last two without a factor. R and C serve all
    heads of a layer.
Cost: n h (2 rows + 2 columns - 2) d, and two look-ups a pair; no [n m d] tensor.
Deviation: positions are whole numbers on one grid for queries and keys; where keys are pooled, give theirs on the queries' grid.
Beyond the paper: offsets beyond the table read its end.
"""

from math import isqrt

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.ops.lookup import row_products
from anyformer.position._tables import larger_grid, with_knobs
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.spec import Spec
from anyformer.typing import Size


class DecomposedRel(Position):
    """Scores a pair by the query and the two offsets apart, which needs rows + columns vectors where pairs have rows * columns.

    Args:
        rows: height in tokens of the grid in training; None: of the largest square within max_length.
        columns: its width; None: as rows.
        to_rows, to_columns: size of the grid that the tables are resampled to (linear) in each call; None: their own.

    Raises:
        SpecError: one of to_rows and to_columns without the other.
    """

    name = "decomposed_rel"
    summary = "a learned vector of the row offset and one of the column offset, met by the query"
    paper = "Li et al. 2021, 2112.01526"
    family = ("vision", "contextual")
    axes = 2

    def __init__(
        self,
        site: Site,
        *,
        rows: Size | None = None,
        columns: Size | None = None,
        to_rows: Size | None = None,
        to_columns: Size | None = None,
    ) -> None:
        super().__init__(site)
        if (to_rows is None) != (to_columns is None):
            raise SpecError(
                f"decomposed_rel: expected to_rows and to_columns, or neither, got to_rows={to_rows} and "
                f"to_columns={to_columns}; a grid has both"
            )
        self.forms = ((Form.SCORE,),)
        self.lacks = {Form.BOXES: "has a factor of its own for every row and every column, with no end to the offsets"}
        height = isqrt(site.max_length) if rows is None else rows
        self.size = (height, height if columns is None else columns)
        self.to_size = self.size if to_rows is None or to_columns is None else (to_rows, to_columns)
        self.extensions = ("plain", "stretch")
        self.row_table, self.column_table = (
            nn.Parameter(torch.zeros(2 * length - 1, site.head_dim)) for length in self.size
        )

    def extended(self, spec: Spec, way: Spec, to: int) -> Spec:
        """The same tables, at their own size or resampled to a larger grid of its shape."""
        if way.name == "plain":
            return with_knobs(spec, rows=self.size[0], columns=self.size[1])
        return larger_grid(spec, self.size, to)

    def score(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        q_pos: Int[Tensor, "#b n 2"],
        k_pos: Int[Tensor, "#b m 2"],
    ) -> Float[Tensor, "b h n m"]:
        """`q_i . R[y_i - y_j] + q_i . C[x_i - x_j]`."""
        offsets = (q_pos[:, None, :, None] - k_pos[:, None, None]).unbind(-1)
        by_row, by_column = (
            row_products(q, resampled(table, 2 * length - 1), offset.clamp(1 - length, length - 1) + length - 1)
            for table, length, offset in zip((self.row_table, self.column_table), self.to_size, offsets, strict=True)
        )
        return by_row + by_column


def resampled(table: Float[Tensor, "r d"], rows: int) -> Float[Tensor, "s d"]:
    """The table stretched to `rows` rows, linearly, in the wider of float32 and its dtype."""
    wide = table.to(torch.promote_types(torch.float32, table.dtype))
    return wide if rows == len(table) else F.interpolate(wide.T[None], rows, mode="linear")[0].T
