"""PoPE: queries and keys become lengths, and their positions angles, so that what a token is and where it is never mix.

Paper: Gopalakrishnan, Csordas, Schmidhuber and Mozer 2025, 2509.10534.
Equation: s_ij = sum_c softplus(q_ic) softplus(k_jc) cos((j - i) w_c + delta_c) / sqrt(d), with w_c = base ** (-c / d), one wave for
    each of the d channels, and delta learned between -2 pi and 0.
Cost: queries and keys of twice the width, so 6 n m d multiply-adds a head in place of 4; h d weights.
Deviation: delta belongs to key heads, which the query heads that share one share.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.forms import Form
from anyformer.ops.phases import phases
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.typing import PositiveFloat


class Pope(Position):
    """Places each channel on a circle: its length is the token's, its angle the position's.

    Args:
        base: the slowest channel turns once in about 2 pi * base tokens.
        spread: whether delta starts uniformly between -2 pi and 0 rather than at 0.
    """

    name = "pope"
    summary = "queries and keys become lengths, their positions angles"
    paper = "Gopalakrishnan et al. 2025, 2509.10534"
    family = ("since the survey", "rotary")

    def __init__(self, site: Site, *, base: PositiveFloat = 10000.0, spread: bool = False) -> None:
        super().__init__(site)
        self.forms = ((Form.ROTATE,),)
        self.widens = True
        self.base = base
        self.delta = nn.Parameter(torch.zeros(site.kv_heads, site.head_dim))
        if spread:
            nn.init.uniform_(self.delta, -2 * math.pi, 0.0)

    def rotate(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b k m d"],
        q_pos: Int[Tensor, "#b n"],
        k_pos: Int[Tensor, "#b m"],
    ) -> tuple[Float[Tensor, "b h n e"], Float[Tensor, "b k m e"]]:
        """`softplus(q) [cos | sin](i w)` and `softplus(k) [cos | sin](j w + delta)`, twice as wide as they came."""
        delta = self.delta.to(torch.float64).clamp(-2 * math.pi, 0.0)[:, None]
        width = 2 * self.site.head_dim  # a wave a channel, where rotary pairs have one for two
        q_angles = phases(q_pos, width, self.base)[:, None]
        k_angles = phases(k_pos, width, self.base)[:, None] + delta
        return _placed(q, q_angles), _placed(k, k_angles)


def _placed(x: Tensor, angles: Tensor) -> Tensor:
    wide = torch.promote_types(torch.float32, x.dtype)
    lengths = F.softplus(x.to(wide))
    return torch.cat([lengths * angles.cos().to(wide), lengths * angles.sin().to(wide)], dim=-1)
