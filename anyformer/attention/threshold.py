"""Threshold attention: weights below a threshold are cut off, the others share the whole.

Paper: Gupta et al. 2021, 2106.06899 (keep the largest weights); Holtzman et al. 2020, 1904.09751 (the smallest set of a given
    mass, there for words).
Equation: with p_i = softmax(s_i) over the allowed keys and s_ij = s q_i . k_j + b_ij,

    out_i = sum_j p_ij v_j / sum_j p_ij   over the j kept:
    rule "largest":  p_ij >= level max_l p_il,  the same as s_ij >= max_l s_il + log(level)
    rule "weight":   p_ij >= level, or p_ij is the largest
    rule "mass":     the fewest largest weights whose sum reaches level

Deviation: the papers name no rule relative to the largest weight. It is the default because it never empties a row: a fixed
    threshold keeps a single key as soon as weights spread over many.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.attention._rows import FORMS, attend_rows, keep_from, weigh_by_softmax
from anyformer.attention.base import Attention
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.errors import SpecError
from anyformer.site import Site
from anyformer.typing import Fraction

Rule = Literal["largest", "weight", "mass"]


class Threshold(Attention):
    """Each query reads the keys whose weights are large enough and no other.

    The gradient reaches the kept logits only. Equal weights are kept or cut off together.

    Args:
        level: the threshold, above 0 and below 1; see `rule`.
        rule: what it is held against: "largest", the row's largest weight; "weight", 1; "mass", the sum of what is kept.

    Raises:
        SpecError: the level is 0.
    """

    name = "threshold"
    summary = "softmax over the logits of each row that come near enough to the largest"
    paper = "Gupta et al. 2021, 2106.06899"
    family = ("large weights", "threshold")
    forms = FORMS
    refusal = "it reads every pair, yet this form has no reader; use an encoding that embeds, rotates, biases or scores"
    decodes = "cache"

    def __init__(self, site: Site, *, level: Fraction = 0.1, rule: Rule = "largest") -> None:
        super().__init__(site)
        if level == 0:
            raise SpecError(f"{self.name}: level=0 keeps {'nothing' if rule == 'mass' else 'all'}; use a level above 0")
        self.level = level
        self.rule: Rule = rule

    def cost(self) -> Cost:
        """All pairs have a logit, and weights multiply densely, zeros too; "mass" sorts each row."""
        return Cost(self.site, "2 pairs d", memory="pairs", again="pairs d")

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b k m d"], v: Float[Tensor, "b k m v"], context: Context
    ) -> Float[Tensor, "b h n v"]:
        """Outputs of the queries; see the module's equation."""
        return attend_rows(q, k, v, context, lambda logits: weigh(logits, self.level, self.rule))


def weigh(logits: Float[Tensor, "... m"], level: float, rule: Rule) -> Float[Tensor, "... m"]:
    """Softmax over the logits of each row that the rule keeps; what is -inf is never kept."""
    held = logits.detach()
    largest = held.amax(dim=-1, keepdim=True)
    if rule == "largest":
        least = largest + math.log(level)
    elif rule == "weight":
        least = torch.minimum(largest, held.logsumexp(dim=-1, keepdim=True) + math.log(level))
    else:
        falling = held.sort(dim=-1, descending=True).values
        before = weigh_by_softmax(falling).cumsum(dim=-1).roll(1, dims=-1)
        before[..., 0] = 0.0
        needed = (before < level).sum(dim=-1, keepdim=True)  # the first is, since the level is above 0
        least = falling.gather(-1, needed - 1)
    return keep_from(logits, least)
