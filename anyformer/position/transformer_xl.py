"""Transformer-XL's relative positions: keys carry the sinusoids of the offset, queries two learned biases.

Paper: Dai et al. 2019, 1901.02860.
Equation: s_ij = ((q_i + u) . k_j + (q_i + v) . W R(i - j)) / sqrt(d), with R(t) = [sin t w | cos t w] of the model's
    width c and w_l = base ** (-2 l / c).
Cost: by offset, s h d (c + n) for the s offsets from the least to the greatest, and one look-up a pair; as columns, n h c
    (d + m). The cheaper is taken: the first for a sequence, the second for one new token or for scattered positions.
Beyond the paper: offsets of both signs, so that it serves bidirectional attention; u and v of each layer's own, which
    the released code shares among layers by default. Left to the caller: the memory of earlier segments, as a source.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.context import Offsets
from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.ops.offset_waves import offset_columns, offset_keys, offset_products, waves
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
        self.long_columns = True
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
        placed = offset_products(asked, self._weight(), q_pos, k_pos, self.base)
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
        columns = offset_columns(q.to(wide) + self.v.to(wide)[:, None], self._weight(), q_pos, self.base)
        wide_q = torch.cat([q.to(wide) + self.u.to(wide)[:, None], columns], dim=-1)
        placed = waves(k_pos, self.site.dim, self.base, k.dtype)[:, None].expand(*k.shape[:3], -1)
        return wide_q.to(q.dtype), torch.cat([k, placed], dim=-1)

    def tables(self, low: int, high: int) -> Offsets:
        """TABLE: queries shifted by u, keys of the offset, and what v - u adds to the logits."""
        keys = offset_keys(self._weight(), torch.arange(low, high + 1, device=self.u.device), self.base)
        bias = torch.einsum("hrd,hd->hr", keys, (self.v - self.u).to(keys.dtype))
        return Offsets(bias=self.scale(self.site.head_dim) * bias, keys=keys, shift=self.u)

    def _weight(self) -> Float[Tensor, "h d c"]:
        return self.w.weight.unflatten(0, (self.site.heads, -1))
