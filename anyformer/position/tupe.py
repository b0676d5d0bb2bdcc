"""TUPE: positions have projections of their own; their scores are added to those of the words and never mixed with them.

Paper: Ke, He and Liu 2020, 2006.15595.
Equation: s_ij = (q_i . k_j + P_ij) / sqrt(2 d) + b[bucket(j - i), h], with P_ij = (U_q p_i) . (U_k p_j) for the normalised
    rows p of a table; the last term is TUPE-R's. The class token at position 0 is untied: P_0j = t1 for all j and P_i0 = t2
    for i > 0, with t1 and t2 the products of two further rows.
Cost: n h d (c + n) for the positions' own scores; (max_length + 1) c + 2 c h d weights for all layers together.
Deviations: U_k has one projection a key head, which the query heads that share it share too. In TUPE-R the pairs of the
    class token have two rows of b of their own; the released code reuses a bucket that both directions leave free.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.ops.buckets import log_bucket, log_bucket_starts
from anyformer.position._tables import stretched, with_new_rows
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.spec import Spec
from anyformer.typing import Size

_STD = 0.02  # of the initial weights


class Tupe(Position):
    """Scores a pair by words and, separately, by the two positions; the class token is scored apart from its position.

    Args:
        relative: whether T5's bias by offset is added (TUPE-R); without it the encoding is absolute (TUPE-A).
        cls: whether position 0 holds a class token, whose scores do not depend on where the other token is. Turn it off for
            models without one, such as decoders.
        buckets: number of buckets of the bias, both directions together.
        max_distance: distance in tokens from which all keys of a direction share the last bucket.

    Raises:
        SpecError: too few buckets, an odd number of them for two directions, or a max_distance among the exact buckets.
    """

    name = "tupe"
    summary = "positions meet through projections of their own, beside the words"
    paper = "Ke et al. 2020, 2006.15595"
    family = ("relative", "tupe")
    scope = "model"

    def __init__(
        self, site: Site, *, relative: bool = False, cls: bool = True, buckets: Size = 32, max_distance: Size = 128
    ) -> None:
        super().__init__(site)
        least, side = (2, buckets) if site.causal else (4, buckets // 2)
        if buckets < least or (buckets % 2 and not site.causal) or max_distance <= side // 2:
            raise SpecError(
                f"tupe: expected at least {least} buckets{'' if site.causal else ', an even number of them,'} and a max_distance "
                f"above the {side // 2} distances with a bucket each, got buckets={buckets} and max_distance={max_distance}"
            )
        # next to the class token the bias is no function of the offset
        self.forms = ((Form.AUGMENT, Form.SCORE, Form.APART),) + (
            (Form.BIAS,) if cls else (Form.TOEPLITZ, Form.BIAS),
        ) * relative
        self.relative = False
        self.limit = site.max_length
        self.extensions = ("random_rows", "stretch")
        self.cls = cls
        self.starts = log_bucket_starts(side, max_distance)
        self.table = nn.Parameter(torch.empty(site.max_length + cls, site.dim))
        self.norm = nn.LayerNorm(site.dim)
        self.query = nn.Linear(site.dim, site.heads * site.head_dim)
        self.key = nn.Linear(site.dim, site.kv_heads * site.head_dim)
        self.by_bucket = nn.Parameter(torch.empty(buckets + 2 * cls, site.heads)) if relative else None
        for weight in (self.table, self.query.weight, self.key.weight, self.by_bucket):
            if weight is not None:
                nn.init.normal_(weight, std=_STD)
        for layer in (self.query, self.key):
            nn.init.zeros_(layer.bias)

    def carry(self, way: Spec, to: int) -> dict[str, Tensor]:
        """More rows of the table, those of the class token as they are."""
        table, first = self.table.detach(), 2 * self.cls
        if way.name == "random_rows":
            longer = with_new_rows(table, to - self.site.max_length, _STD, self.site.seed)
        else:
            longer = torch.cat([table[:first], stretched(table[first:], to + self.cls - first)])
        return {**self.state_dict(), "table": longer}

    def scale(self, head_dim: int) -> float:
        """`(2 head_dim) ** -0.5`, on words and positions alike."""
        return (2 * head_dim) ** -0.5

    def score(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        q_pos: Int[Tensor, "#b n"],
        k_pos: Int[Tensor, "#b m"],
    ) -> Float[Tensor, "b h n m"]:
        """`scale(d) * P_ij`."""
        keys = self._placed(self.key, k_pos).repeat_interleave(self.site.groups, dim=1)
        met = self._placed(self.query, q_pos) @ keys.mT
        if self.cls:
            of_class, to_class = self._untied()
            met = torch.where((k_pos == 0)[:, None, None], to_class[:, None, None], met)
            met = torch.where((q_pos == 0)[:, None, :, None], of_class[:, None, None], met)
        wide = torch.promote_types(torch.float32, q.dtype)
        return (met.to(wide) * self.scale(self.site.head_dim)).expand(*q.shape[:3], k.shape[2])

    def augment(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b k m d"],
        q_pos: Int[Tensor, "#b n"],
        k_pos: Int[Tensor, "#b m"],
    ) -> tuple[Float[Tensor, "b h n e"], Float[Tensor, "b k m e"]]:
        """`[q | U_q p]` and `[k | U_k p]`; with a class token two columns more, `[t1, 0]` or `[0, t2]` and `[1, j = 0]`."""
        q_columns, k_columns = self._placed(self.query, q_pos), self._placed(self.key, k_pos)
        if self.cls:
            q_first, k_first = (q_pos == 0)[:, None, :, None], (k_pos == 0)[:, None, :, None]
            untied = torch.stack(self._untied(), dim=-1)[:, None]  # [h 1 2]
            q_columns = torch.cat(
                [q_columns.masked_fill(q_first, 0.0), untied * torch.cat([q_first, ~q_first], dim=-1)], dim=-1
            )
            both = torch.cat([torch.ones_like(k_first), k_first], dim=-1).to(k_columns.dtype)
            k_columns = torch.cat(
                [k_columns.masked_fill(k_first, 0.0), both.expand(-1, k_columns.shape[1], -1, -1)], dim=-1
            )
        return _widened(q, q_columns), _widened(k, k_columns)

    def bias(
        self, head: Int[Tensor, "..."], q_pos: Int[Tensor, "..."], k_pos: Int[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        """TUPE-R's term: `b[bucket(k_pos - q_pos), head]`, rows of their own for the class token's pairs."""
        assert self.by_bucket is not None, "built without a term by offset"
        rows = log_bucket(k_pos - q_pos, self.starts, causal=self.site.causal)
        if self.cls:
            rows = torch.where(k_pos == 0, len(self.by_bucket) - 2, rows)
            rows = torch.where(q_pos == 0, len(self.by_bucket) - 1, rows)
        return self.by_bucket[rows, head]

    def offsets(self, low: int, high: int) -> Float[Tensor, "h r"]:
        """TUPE-R's term for offsets low..high, of a model without a class token."""
        assert self.by_bucket is not None, "built without a term by offset"
        offsets = torch.arange(low, high + 1, device=self.by_bucket.device)
        return self.by_bucket[log_bucket(offsets, self.starts, causal=self.site.causal)].T

    def _untied(self) -> tuple[Float[Tensor, "h"], Float[Tensor, "h"]]:
        """t1, of the class token with any other, and t2, of any other with the class token."""
        queries = self._projected(self.query, self.table[:2])  # [h 2 d]
        keys = self._projected(self.key, self.table[:2]).repeat_interleave(self.site.groups, dim=0)
        of_class, to_class = (queries * keys).sum(-1).unbind(-1)
        return of_class, to_class

    def _placed(self, layer: nn.Linear, positions: Int[Tensor, "#b n"]) -> Float[Tensor, "#b h n d"]:
        self.admit(positions)
        return self._projected(layer, self.table[positions + self.cls]).transpose(0, 1)

    def _projected(self, layer: nn.Linear, rows: Tensor) -> Tensor:
        """Rows of the table, normalised and projected, `[h *rows d]`."""
        wide = torch.promote_types(torch.float32, self.table.dtype)
        weight, bias = self.norm.weight.to(wide), self.norm.bias.to(wide)
        normed = F.layer_norm(rows.to(wide), (self.site.dim,), weight, bias, self.norm.eps)
        projected = F.linear(normed, layer.weight.to(wide), layer.bias.to(wide))
        return projected.unflatten(-1, (-1, self.site.head_dim)).movedim(-2, 0)


def _widened(x: Tensor, columns: Tensor) -> Tensor:
    return torch.cat([x, columns.to(x.dtype).expand(len(x), *columns.shape[1:])], dim=-1)
