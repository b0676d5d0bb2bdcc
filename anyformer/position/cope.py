"""CoPE: positions are counted in tokens that the query finds worth counting, so that "two sentences ago" is a position.

Paper: Golovneva, Wang, Weston and Sukhbaatar 2024, 2405.18719.
Equation: with l_ij = q_i . k_j / sqrt(d) over the keys that query i meets, and g_ij = sigmoid(l_ij),
    p_ij = min(sum_(t = j..i) g_it, positions - 1),   s_ij = l_ij + q_i . e[p_ij],
    where e between two whole positions is interpolated. e serves all heads of a layer, and meets q without a factor.
Cost: n h positions d, and a running sum and two look-ups a pair.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.forms import Form
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.typing import Size


class Cope(Position):
    """Counts, for each query, the keys that it attends to, from itself backwards; the count is the key's position.

    Causal only: counts begin at the query and run back.

    Args:
        positions: number of vectors e; counts stop at the last.
    """

    name = "cope"
    summary = "positions are counts of the keys that a query attends to"
    paper = "Golovneva et al. 2024, 2405.18719"
    family = ("since the survey", "contextual")

    def __init__(self, site: Site, *, positions: Size = 64) -> None:
        super().__init__(site)
        self.forms = ((Form.ROW,),)
        self.causal_only = True
        self.table = nn.Parameter(torch.zeros(positions, site.head_dim))

    def row(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        logits: Float[Tensor, "b h n m"],
        facts: Float[Tensor, "b m w"] | None,
    ) -> Float[Tensor, "b h n m"]:
        """`l + q . e[p]`; keys that are hidden count for nothing."""
        last = len(self.table) - 1
        counts = torch.sigmoid(logits).flip(-1).cumsum(dim=-1).flip(-1).clamp(max=last)
        below = counts.detach().floor()
        share = counts - below
        met = q.to(logits.dtype) @ self.table.to(logits.dtype).T  # [b h n positions]
        lower = met.gather(-1, below.long())
        upper = met.gather(-1, (below.long() + 1).clamp(max=last))
        return logits + lower + share * (upper - lower)
