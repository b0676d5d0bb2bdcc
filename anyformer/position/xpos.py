"""xPos: rotary positions whose pairs fade with distance, each at a rate of its own.

Paper: Sun et al. 2022, 2212.10554.
Equation: q'_i = z ** (i / scale_base) R(i) q_i,   k'_j = z ** (-j / scale_base) R(j) k_j, with R of rope, and for pair
    number l the base z_l = (2 l / d + 0.4) / 1.4. Hence pair l of the product fades as z_l ** ((i - j) / scale_base).
Cost: (n h + m k) d.
Deviation: powers count from position 0 on both sides, in every call, where the authors' code counts from the middle of the
    sequence at hand, which a cache would have to redo. Products are the same; positions end where a factor leaves the dtype.
"""

import math

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

_GAMMA = 0.4
_USED = 0.93  # share of the dtype's exponents that the factors may take; queries and keys need the rest


class XPos(Position):
    """Rotates queries and keys, shrinking queries and growing keys with their position, so that far keys count less.

    Causal only: with a key after the query the product would grow with distance.

    Args:
        scale_base: tokens in which pair l fades by the factor z_l.
        base: the slowest pair turns once in about 2 pi * base tokens.
        pairing: which channels turn together: "half" (l, l + d/2), "interleaved" (2l, 2l + 1) as in the authors' code.

    Raises:
        SpecError: a head has an odd number of channels.
    """

    name = "xpos"
    summary = "queries and keys are rotated, and their products fade with distance"
    paper = "Sun et al. 2022, 2212.10554"
    family = ("since the survey", "xpos")
    scope = "model"

    def __init__(
        self,
        site: Site,
        *,
        scale_base: PositiveFloat = 512.0,
        base: PositiveFloat = 10000.0,
        pairing: Pairing = "half",
    ) -> None:
        super().__init__(site)
        if site.head_dim % 2:
            raise SpecError(
                f"xpos: channels turn in pairs, expected an even head_dim, got {site.head_dim}; choose another"
            )
        self.forms = ((Form.ROTATE,),)
        self.causal_only = True
        self.scale_base = scale_base
        self.base = base
        self.pairing: Pairing = pairing

    def rotate(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b k m d"],
        q_pos: Int[Tensor, "#b n"],
        k_pos: Int[Tensor, "#b m"],
    ) -> tuple[Float[Tensor, "b h n d"], Float[Tensor, "b k m d"]]:
        """Queries and keys, turned and scaled in the wider of float32 and their dtype.

        Raises:
            SpecError: a position so large that its factor leaves the range of the dtype.
        """
        for x, positions in ((q, q_pos), (k, k_pos)):
            self._bounded(positions, x.dtype)
        return self._placed(q, q_pos, 1), self._placed(k, k_pos, -1)

    def reach(self, dtype: torch.dtype) -> int:
        """The largest distance from position 0 whose factors this dtype can hold."""
        facts = torch.finfo(dtype)
        exponent = _USED * min(math.log(facts.max), -math.log(facts.tiny))
        return int(exponent * self.scale_base / -math.log(_GAMMA / (1 + _GAMMA)))

    def _placed(self, x: Tensor, positions: Tensor, sign: int) -> Tensor:
        width = x.shape[-1]
        angles = phases(positions, width, self.base)[:, None]
        pairs = torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / width
        factors = ((pairs + _GAMMA) / (1 + _GAMMA)) ** (sign * positions[:, None, :, None] / self.scale_base)
        wide = torch.promote_types(torch.float32, x.dtype)
        return turned(x, (factors * angles.cos()).to(wide), (factors * angles.sin()).to(wide), self.pairing)

    def _bounded(self, positions: Tensor, dtype: torch.dtype) -> None:
        if positions.numel() == 0 or torch.compiler.is_compiling() or positions.is_meta:
            return
        least, most, reach = int(positions.min()), int(positions.max()), self.reach(dtype)
        if max(-least, most) > reach:
            raise SpecError(
                f"xpos: position {most if most >= -least else least} scales by more than {str(dtype).removeprefix('torch.')} "
                f"holds; with scale_base={self.scale_base} positions go to {reach}; build with a larger scale_base, or use rope"
            )
