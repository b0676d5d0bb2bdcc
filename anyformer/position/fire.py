"""FIRE: a small network maps the distance, relative to how far the query is in, to a bias a head.

Paper: Li et al. 2023, 2310.04418.
Equation: s_ij = q_i . k_j / sqrt(d) + f_h(psi(|i - j|) / psi(max(L, i))), with psi(x) = ln(1 + c x), a network f of one hidden
    layer of rectified units, and learned c and L.
Cost: w (1 + h) multiply-adds a pair for w = width hidden units; w (2 + h) + h + 2 weights a layer.
Beyond the paper, which is causal: both directions count distance, and where a later key is farther than max(L, i), its distance
    takes that place, so that the fraction stays within 0..1. Left out: one network for all layers (FIRE-S).
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.forms import Form
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.typing import PositiveFloat, Size

_LEAST = 1e-6  # added to the denominator


class Fire(Position):
    """Adds a learned function of the relative distance to the scaled logits: within any length it only ever sees 0..1.

    Args:
        width: hidden units of the network.
        threshold: place in tokens up to which distances count in full, before L is learned.
        rate: c before it is learned: about 1 / rate tokens are told apart one by one, farther ones ever more coarsely.
    """

    name = "fire"
    summary = "a learned function of the distance over the query's own place, on the scaled logits"
    paper = "Li et al. 2023, 2310.04418"
    family = ("since the survey", "fire")

    def __init__(
        self, site: Site, *, width: Size = 32, threshold: PositiveFloat = 512.0, rate: PositiveFloat = 0.1
    ) -> None:
        super().__init__(site)
        self.forms = ((Form.BIAS,),)
        self.lacks = {
            Form.TOEPLITZ: "is not Toeplitz: past the first L tokens, L learned, the query's own place divides the distance"
        }
        self.relative = False
        self.threshold = threshold
        self.rate = nn.Parameter(torch.tensor(float(rate)))
        self.stretch = nn.Parameter(torch.ones(()))
        self.inner = nn.Linear(1, width)
        self.outer = nn.Linear(width, site.heads)

    def bias(
        self, head: Int[Tensor, "..."], q_pos: Int[Tensor, "..."], k_pos: Int[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        """`f_head(fraction)`, in the wider of float32 and the weights' dtype."""
        wide = torch.promote_types(torch.float32, self.rate.dtype)
        part = fraction(q_pos, k_pos, self.rate.to(wide), self.threshold * self.stretch.to(wide).abs())
        hidden = F.relu(F.linear(part[..., None], self.inner.weight.to(wide), self.inner.bias.to(wide)))
        return of_heads(F.linear(hidden, self.outer.weight.to(wide), self.outer.bias.to(wide)), head)


def fraction(
    q_pos: Int[Tensor, "..."], k_pos: Int[Tensor, "..."], rate: Float[Tensor, ""], threshold: Float[Tensor, ""]
) -> Float[Tensor, "..."]:
    """`psi(|i - j|) / psi(max(threshold, i, |i - j|))`; see the module's equation."""
    distance = (q_pos - k_pos).abs()
    most = torch.maximum(torch.maximum(q_pos, distance).to(rate.dtype), threshold)
    return _psi(distance.to(rate.dtype), rate) / (_psi(most, rate) + _LEAST)


def of_heads(values: Float[Tensor, "*p h"], head: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """`values[..., head]`, where head broadcasts against the other axes: heads before rows and columns in the usual case, which
    costs no tensor larger than the result."""
    listed = head.dim() >= 3 and head.numel() == head.shape[-3]
    if listed and values.dim() == 3:
        return values.movedim(-1, 0)[head.flatten()]
    if listed and values.dim() > 3 and values.shape[-4] == 1:
        return values.squeeze(-4).movedim(-1, -3).index_select(-3, head.flatten())
    shape = torch.broadcast_shapes(values.shape[:-1], head.shape)
    return values.expand(*shape, -1).gather(-1, head.expand(shape)[..., None])[..., 0]


def _psi(x: Float[Tensor, "..."], rate: Float[Tensor, ""]) -> Float[Tensor, "..."]:
    return torch.log1p(rate.abs() * x)
