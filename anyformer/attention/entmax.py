"""Entmax attention: weights that are a smooth function of the logits and exactly 0 where a logit is far below the largest.

Paper: Peters, Niculae and Martins 2019, 1905.05702; alpha = 2 (sparsemax): Martins and Astudillo 2016, 1602.02068; a learned
    alpha a head: Correia, Niculae and Martins 2019, 1909.00015.
Equation: out_i = sum_j p_ij v_j, p_ij = max(0, (alpha - 1) s_ij - t_i) ** (1 / (alpha - 1)), with t_i such that the row sums to 1
    and s_ij = s q_i . k_j + b_ij over the allowed keys; alpha -> 1 is softmax.
Deviation: t_i is found by Newton steps for every alpha, where the papers sort (alpha 1.5 and 2) or bisect.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.attention._rows import FORMS, attend_rows, known_to_be_none
from anyformer.attention.base import Attention
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.errors import SpecError
from anyformer.site import Site

_STEPS = 100  # a bound; rows settle within some twenty
_PAIRS = 2**20  # logits held at once: Newton's steps pass over them many times, so they stay in the cache
_STEPS_COMPILED = 32  # all are taken, for compiled code cannot look whether rows have settled


class Entmax(Attention):
    """Each query weighs its keys by entmax: weights that are exactly 0 for small logits, without a cut.

    Args:
        alpha: above 1 (softmax) up to 2 (sparsemax): the larger, the more weights are 0.
        learned: whether each head learns an alpha of its own between 1 and 2, from `alpha` on.

    Raises:
        SpecError: alpha is out of range.
    """

    name = "entmax"
    summary = "weights that are a smooth function of the logits and exactly 0 for small ones"
    paper = "Peters et al. 2019, 1905.05702"
    family = ("large weights", "entmax")
    forms = FORMS
    refusal = "it reads every pair, yet this form has no reader; use an encoding that embeds, rotates, biases or scores"
    decodes = "cache"

    def __init__(self, site: Site, *, alpha: float = 1.5, learned: bool = False) -> None:
        super().__init__(site)
        if not 1 < alpha <= 2 or (learned and alpha == 2):
            raise SpecError(
                f"{self.name}: expected an alpha above 1 and {'below' if learned else 'up to'} 2, got {alpha}; "
                "softmax is alpha 1, sparsemax alpha 2"
            )
        self.alpha = alpha
        self.level: nn.Parameter | None = None
        """logit of alpha - 1, one a head."""
        if learned:
            self.level = nn.Parameter(torch.full((site.heads, 1, 1), alpha - 1).logit())

    def cost(self) -> Cost:
        """All pairs have a logit, and weights multiply densely, zeros too; about ten passes over the logits find t_i."""
        return Cost(self.site, "2 pairs d", memory="pairs", again="pairs d")

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b k m d"], v: Float[Tensor, "b k m v"], context: Context
    ) -> Float[Tensor, "b h n v"]:
        """Outputs of the queries; see the module's equation."""
        alpha = self.alpha if self.level is None else 1 + torch.sigmoid(self.level)
        return attend_rows(q, k, v, context, lambda logits: weigh(logits, alpha), _PAIRS)


def weigh(logits: Float[Tensor, "... m"], alpha: float | Float[Tensor, "h 1 1"]) -> Float[Tensor, "... m"]:
    """Entmax over the last axis; a row of -inf only gives zeros, with zero gradient.

    The sum of a row falls and is convex in the threshold, so Newton's steps climb to it from below and never pass it. They run
    outside the graph; one step more, inside it, has the gradient that the implicit equation gives.
    """
    largest = logits.detach().amax(dim=-1, keepdim=True)
    empty = largest == -torch.inf
    full = known_to_be_none(empty)
    if not full:
        logits, largest = logits.masked_fill(empty, 0.0), largest.masked_fill(empty, 0.0)
    x = (logits - largest) * (alpha - 1)
    power = 1 / (alpha - 1)
    with torch.no_grad():
        t = x.new_full((*x.shape[:-1], 1), -1.0)
        compiling = torch.compiler.is_compiling()
        for _ in range(_STEPS_COMPILED if compiling else _STEPS):
            step = _step(x, t, power)
            t = t + step
            if not compiling and bool((step <= 4 * torch.finfo(x.dtype).eps).all()):
                break
    t = t + _step(x, t, power)
    weights = (x - t).relu_().pow(power)
    return weights if full else weights.masked_fill(empty, 0.0)


def _step(x: Tensor, t: Tensor, power: float | Tensor) -> Tensor:
    """Newton's step of the threshold t towards a row sum of 1."""
    above = (x - t).relu_()
    held = above.detach()
    if isinstance(power, float) and power == 1.0:
        slope = (held > 0).sum(dim=-1, keepdim=True)
        return (above.sum(dim=-1, keepdim=True) - 1) / slope
    if isinstance(power, float) and power == 2.0:
        slope = 2 * held.sum(dim=-1, keepdim=True)
        return (torch.linalg.vecdot(above, above).unsqueeze(-1) - 1) / slope
    slope = (power * held.pow(power - 1).sum(dim=-1, keepdim=True)).detach()
    return (above.pow(power).sum(dim=-1, keepdim=True) - 1) / slope
