"""KERPLE: a learned penalty on distance, logarithmic or a power, with two numbers a head.

Paper: Chi, Fan, Ramadge and Rudnicky 2022, 2205.09921.
Equation: s_ij = q_i . k_j / sqrt(d) - r1_h ln(1 + r2_h |i - j|)     (log)
          s_ij = q_i . k_j / sqrt(d) - r1_h |i - j| ** r2_h          (power, 0 < r2 <= 2)
Cost: one logarithm or power a pair, or an offset; 2 h weights for all layers together.
Beyond the paper, which is causal: both directions are penalised alike. Left out: its multiplicative kernel on the scores.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.forms import Form
from anyformer.position.base import Position
from anyformer.site import Site

_LEAST = 0.01  # as in the authors' code, which keeps both numbers from here on


class Kerple(Position):
    """Subtracts a learned function of the distance from the scaled logits: each head learns how far it looks.

    Args:
        kind: "log", which fades ever more slowly, or "power"; `alibi` is the power 1 with fixed factors.
    """

    name = "kerple"
    summary = "minus a learned logarithm or power of the distance on the scaled logits"
    paper = "Chi et al. 2022, 2205.09921"
    family = ("since the survey", "kerple")
    scope = "model"

    def __init__(self, site: Site, *, kind: Literal["log", "power"] = "log") -> None:
        super().__init__(site)
        self.forms = ((Form.TOEPLITZ, Form.BIAS),)
        self.curve: Literal["log", "power"] = kind
        self.r1 = nn.Parameter(torch.empty(site.heads))
        self.r2 = nn.Parameter(torch.empty(site.heads))
        nn.init.uniform_(self.r1, 0.0, 2.0 if kind == "log" else 1.0)
        nn.init.uniform_(self.r2, 0.0, 1.0 if kind == "log" else 2.0)

    def bias(
        self, head: Int[Tensor, "..."], q_pos: Int[Tensor, "..."], k_pos: Int[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        """The penalty of `|k_pos - q_pos|`, in the wider of float32 and the weights' dtype."""
        r1, r2 = self._numbers()
        return penalty((k_pos - q_pos).abs(), r1[head], r2[head], self.curve)

    def offsets(self, low: int, high: int) -> Float[Tensor, "h r"]:
        """The penalty of |offset| for offsets low..high."""
        r1, r2 = self._numbers()
        distance = torch.arange(low, high + 1, device=r1.device).abs()
        return penalty(distance, r1[:, None], r2[:, None], self.curve)

    def _numbers(self) -> tuple[Float[Tensor, "h"], Float[Tensor, "h"]]:
        """r1 and r2 of each head, within their bounds."""
        wide = torch.promote_types(torch.float32, self.r1.dtype)
        return within(self.r1.to(wide), None), within(self.r2.to(wide), 2.0 if self.curve == "power" else None)


def penalty(
    distance: Int[Tensor, "..."], r1: Float[Tensor, "..."], r2: Float[Tensor, "..."], kind: Literal["log", "power"]
) -> Float[Tensor, "..."]:
    """The equation's term of a distance in tokens."""
    distance = distance.to(r1.dtype)
    return -r1 * (torch.log1p(r2 * distance) if kind == "log" else distance**r2)


def within(x: Float[Tensor, "h"], most: float | None) -> Float[Tensor, "h"]:
    """x clamped to 0.01..most, with the gradient of x itself, so that a number beyond its bound can come back."""
    return x + (x.clamp(_LEAST, most) - x).detach()
