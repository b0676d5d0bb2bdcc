"""Top-k attention: softmax over the k largest logits of each row.

Paper: Zhao et al. 2019, 1912.11637; in pieces of rows: Gupta et al. 2021, 2106.06899.
Equation: out_i = sum_j softmax_j(s_ij) v_j over the allowed j with s_ij >= t_i, t_i the k-th largest allowed logit of row i;
    s_ij = s q_i . k_j + b_ij.
Deviation: logits that equal the k-th largest, but for rounding, are all kept, so that the choice does not hang on an order of
    equals.
"""

from jaxtyping import Float
from torch import Tensor

from anyformer.attention._rows import FORMS, attend_rows, keep_from, weigh_by_softmax
from anyformer.attention.base import Attention
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.site import Site
from anyformer.typing import Size


class Topk(Attention):
    """Each query reads the keys of its k largest logits and no other.

    The gradient reaches the kept logits only. A row with fewer than k keys that it may see reads them all.

    Args:
        k: number of keys a query reads. At 1 the weights are constant, so queries and keys get no gradient.
    """

    name = "topk"
    summary = "softmax over the k largest logits of each row"
    paper = "Zhao et al. 2019, 1912.11637"
    family = ("large weights", "top-k")
    forms = FORMS
    refusal = "it reads every pair, yet this form has no reader; use an encoding that embeds, rotates, biases or scores"
    decodes = "cache"

    def __init__(self, site: Site, *, k: Size = 8) -> None:
        super().__init__(site)
        self.k = k

    def cost(self) -> Cost:
        """All pairs have a logit, and weights multiply densely, zeros too; the choice takes comparisons only."""
        return Cost(self.site, "2 pairs d", memory="pairs", again="pairs d")

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b k m d"], v: Float[Tensor, "b k m v"], context: Context
    ) -> Float[Tensor, "b h n v"]:
        """Outputs of the queries; see the module's equation."""
        return attend_rows(q, k, v, context, lambda logits: weigh(logits, self.k))


def weigh(logits: Float[Tensor, "... m"], k: int) -> Float[Tensor, "... m"]:
    """Softmax over the k largest of each row; what is -inf is never kept, however few others there are."""
    if k >= logits.shape[-1]:
        return weigh_by_softmax(logits)
    least = logits.detach().topk(k, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    return keep_from(logits, least)
