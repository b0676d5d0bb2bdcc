"""Hierarchical positions: a table of r rows serves r^2 positions, each a mixture of two rows, as two digits make a number.

Paper: Su 2020, https://kexue.fm/archives/7947 (no arXiv id).
Equation: x_i <- x_i + alpha u[i // r] + (1 - alpha) u[i % r], with u = (P - alpha P_0) / (1 - alpha) for the rows P of the table.
    Positions 0..r-1 are the rows of P themselves.
Cost: n c and r c for u; r c weights.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.typing import PositiveFloat, Size


class Hierarchical(Position):
    """Adds a row of a table for short inputs and mixtures of two rows beyond; positions 0..rows^2-1 exist.

    Args:
        rows: rows of the table: the positions that training must reach. To extend a model with learned positions, give it the
            rows of its table and load them.
        alpha: share of the row of the higher digit.
        std: standard deviation of the initial table; None: dim ** -0.5, which makes its rows as long as token vectors.

    Raises:
        SpecError: alpha is not between 0 and 1, or is 0.5; in `embed`, a position is negative or at or beyond rows^2.
    """

    name = "hierarchical"
    summary = "a trained table of r rows makes codes for r^2 positions"
    paper = "Su 2020, kexue.fm/archives/7947"
    family = ("absolute", "learned")
    scope = "model"
    additive = True
    digits = 2

    def __init__(
        self, site: Site, *, rows: Size = 512, alpha: PositiveFloat = 0.4, std: PositiveFloat | None = None
    ) -> None:
        super().__init__(site)
        if alpha >= 1.0:
            raise SpecError(f"hierarchical: expected an alpha between 0 and 1, got {alpha}; 0.4 is the author's")
        if alpha == 0.5:
            raise SpecError(
                "hierarchical: with alpha=0.5 positions i r + j and j r + i have the same code; expected another number "
                "between 0 and 1, such as 0.4"
            )
        self.forms = ((Form.EMBED,),)
        self.relative = False
        self.limit = rows**2
        self.alpha = alpha
        self.table = nn.Parameter(torch.empty(rows, site.dim))
        nn.init.normal_(self.table, std=site.dim**-0.5 if std is None else std)

    def embed(
        self, x: Float[Tensor, "b n c"], positions: Int[Tensor, "#b n"], tokens: Int[Tensor, "b n"] | None
    ) -> Float[Tensor, "b n c"]:
        """`x + code(positions)`, added in the wider of float32 and the table's dtype."""
        return (x + self.code(positions)).to(x.dtype)

    def code(self, positions: Int[Tensor, "#b n"]) -> Float[Tensor, "#b n c"]:
        """The mixture of two rows; for positions below `rows`, the row."""
        self.admit(positions)
        table = self.table.to(torch.promote_types(torch.float32, self.table.dtype))
        return mixed(table, positions, self.alpha)


def mixed(table: Float[Tensor, "r c"], positions: Int[Tensor, "#b n"], alpha: float) -> Float[Tensor, "#b n c"]:
    """The code of each position; see the module's equation."""
    rows = len(table)
    basis = (table - alpha * table[:1]) / (1.0 - alpha)
    low = positions % rows
    mixture = alpha * basis[positions // rows] + (1.0 - alpha) * basis[low]
    # below `rows` both are equal but for rounding, and a model with learned positions must not change there
    return torch.where((positions < rows)[..., None], table[low], mixture)
