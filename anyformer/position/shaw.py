"""Shaw's relative positions: one learned vector for each clipped offset, added to the keys and to the values.

Paper: Shaw, Uszkoreit and Vaswani 2018, 1803.02155.
Equation: s_ij = q_i . (k_j + aK[r]) / sqrt(d),   o_i = sum_j w_ij (v_j + aV[r]),   r = clip(j - i, -left, right).
Cost: n h (left + right + 1) d, and one look-up a pair; no [n m d] tensor.
Beyond the paper: the clip may differ between past and future, and either term may be left out.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.context import Offsets
from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.ops.lookup import row_products, row_sums
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.typing import Count


class Shaw(Position):
    """Adds a vector of the clipped offset to each key and each value, the same for every head.

    Args:
        left: offset in tokens beyond which all earlier keys are alike.
        right: the same for later keys; None: as left.
        keys: whether the keys have a term.
        values: whether the values have one; the attention then needs its weights written out.

    Raises:
        SpecError: neither keys nor values.
    """

    name = "shaw"
    summary = "a learned vector of the clipped offset, added to keys and values"
    paper = "Shaw et al. 2018, 1803.02155"
    family = ("relative", "classic")

    def __init__(
        self, site: Site, *, left: Count = 16, right: Count | None = None, keys: bool = True, values: bool = True
    ) -> None:
        super().__init__(site)
        if not keys and not values:
            raise SpecError(
                'shaw: expected a term on keys, on values or on both, got neither; for no position use "none"'
            )
        self.forms = ((Form.TABLE, Form.SCORE, Form.CLIPPED),) * keys + ((Form.VALUE, Form.CLIPPED),) * values
        self.left = left
        self.right = left if right is None else right
        self.clip = (self.left, self.right)
        rows = self.left + self.right + 1
        self.key_table = nn.Parameter(torch.empty(rows, site.head_dim)) if keys else None
        self.value_table = nn.Parameter(torch.empty(rows, site.head_dim)) if values else None
        for table in self.parameters():
            nn.init.normal_(table, std=site.head_dim**-0.5)

    def bucket(self, offset: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Row of the tables for an offset of key minus query."""
        return offset.clamp(-self.left, self.right) + self.left

    def tables(self, low: int, high: int) -> Offsets:
        """TABLE: the vectors added to keys and values by offset."""
        rows = self.bucket(torch.arange(low, high + 1, device=next(self.parameters()).device))

        def by_offset(table: Tensor | None) -> Tensor | None:
            return None if table is None else table[rows].expand(self.site.heads, -1, -1)

        return Offsets(keys=by_offset(self.key_table), values=by_offset(self.value_table))

    def score(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        q_pos: Int[Tensor, "#b n"],
        k_pos: Int[Tensor, "#b m"],
    ) -> Float[Tensor, "b h n m"]:
        """`scale(d) * q_i . aK[clip(j - i)]`."""
        assert self.key_table is not None, "built without a term on keys"
        return self.scale(self.site.head_dim) * row_products(q, self.key_table, self._rows(q_pos, k_pos))

    def value(
        self, weights: Float[Tensor, "b h n m"], q_pos: Int[Tensor, "#b n"], k_pos: Int[Tensor, "#b m"]
    ) -> Float[Tensor, "b h n v"]:
        """`sum_j w_ij aV[clip(j - i)]`: the weights are summed by row of the table first."""
        assert self.value_table is not None, "built without a term on values"
        return row_sums(weights, self.value_table, self._rows(q_pos, k_pos))

    def _rows(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Row of the tables for every pair, `[b|1 1 n m]`."""
        return self.bucket(k_pos[:, None, None, :] - q_pos[:, None, :, None])
