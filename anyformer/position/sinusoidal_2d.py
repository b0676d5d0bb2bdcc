"""Sinusoidal positions on a grid: half the channels tell the row, half the column, added to the token vectors.

Paper: He et al. 2021, 2111.06377 (MAE), as Chen, Xie and He 2021, 2104.02057; Carion et al. 2020, 2005.12872 (DETR).
Equation: x_i <- sqrt(c) x_i + [p(column) | p(row)], with sin(t w_l) and cos(t w_l) in p(t), w_l = base ** (-4 l / c), l < c / 4.
Cost: n c.
Beyond the paper: the other layouts found in the field, and token vectors that are scaled first, as in Vaswani et al. 2017.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.ops.phases import phases
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.typing import PositiveFloat, Size

Layout = Literal["mae", "rows", "timm", "interleaved"]


class Sinusoidal2d(Position):
    """Adds waves along the columns and waves along the rows; any grid, no weights.

    Args:
        layout: the order of the channels, with y the row and x the column: "mae" `[sin x | cos x | sin y | cos y]`, as in the
            paper's code and transformers 4; "rows" `[sin y | cos y | sin x | cos x]`, as in transformers 5; "timm"
            `[sin y | sin x | cos y | cos x]`; "interleaved" `[sin y, cos y, sin y, cos y, ... | sin x, cos x, ...]`, as in DETR
            and positional-encodings.
        base: ratio of the longest to the shortest wavelength, the latter 2 pi tokens.
        scale_tokens: whether token vectors are multiplied by sqrt(c) first, without which vectors of length about 1 drown.
            Turn it off where they already have entries of about 1, as embedded patches do.
        rows, columns: size of the image in tokens, to which positions are then relative, as in DETR: row t counts as
            2 pi (t + 1) / rows. None: the row itself.

    Raises:
        SpecError: dim is no multiple of 4; one of rows and columns without the other.
    """

    name = "sinusoidal_2d"
    summary = "a fixed code of sines and cosines of row and column, added to the token vectors"
    paper = "He et al. 2021, 2111.06377"
    family = ("vision", "absolute")
    scope = "model"
    additive = True
    axes = 2

    def __init__(
        self,
        site: Site,
        *,
        layout: Layout = "mae",
        base: PositiveFloat = 10000.0,
        scale_tokens: bool = True,
        rows: Size | None = None,
        columns: Size | None = None,
    ) -> None:
        super().__init__(site)
        if site.dim % 4:
            raise SpecError(
                f"sinusoidal_2d: sine and cosine of row and column need a dim that is a multiple of 4, got {site.dim}; "
                "choose another"
            )
        if (rows is None) != (columns is None):
            raise SpecError(
                f"sinusoidal_2d: expected rows and columns, or neither, got rows={rows} and columns={columns}; "
                "an image has both"
            )
        self.forms = ((Form.EMBED,),)
        self.relative = False
        self.layout: Layout = layout
        self.base = base
        self.scale_tokens = scale_tokens
        self.size = None if rows is None or columns is None else (rows, columns)

    def embed(
        self, x: Float[Tensor, "b n c"], positions: Int[Tensor, "#b n 2"], tokens: Int[Tensor, "b n"] | None
    ) -> Float[Tensor, "b n c"]:
        """`sqrt(c) x + p(positions)`, added in the wider of float32 and x's dtype."""
        wide = torch.promote_types(torch.float32, x.dtype)
        scaled = x.to(wide) * x.shape[-1] ** 0.5 if self.scale_tokens else x.to(wide)
        return (scaled + self.code(positions).to(wide)).to(x.dtype)

    def code(self, positions: Int[Tensor, "#b n 2"]) -> Float64[Tensor, "#b n c"]:
        """The vectors that are added."""
        steps = [(0, 1.0), (0, 1.0)] if self.size is None else [(1, 2 * math.pi / length) for length in self.size]
        row, column = (
            phases(each + first, self.site.dim // 2, self.base) * step
            for each, (first, step) in zip(positions.unbind(-1), steps, strict=True)
        )
        if self.layout == "interleaved":
            waves = torch.stack([row.sin(), row.cos(), column.sin(), column.cos()], dim=-1).unflatten(-1, (2, 2))
            return waves.transpose(-3, -2).flatten(-3)
        order = {
            "mae": (column.sin(), column.cos(), row.sin(), row.cos()),
            "rows": (row.sin(), row.cos(), column.sin(), column.cos()),
            "timm": (row.sin(), column.sin(), row.cos(), column.cos()),
        }
        return torch.cat(order[self.layout], dim=-1)
