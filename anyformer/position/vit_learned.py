"""ViT's learned positions: one trainable vector for each patch of the training grid, resampled for other grids.

Paper: Dosovitskiy et al. 2020, 2010.11929.
Equation: x_i <- x_i + P'[y_i, x_i], with P' the table P, or P resampled to the grid of the images at hand.
Cost: n c, and 16 c for each place of another grid; rows * columns * c weights.
Deviation: the class token has no row. It is a vector of its own already, and its row would be a second one added to it.
Beyond the paper, which resamples bilinearly: bicubic resampling, as in DINO, timm and transformers.
"""

from math import isqrt
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.position._tables import larger_grid
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.spec import Spec
from anyformer.typing import PositiveFloat, Size


class VitLearned(Position):
    """Adds a row of a table on a grid. A model trained on one grid serves another when built with `to_rows`, `to_columns`.

    Args:
        rows: height in tokens of the grid in training; None: of the largest square within max_length.
        columns: its width; None: as rows.
        to_rows, to_columns: size of the grid that the table is resampled to in each call; None: its own. The weights are those of
            rows and columns, and training them through the resampling is possible.
        resample: "bicubic" between centres, as in DINO and transformers, or "bilinear" with the corners kept in place, as in the
            paper's code.
        std: standard deviation of the initial table (0.02 in the paper); None: dim ** -0.5, which makes its rows as long as token
            vectors.

    Raises:
        SpecError: one of to_rows and to_columns without the other; (in `embed`) a place outside the grid.
    """

    name = "vit_learned"
    summary = "one trainable vector a patch, resampled for other grids"
    paper = "Dosovitskiy et al. 2020, 2010.11929"
    family = ("vision", "absolute")
    scope = "model"
    additive = True
    axes = 2

    def __init__(
        self,
        site: Site,
        *,
        rows: Size | None = None,
        columns: Size | None = None,
        to_rows: Size | None = None,
        to_columns: Size | None = None,
        resample: Literal["bicubic", "bilinear"] = "bicubic",
        std: PositiveFloat | None = None,
    ) -> None:
        super().__init__(site)
        if (to_rows is None) != (to_columns is None):
            raise SpecError(
                f"vit_learned: expected to_rows and to_columns, or neither, got to_rows={to_rows} and to_columns={to_columns}; "
                "a grid has both"
            )
        self.forms = ((Form.EMBED,),)
        self.relative = False
        height = isqrt(site.max_length) if rows is None else rows
        self.size = (height, height if columns is None else columns)
        self.to_size = self.size if to_rows is None or to_columns is None else (to_rows, to_columns)
        self.limit = self.to_size
        self.extensions = ("stretch",)
        self.resample = resample
        self.table = nn.Parameter(torch.empty(*self.size, site.dim))
        nn.init.normal_(self.table, std=site.dim**-0.5 if std is None else std)

    def extended(self, spec: Spec, way: Spec, to: int) -> Spec:
        """The same table resampled to a larger grid of its shape."""
        return larger_grid(spec, self.size, to)

    def embed(
        self, x: Float[Tensor, "b n c"], positions: Int[Tensor, "#b n 2"], tokens: Int[Tensor, "b n"] | None
    ) -> Float[Tensor, "b n c"]:
        """`x + P'[row, column]`, added in the wider of float32 and the dtypes."""
        return (x + self.code(positions)).to(x.dtype)

    def code(self, positions: Int[Tensor, "#b n 2"]) -> Float[Tensor, "#b n c"]:
        """`P'[row, column]`."""
        self.admit(positions)
        row, column = positions.unbind(-1)
        return self.resampled()[row, column]

    def resampled(self) -> Float[Tensor, "y x c"]:
        """The table on the grid at hand, in the wider of float32 and its dtype; its own grid gives the table itself."""
        table = self.table.to(torch.promote_types(torch.float32, self.table.dtype))
        if self.to_size == self.size:
            return table
        corners = self.resample == "bilinear"
        image = table.permute(2, 0, 1)[None]
        return F.interpolate(image, self.to_size, mode=self.resample, align_corners=corners)[0].permute(1, 2, 0)
