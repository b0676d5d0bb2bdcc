"""Terms of pairs that are looked up by row of a table: no tensor with a vector for each pair is ever made."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def row_products(
    x: Float[Tensor, "b h n d"], table: Float[Tensor, "*h r d"], rows: Int[Tensor, "#b 1 n m"]
) -> Float[Tensor, "b h n m"]:
    """`x_i . table[rows_ij]`, in the wider of float32 and x's dtype; each token meets each row once.

    Args:
        table: one for all heads, or one a head.
    """
    wide = torch.promote_types(torch.float32, x.dtype)
    by_row = x.to(wide) @ table.to(wide).mT  # [b h n r]
    return by_row.gather(-1, rows.long().expand(*x.shape[:3], rows.shape[3]))


def row_sums(
    weights: Float[Tensor, "b h n m"], table: Float[Tensor, "*h r v"], rows: Int[Tensor, "#b 1 n m"]
) -> Float[Tensor, "b h n v"]:
    """`sum_j weights_ij table[rows_ij]`: the weights are summed by row first.

    Args:
        table: one for all heads, or one a head.
    """
    by_row = weights.new_zeros(*weights.shape[:3], table.shape[-2])
    return by_row.scatter_add(-1, rows.long().expand_as(weights), weights) @ table.to(weights.dtype)
