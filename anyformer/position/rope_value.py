"""Rotated values: each value is turned by its own position and, with the inverse, each output turned back.

Paper: Su et al. 2021, 2104.09864, for the rotation; the released RoFormer code turns values too, without the inverse.
Equation: o_i = sum_j w_ij R(j) v_j               (absolute: a value shows where it is)
          o_i = sum_j w_ij R(j - i) v_j           (relative, with the inverse)
    where R(p) turns pair number l of the d channels by p base ** (-2 l / d), as in rope.
Cost: (n h + m k) d.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.ops.phases import phases
from anyformer.ops.turn import Pairing, turned
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.typing import PositiveFloat


class RopeValue(Position):
    """Rotates values by position * frequency, so that the mixture of values knows where each came from.

    Args:
        inverse: whether the output is turned back by the query's position. With it, only offsets are seen; without it,
            positions themselves.
        scores: whether queries and keys are rotated too, as by rope; without it, scores know no positions.
        base: the slowest pair turns once in about 2 pi * base tokens.
        pairing: which channels turn together: "half" (l, l + d/2), "interleaved" (2l, 2l + 1).

    Raises:
        SpecError: a head has an odd number of channels.
    """

    name = "rope_value"
    summary = "values are rotated by their own position, and outputs back"
    paper = "Su et al. 2021, 2104.09864"
    family = ("other", "rotary")
    scope = "model"

    def __init__(
        self,
        site: Site,
        *,
        inverse: bool = False,
        scores: bool = False,
        base: PositiveFloat = 10000.0,
        pairing: Pairing = "half",
    ) -> None:
        super().__init__(site)
        if site.head_dim % 2:
            raise SpecError(
                f"rope_value: channels turn in pairs, expected an even head_dim, got {site.head_dim}; choose another"
            )
        self.forms = ((Form.TURN,),) + ((Form.ROTATE,),) * scores
        self.relative = inverse
        self.inverse = inverse
        self.base = base
        self.pairing: Pairing = pairing

    def rotate(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b k m d"],
        q_pos: Int[Tensor, "#b n"],
        k_pos: Int[Tensor, "#b m"],
    ) -> tuple[Float[Tensor, "b h n d"], Float[Tensor, "b k m d"]]:
        """Queries and keys, turned as by rope; called where `scores`."""
        return self._turned(q, q_pos), self._turned(k, k_pos)

    def turn(self, v: Float[Tensor, "b k m v"], k_pos: Int[Tensor, "#b m"]) -> Float[Tensor, "b k m v"]:
        """`R(k_pos) v`."""
        return self._turned(v, k_pos)

    def turn_back(self, out: Float[Tensor, "b h n v"], q_pos: Int[Tensor, "#b n"]) -> Float[Tensor, "b h n v"]:
        """`R(-q_pos) out` with the inverse; else `out`."""
        return self._turned(out, -q_pos) if self.inverse else out

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = phases(positions, x.shape[-1], self.base)[:, None]
        wide = torch.promote_types(torch.float32, x.dtype)
        return turned(x, angles.cos().to(wide), angles.sin().to(wide), self.pairing)
