"""NEZHA's relative positions: a fixed sinusoid of the clipped offset, added to the keys and to the values.

Paper: Wei et al. 2019, 1909.00204.
Equation: s_ij = q_i . (k_j + T[r]) / sqrt(d),   o_i = sum_j w_ij (v_j + T[r]),   r = clip(j - i, -span, span),
    T[r] = [sin t w_0, cos t w_0, sin t w_1, ...] of the head's width d, w_l = base ** (-2 l / d).
    The released code takes t = r + span, the row of its table; the paper t = r.
Cost: n h (2 span + 1) d, and one look-up a pair; no weights, no [n m d] tensor.
"""

from typing import Literal

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from anyformer.context import Offsets
from anyformer.forms import Form
from anyformer.ops.lookup import row_products, row_sums
from anyformer.ops.phases import phases
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.typing import Count, PositiveFloat


class Nezha(Position):
    """Adds the same sinusoid of the clipped offset to each key and each value, alike in every head and layer.

    Args:
        span: offset in tokens, in both directions, beyond which all keys are alike.
        phase: "code": the waves start at offset -span, as in the released code and weights; "paper": at offset 0.
        base: ratio of the longest to the shortest wavelength.
    """

    name = "nezha"
    summary = "a fixed sinusoid of the clipped offset, added to keys and values"
    paper = "Wei et al. 2019, 1909.00204"
    family = ("relative", "classic")
    scope = "model"

    def __init__(
        self,
        site: Site,
        *,
        span: Count = 64,
        phase: Literal["code", "paper"] = "code",
        base: PositiveFloat = 10000.0,
    ) -> None:
        super().__init__(site)
        self.forms = ((Form.TABLE, Form.SCORE, Form.CLIPPED), (Form.VALUE, Form.CLIPPED))
        self.span = span
        self.clip = (span, span)
        self.phase = phase
        self.base = base

    def table(self, device: torch.device | None = None) -> Float64[Tensor, "r d"]:
        """T, row by row from offset -span to offset span."""
        start = 0 if self.phase == "code" else -self.span
        angles = phases(torch.arange(start, start + 2 * self.span + 1, device=device), self.site.head_dim, self.base)
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[:, : self.site.head_dim]

    def tables(self, low: int, high: int) -> Offsets:
        """TABLE: the vectors added to keys and values by offset, in float64 on the CPU."""
        by_offset = self.table()[self._bucket(torch.arange(low, high + 1))].expand(self.site.heads, -1, -1)
        return Offsets(keys=by_offset, values=by_offset)

    def score(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        q_pos: Int[Tensor, "#b n"],
        k_pos: Int[Tensor, "#b m"],
    ) -> Float[Tensor, "b h n m"]:
        """`scale(d) * q_i . T[clip(j - i)]`."""
        return self.scale(self.site.head_dim) * row_products(q, self.table(q.device), self._rows(q_pos, k_pos))

    def value(
        self, weights: Float[Tensor, "b h n m"], q_pos: Int[Tensor, "#b n"], k_pos: Int[Tensor, "#b m"]
    ) -> Float[Tensor, "b h n v"]:
        """`sum_j w_ij T[clip(j - i)]`."""
        return row_sums(weights, self.table(weights.device), self._rows(q_pos, k_pos))

    def _bucket(self, offset: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Row of the table for an offset of key minus query."""
        return offset.clamp(-self.span, self.span) + self.span

    def _rows(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Row of the table for every pair, `[b|1 1 n m]`."""
        return self._bucket(k_pos[:, None, None, :] - q_pos[:, None, :, None])
