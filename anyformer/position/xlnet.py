"""XLNet's relative positions: Transformer-XL's in both directions, with distances that may be bounded.

Paper: Yang et al. 2019, 1906.08237.
Equation: s_ij = ((q_i + u) . k_j + (q_i + v) . W R(t)) / sqrt(d), with t = i - j, or clip(i - j, -clamp, clamp), and R(t) =
    [sin t w | cos t w] of the model's width c, w_l = 10000 ** (-2 l / c).
Cost: by offset, s h d (c + n) for the s offsets from the least to the greatest, and one look-up a pair; as columns, n h c
    (d + m). The cheaper is taken, with a clamp the first.
Deviation: without the term on segments, which are no positions; without the reversed half of a batch (`bi_data`), which
    is a matter of the positions given.
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
from anyformer.typing import Size

_BASE = 10000.0


class XLNet(Position):
    """Scores a pair by content and by offset, each with a part that depends on the query and a part that does not.

    Args:
        clamp: distance in tokens, in both directions, beyond which all keys are alike; None: none are. With a clamp the term is
            no product of one vector a token, so that it cannot become columns of queries and keys.

    Raises:
        SpecError: the model's width is odd.
    """

    name = "xlnet"
    summary = "queries of both directions meet a projection of the offset's sinusoids, with two learned biases"
    paper = "Yang et al. 2019, 1906.08237"
    family = ("relative", "xlnet")

    def __init__(self, site: Site, *, clamp: Size | None = None) -> None:
        super().__init__(site)
        if site.dim % 2:
            raise SpecError(f"xlnet: sinusoids fill the model's width in pairs, expected an even dim, got {site.dim}")
        self.forms = ((Form.TABLE, Form.SCORE, Form.CLIPPED) if clamp else (Form.AUGMENT, Form.TABLE, Form.SCORE),)
        self.clamp = clamp
        self.clip = None if clamp is None else (clamp, clamp)
        self.long_columns = True
        self.u = nn.Parameter(torch.empty(site.heads, site.head_dim))
        self.v = nn.Parameter(torch.empty(site.heads, site.head_dim))
        self.w = nn.Linear(site.dim, site.heads * site.head_dim, bias=False)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def score(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        q_pos: Int[Tensor, "#b n"],
        k_pos: Int[Tensor, "#b m"],
    ) -> Float[Tensor, "b h n m"]:
        """`scale(d) * (u . k_j + (q_i + v) . W R(t))`."""
        wide = torch.promote_types(torch.float32, q.dtype)
        content = k.to(wide) @ self.u.to(wide)[:, :, None]  # [b h m 1]
        asked = q.to(wide) + self.v.to(wide)[:, None]
        placed = offset_products(asked, self._weight(), q_pos, k_pos, _BASE, self.clamp)
        return (content.mT + placed) * self.scale(self.site.head_dim)

    def augment(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b k m d"],
        q_pos: Int[Tensor, "#b n"],
        k_pos: Int[Tensor, "#b m"],
    ) -> tuple[Float[Tensor, "b h n e"], Float[Tensor, "b k m e"]]:
        """`[q + u | psi]` and `[k | R]`, of width d + c; holds without a clamp."""
        wide = torch.promote_types(torch.float32, q.dtype)
        columns = offset_columns(q.to(wide) + self.v.to(wide)[:, None], self._weight(), q_pos, _BASE)
        wide_q = torch.cat([q.to(wide) + self.u.to(wide)[:, None], columns], dim=-1)
        placed = waves(k_pos, self.site.dim, _BASE, k.dtype)[:, None].expand(*k.shape[:3], -1)
        return wide_q.to(q.dtype), torch.cat([k, placed], dim=-1)

    def tables(self, low: int, high: int) -> Offsets:
        """TABLE: queries shifted by u, keys of the offset, and what v - u adds to the logits."""
        offsets = torch.arange(low, high + 1, device=self.u.device)
        if self.clamp is not None:
            offsets = offsets.clamp(-self.clamp, self.clamp)
        keys = offset_keys(self._weight(), offsets, _BASE)
        bias = torch.einsum("hrd,hd->hr", keys, (self.v - self.u).to(keys.dtype))
        return Offsets(bias=self.scale(self.site.head_dim) * bias, keys=keys, shift=self.u)

    def _weight(self) -> Float[Tensor, "h d c"]:
        return self.w.weight.unflatten(0, (self.site.heads, -1))
