"""Transformer-XL's relative positions: keys carry the sinusoids of the offset, queries two learned biases.

Paper: Dai et al. 2019, 1901.02860.
Equation: s_ij = ((q_i + u) . k_j + (q_i + v) . W R(i - j)) / sqrt(d), with R(t) = [sin t w | cos t w] of the model's
    width c and w_l = base ** (-2 l / c).
Cost: by offset, s h d (c + n) for the s offsets from the least to the greatest, and one look-up a pair; by the identity
    below, n h c (d + m). The cheaper is taken: the first for a sequence, the second for one new token or for scattered
    positions.
Identity: with g = W^T (q_i + v) = [g_s | g_c], (q_i + v) . W R(i - j) = psi_i . R(j), where
    psi_i = [g_c sin iw - g_s cos iw | g_s sin iw + g_c cos iw].
Beyond the paper: offsets of both signs, so that it serves bidirectional attention; u and v of each layer's own, which
    the released code shares among layers by default. Left to the caller: the memory of earlier segments, as a source.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.context import Offsets
from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.ops.phases import phases
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.typing import PositiveFloat


class TransformerXL(Position):
    """Scores a pair by content and by offset, each with a part that depends on the query and a part that does not.

    Args:
        base: ratio of the longest to the shortest wavelength.

    Raises:
        SpecError: the model's width is odd.
    """

    name = "transformer_xl"
    summary = "queries meet a projection of the offset's sinusoids, with two learned biases"
    paper = "Dai et al. 2019, 1901.02860"
    family = ("relative", "xlnet")

    def __init__(self, site: Site, *, base: PositiveFloat = 10000.0) -> None:
        super().__init__(site)
        if site.dim % 2:
            raise SpecError(
                f"transformer_xl: sinusoids fill the model's width in pairs, expected an even dim, got {site.dim}"
            )
        self.forms = ((Form.AUGMENT, Form.TABLE, Form.SCORE),)
        self.base = base
        self.u = nn.Parameter(torch.empty(site.heads, site.head_dim))
        self.v = nn.Parameter(torch.empty(site.heads, site.head_dim))
        self.w = nn.Linear(site.dim, site.heads * site.head_dim, bias=False)
        for weight, std in ((self.u, 0.02), (self.v, 0.02), (self.w.weight, site.dim**-0.5)):
            nn.init.normal_(weight, std=std)

    def score(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        q_pos: Int[Tensor, "#b n"],
        k_pos: Int[Tensor, "#b m"],
    ) -> Float[Tensor, "b h n m"]:
        """`scale(d) * (u . k_j + (q_i + v) . W R(i - j))`."""
        wide = torch.promote_types(torch.float32, q.dtype)
        content = k.to(wide) @ self.u.to(wide)[:, :, None]  # [b h m 1]
        asked = q.to(wide) + self.v.to(wide)[:, None]
        span = self._cheap_span(q, k, q_pos, k_pos)
        if span is None:
            placed = self._columns(asked, q_pos) @ self._waves(k_pos, wide)[:, None].mT
        else:
            low, high = span
            keys = self.offset_keys(low, high).to(wide)
            index = (k_pos[:, None, None, :] - q_pos[:, None, :, None] - low).long()
            placed = (asked @ keys.mT).gather(-1, index.expand(*q.shape[:3], k.shape[2]))
        return (content.mT + placed) * self.scale(self.site.head_dim)

    def augment(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b k m d"],
        q_pos: Int[Tensor, "#b n"],
        k_pos: Int[Tensor, "#b m"],
    ) -> tuple[Float[Tensor, "b h n e"], Float[Tensor, "b k m e"]]:
        """`[q + u | psi]` and `[k | R]`, of width d + c."""
        wide = torch.promote_types(torch.float32, q.dtype)
        columns = self._columns(q.to(wide) + self.v.to(wide)[:, None], q_pos)
        wide_q = torch.cat([q.to(wide) + self.u.to(wide)[:, None], columns], dim=-1)
        waves = self._waves(k_pos, wide)[:, None].expand(*k.shape[:3], -1)
        return wide_q.to(q.dtype), torch.cat([k, waves.to(k.dtype)], dim=-1)

    def tables(self, low: int, high: int) -> Offsets:
        """TABLE: queries shifted by u, keys of the offset, and what v - u adds to the logits."""
        keys = self.offset_keys(low, high)
        bias = torch.einsum("hrd,hd->hr", keys, (self.v - self.u).to(keys.dtype))
        return Offsets(bias=self.scale(self.site.head_dim) * bias, keys=keys, shift=self.u)

    def offset_keys(self, low: int, high: int) -> Float[Tensor, "h r d"]:
        """`W R(-offset)` of each head for offsets low..high of key minus query."""
        weight = self.w.weight
        wide = torch.promote_types(torch.float32, weight.dtype)
        waves = self._waves(-torch.arange(low, high + 1, device=weight.device), wide)
        return (waves @ weight.to(wide).mT).unflatten(-1, (self.site.heads, -1)).transpose(0, 1)

    def _columns(self, asked: Float[Tensor, "b h n d"], q_pos: Int[Tensor, "#b n"]) -> Float[Tensor, "b h n c"]:
        """psi of the identity."""
        by_wave = asked @ self.w.weight.to(asked.dtype).unflatten(0, (self.site.heads, -1))
        g_sin, g_cos = by_wave.chunk(2, dim=-1)
        sin, cos = self._waves(q_pos, asked.dtype)[:, None].chunk(2, dim=-1)
        return torch.cat([g_cos * sin - g_sin * cos, g_sin * sin + g_cos * cos], dim=-1)

    def _waves(self, positions: Int[Tensor, "*p"], dtype: torch.dtype) -> Float[Tensor, "*p c"]:
        """R(positions)."""
        angles = phases(positions, self.site.dim, self.base)
        return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)

    def _cheap_span(self, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor) -> tuple[int, int] | None:
        """The least and greatest offset of key minus query, where going by offset costs less than the identity."""
        (b, _, n, d), m, c = q.shape, k.shape[2], self.site.dim
        if n * m == 0 or torch.compiler.is_compiling() or q_pos.is_meta:  # sizes must not come from values there
            return None
        low, high = int(k_pos.min() - q_pos.max()), int(k_pos.max() - q_pos.min())
        by_offset = (high - low + 1) * d * (c + b * n)
        return (low, high) if by_offset < b * n * c * (d + m) else None
