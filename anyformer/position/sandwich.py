"""Sandwich: the product of two positions' sinusoids, divided by a number of each head, as a bias.

Paper: Chi, Fan, Rudnicky and Ramadge 2022, 2212.10356.
Equation: s_ij = q_i . k_j / sqrt(d) + (H / (8 h)) sum_l (cos((i - j) w_l) - 1), h = 1..H, with w_l = base ** (-2 l / width)
    for l < width / 2.
Cost: width / 2 cosines an offset, and one look-up a pair; as columns, n h width. No weights.
Deviation: the -1, which the paper does not have. It is one number a head, which no normalised attention sees; without it half
    precision would round logits near width / 2 to a quarter.
"""

from typing import Annotated

import annotated_types as at
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from anyformer.forms import Form
from anyformer.ops.phases import phases
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.typing import PositiveFloat


class Sandwich(Position):
    """Adds a fixed bias that falls with distance like a logarithm, steeper in the first heads. No weights.

    Args:
        width: number of channels of the sinusoids, an even number.
        base: ratio of the longest to the shortest wavelength.
    """

    name = "sandwich"
    summary = "the product of two positions' sinusoids, scaled for each head, on the logits"
    paper = "Chi et al. 2022, 2212.10356"
    family = ("since the survey", "sandwich")
    scope = "model"

    def __init__(
        self,
        site: Site,
        *,
        width: Annotated[int, at.Ge(2), at.MultipleOf(2)] = 128,
        base: PositiveFloat = 10000.0,
    ) -> None:
        super().__init__(site)
        self.forms = ((Form.TOEPLITZ, Form.BIAS, Form.AUGMENT),)
        self.width = width
        self.base = base

    def bias(
        self, head: Int[Tensor, "..."], q_pos: Int[Tensor, "..."], k_pos: Int[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        """The term of `k_pos - q_pos`, in float64."""
        offset = k_pos - q_pos
        return self._factors(offset.device)[head] * self._by_offset(offset)

    def offsets(self, low: int, high: int) -> Float[Tensor, "h r"]:
        """The term of offsets low..high, in float64 on the CPU."""
        return self._factors()[:, None] * self._summed(torch.arange(low, high + 1))

    def augment(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b k m d"],
        q_pos: Int[Tensor, "#b n"],
        k_pos: Int[Tensor, "#b m"],
    ) -> tuple[Float[Tensor, "b h n e"], Float[Tensor, "b k m e"]]:
        """`[q | f R(i) | -f width / 2]` and `[k | R(j) | 1]` for R(p) = [sin p w | cos p w] and f = H / (8 h scale)."""
        factors = self._factors(q.device)[:, None, None] / self.scale(self.site.head_dim)
        columns = factors * self._code(q_pos, -self.width / 2)[:, None], self._code(k_pos, 1.0)[:, None]
        wide_q, wide_k = (
            torch.cat([x, each.to(x.dtype).expand(*x.shape[:3], -1)], dim=-1)
            for x, each in zip((q, k), columns, strict=True)
        )
        return wide_q, wide_k

    def _factors(self, device: torch.device | None = None) -> Float64[Tensor, "h"]:
        heads = self.site.heads
        return heads / (8.0 * torch.arange(1, heads + 1, dtype=torch.float64, device=device))

    def _code(self, positions: Int[Tensor, "*p"], last: float) -> Float64[Tensor, "*p w"]:
        angles = phases(positions, self.width, self.base)
        return torch.cat([angles.sin(), angles.cos(), torch.full_like(angles[..., :1], last)], dim=-1)

    def _summed(self, offset: Int[Tensor, "..."]) -> Float64[Tensor, "..."]:
        """sum_l (cos(offset w_l) - 1), one frequency after the other, so that no pair needs more than one number."""
        waves = phases(torch.ones((), dtype=torch.int64, device=offset.device), self.width, self.base)
        total = torch.zeros(offset.shape, dtype=torch.float64, device=offset.device)
        for wave in waves.unbind():
            total = total + ((offset * wave).cos() - 1)
        return total

    def _by_offset(self, offset: Int[Tensor, "..."]) -> Float64[Tensor, "..."]:
        """`_summed`, once for each offset where there are fewer offsets than pairs."""
        if offset.numel() == 0 or torch.compiler.is_compiling() or offset.is_meta:  # sizes must not come from values
            return self._summed(offset)
        low, high = int(offset.min()), int(offset.max())
        if high - low >= offset.numel():
            return self._summed(offset)
        return self._summed(torch.arange(low, high + 1, device=offset.device))[offset - low]
