"""Swin's relative bias: one learned number for each head and each offset of row and column within a window.

Paper: Liu et al. 2021, 2103.14030.
Equation: s_ij = q_i . k_j / sqrt(d) + B[y_i - y_j, x_i - x_j, h], with B of (2 rows - 1) (2 columns - 1) numbers a head.
Cost: one look-up a pair.
Beyond the paper: pairs further apart than a window, which meet where attention is wider than one, read the edge of the table.
    For larger windows the table may be resampled in each call, as the authors do once when they load weights.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.typing import Size


class SwinBias(Position):
    """Adds a number of head and offset to the scaled logits.

    Shifted windows change nothing here: which pairs may meet is the attention's business.

    Args:
        rows: height of a window in tokens; offsets of a row go from 1 - rows to rows - 1.
        columns: its width; None: as rows.
        to_rows, to_columns: size of the windows that the table is resampled to (bicubic) in each call; None: its own.

    Raises:
        SpecError: one of to_rows and to_columns without the other.
    """

    name = "swin_bias"
    summary = "a learned number for each head and each offset of row and column"
    paper = "Liu et al. 2021, 2103.14030"
    family = ("vision", "bias")
    axes = 2

    def __init__(
        self,
        site: Site,
        *,
        rows: Size = 7,
        columns: Size | None = None,
        to_rows: Size | None = None,
        to_columns: Size | None = None,
    ) -> None:
        super().__init__(site)
        if (to_rows is None) != (to_columns is None):
            raise SpecError(
                f"swin_bias: expected to_rows and to_columns, or neither, got to_rows={to_rows} and to_columns={to_columns}; "
                "a window has both"
            )
        self.forms = ((Form.GRID, Form.BIAS),)
        self.size = (rows, rows if columns is None else columns)
        self.to_size = self.size if to_rows is None or to_columns is None else (to_rows, to_columns)
        self.table = nn.Parameter(torch.empty(2 * self.size[0] - 1, 2 * self.size[1] - 1, site.heads))
        nn.init.trunc_normal_(self.table, std=0.02)

    def bias(
        self, head: Int[Tensor, "..."], q_pos: Int[Tensor, "..."], k_pos: Int[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        """`B[q_pos - k_pos, head]`."""
        row, column = (
            part.clamp(1 - length, length - 1) + length - 1
            for part, length in zip((q_pos - k_pos).unbind(-1), self.to_size, strict=True)
        )
        return self.resampled()[row, column, head]

    def resampled(self) -> Float[Tensor, "y x h"]:
        """The table for the windows at hand, in the wider of float32 and its dtype; its own windows give the table itself."""
        table = self.table.to(torch.promote_types(torch.float32, self.table.dtype))
        if self.to_size == self.size:
            return table
        size = [2 * length - 1 for length in self.to_size]
        return F.interpolate(table.permute(2, 0, 1)[None], size, mode="bicubic")[0].permute(1, 2, 0)
