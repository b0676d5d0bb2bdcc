"""Rotary positions: queries and keys are rotated by their own position, so that their product sees the offset only.

Paper: Su et al. 2021, 2104.09864.
Equation: q'_i = R(i) q_i, k'_j = R(j) k_j, where R(p) turns pair (a, b) number l of the d channels by the angle p w_l:
    y_a = x_a cos - x_b sin,   y_b = x_a sin + x_b cos,   w_l = base ** (-2 l / d).
    Hence q'_i . k'_j = q_i . R(j - i) k_j.
Cost: (n h + m k) d.
Beyond the paper: pairs may be channels (l, l + d/2), the default, and only the first channels of a head may be rotated.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.ops.phases import phases
from anyformer.ops.turn import Pairing, turned
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.typing import PositiveFloat, Size


class Rope(Position):
    """Rotates queries and keys by position * frequency. Each call makes its angles afresh; nothing is stored.

    Args:
        base: the slowest pair turns once in about 2 pi * base tokens.
        pairing: which channels turn together: "half" (l, l + d/2) as in Llama and NeoX, "interleaved" (2l, 2l + 1) as
            in the paper, RoFormer and GPT-J. With the rows of W_q and W_k permuted, the one is the other.
        width: how many of a head's channels are rotated, the first ones; None: all. Frequencies are those of a head
            this wide.
        angle_dtype: "float64", or "float32" to equal implementations that round angles (by 0.05 radians at position
            1,000,000).

    Raises:
        SpecError: the rotated width is odd or wider than a head.
    """

    name = "rope"
    summary = "queries and keys are rotated by their own position"
    paper = "Su et al. 2021, 2104.09864"
    family = ("other", "rotary")
    scope = "model"

    def __init__(
        self,
        site: Site,
        *,
        base: PositiveFloat = 10000.0,
        pairing: Pairing = "half",
        width: Size | None = None,
        angle_dtype: Literal["float64", "float32"] = "float64",
    ) -> None:
        super().__init__(site)
        self.forms = ((Form.ROTATE,),)
        self.base = base
        self.pairing: Pairing = pairing
        self.width = site.head_dim if width is None else width
        self.angle_dtype = angle_dtype
        if self.width > site.head_dim:
            raise SpecError(
                f"rope: expected a width of at most the head's {site.head_dim} channels, got {width}; "
                "leave it out to rotate all"
            )
        if self.width % 2:
            raise SpecError(
                f"rope: channels turn in pairs, expected an even number of them, got {self.width}; "
                "choose an even head_dim, or rotate only the first ones with an even width"
            )

    def rotate(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b k m d"],
        q_pos: Int[Tensor, "#b n"],
        k_pos: Int[Tensor, "#b m"],
    ) -> tuple[Float[Tensor, "b h n d"], Float[Tensor, "b k m d"]]:
        """Queries and keys, turned in the wider of float32 and their dtype."""
        q_turn = self._turn(q_pos, q.dtype)
        k_turn = q_turn if k_pos is q_pos and k.dtype == q.dtype else self._turn(k_pos, k.dtype)
        return turned(q, *q_turn, self.pairing), turned(k, *k_turn, self.pairing)

    def _turn(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles, `[b|1 1 n width/2]`."""
        if self.angle_dtype == "float64":
            angles = phases(positions, self.width, self.base)
        else:  # every step as the float32 implementations do it, to equal them bit for bit
            exponents = torch.arange(0, self.width, 2, dtype=torch.float32, device=positions.device) / self.width
            angles = positions[..., None].to(torch.float32) * (1.0 / self.base**exponents)
        wide = torch.promote_types(torch.float32, dtype)
        return angles.cos()[:, None].to(wide), angles.sin()[:, None].to(wide)
