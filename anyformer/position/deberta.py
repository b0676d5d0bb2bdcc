"""DeBERTa's disentangled attention: scores of content and of relative position, each meeting the other.

Paper: He et al. 2020, 2006.03654; buckets of distances: He et al. 2021, 2111.09543.
Equation: s_ij = (q_i . k_j + q_i . K[d(i, j)] + k_j . Q[d(i, j)] + K[d(i, j)] . Q[d(i, j)]) / sqrt(d (1 + t)), of which t
    terms beside q . k are taken, by default the first two (c2p, p2c). K = P W_k and Q = P W_q for a table P[2 span, c];
    d(i, j) = clip(i - j + span, 0, 2 span - 1).
    With B buckets a direction, e = B // 2 and a = |i - j|, i - j is first replaced by sign(i - j) b(a), and span by B:
    b(a) = a                                                           where a <= e
         = e + ceil((e - 1) ln(a / e) / ln((span - 1) / e))            else
Cost: 2 n h (2 span) d, and two look-ups a pair; 2 span c + 2 c h d weights.
Deviations: every layer has a table of its own, where DeBERTa shares one among layers. Its released code reads Q at d(i, j),
    the paper at d(j, i); the code's is the default. Left to the caller: the LayerNorm of P (v2, v3), which can be stored
    with P; copying the content's weights into W_k and W_q where a model shares them.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.context import Offsets
from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.ops.lookup import row_products
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.typing import Size

Term = Literal["c2p", "p2c", "p2p"]


class Deberta(Position):
    """Scores a pair by content and content, content and position, position and content.

    Args:
        span: distance in tokens, in both directions, beyond which all keys are alike (later keys: from it on).
        buckets: rows of the table a direction, the near half of distances with a row each and the rest sharing ever
            more; None: a row for each distance. DeBERTa v1 has span 512 and none, v2 and v3 span 512 and 256.
        terms: which terms there are beside content with content: "c2p", queries meet a key of the distance; "p2c", keys meet
            a query of the distance; "p2p", these two meet.
        index: which distance the query of p2c and p2p belongs to: "code", query minus key as in the released models;
            "paper", key minus query.

    Raises:
        SpecError: no term, a term twice, or a number of buckets that does not fit the span.
    """

    name = "deberta"
    summary = "queries meet a key of the distance, and keys a query of the distance"
    paper = "He et al. 2020, 2006.03654"
    family = ("relative", "deberta")

    def __init__(
        self,
        site: Site,
        *,
        span: Size = 512,
        buckets: Size | None = None,
        terms: tuple[Term, ...] = ("c2p", "p2c"),
        index: Literal["code", "paper"] = "code",
    ) -> None:
        super().__init__(site)
        if not terms or len(set(terms)) < len(terms):
            raise SpecError(
                f"deberta: expected terms to hold each of 'c2p', 'p2c' and 'p2p' at most once and one at least, got "
                f'{list(terms)}; for no position use "none"'
            )
        if buckets is not None and (buckets < 4 or span - 1 <= buckets // 2):
            raise SpecError(
                f"deberta: expected at least 4 buckets, and a span of at least {buckets // 2 + 2} for {buckets} of them, got "
                f"span={span}; leave buckets out for a row for each distance"
            )
        self.forms = ((Form.TABLE, Form.SCORE, Form.CLIPPED),)
        self.terms = terms
        self.index = index
        self.reach = span if buckets is None else buckets
        self.starts = None if buckets is None else bucket_starts(buckets, span)
        far = self.reach if self.starts is None else self.starts[-1]
        self.clip = (far, far)
        self.table = nn.Parameter(torch.empty(2 * self.reach, site.dim))
        width = site.heads * site.head_dim
        self.key = nn.Linear(site.dim, width) if {"c2p", "p2p"} & set(terms) else None
        self.query = nn.Linear(site.dim, width) if {"p2c", "p2p"} & set(terms) else None
        for name, parameter in self.named_parameters():
            nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.normal_(parameter, std=0.02)

    def scale(self, head_dim: int) -> float:
        """`(head_dim * (1 + number of terms)) ** -0.5`, on all terms."""
        return (head_dim * (1 + len(self.terms))) ** -0.5

    def distance(self, offset: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Signed number, -reach..reach, of the bucket of query minus key, for an offset of key minus query."""
        ahead = -offset
        if self.starts is not None:
            starts = torch.tensor(self.starts, device=offset.device)
            ahead = ahead.sign() * torch.bucketize(ahead.abs(), starts, right=True)
        return ahead.clamp(-self.reach, self.reach)

    def tables(self, low: int, high: int) -> Offsets:
        """TABLE: keys that queries meet, queries that keys meet, and their products."""
        distances = self.distance(torch.arange(low, high + 1, device=self.table.device))
        keys, queries, both = self._terms(distances)
        return Offsets(bias=both, keys=keys, queries=queries)

    def score(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        q_pos: Int[Tensor, "#b n"],
        k_pos: Int[Tensor, "#b m"],
    ) -> Float[Tensor, "b h n m"]:
        """The terms' sum, its scale included."""
        rows = self.distance(k_pos[:, None, None, :] - q_pos[:, None, :, None]) + self.reach  # [b|1 1 n m]
        keys, queries, both = self._terms(torch.arange(-self.reach, self.reach + 1, device=self.table.device))
        scale, terms = self.scale(self.site.head_dim), []
        if keys is not None:
            terms.append(scale * row_products(q, keys, rows))
        if queries is not None:
            terms.append(scale * row_products(k, queries, rows.mT).mT)
        if both is not None:
            heads = torch.arange(self.site.heads, device=q.device)[:, None, None]
            terms.append(both[heads, rows].expand(*q.shape[:3], k.shape[2]))
        return sum(terms[1:], terms[0])

    def _terms(self, distances: Int[Tensor, "r"]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The keys of c2p and the queries of p2c, `[h r d]`, and the scaled logits of p2p, `[h r]`."""
        keys = self._projected(self.key, distances)
        queries = self._projected(self.query, distances if self.index == "code" else -distances)
        both = None
        if "p2p" in self.terms and keys is not None and queries is not None:
            both = self.scale(self.site.head_dim) * (keys * queries).sum(-1)
        return keys if "c2p" in self.terms else None, queries if "p2c" in self.terms else None, both

    def _projected(self, layer: nn.Linear | None, distances: Int[Tensor, "r"]) -> Float[Tensor, "h r d"] | None:
        if layer is None:
            return None
        wide = torch.promote_types(torch.float32, self.table.dtype)
        rows = self.table[(distances + self.reach).clamp(0, 2 * self.reach - 1)]
        projected = F.linear(rows.to(wide), layer.weight.to(wide), layer.bias.to(wide))
        return projected.unflatten(-1, (self.site.heads, -1)).transpose(0, 1)


def bucket_starts(buckets: int, span: int) -> list[int]:
    """The least distance of each bucket but the first, in one direction.

    Beyond e = buckets // 2, bucket e + t starts at the least a with a ** (e - 1) * e ** (t - 1) > (span - 1) ** (t - 1) *
    e ** (e - 1): whole numbers, because logarithms in floating point put some distances into the wrong bucket.
    """
    exact, last = buckets // 2, span - 1
    starts = list(range(1, exact + 1))
    for step in range(buckets - exact):
        start = max(exact + 1, int(exact * (last / exact) ** (step / (exact - 1))) - 1)
        while start ** (exact - 1) * exact**step <= last**step * exact ** (exact - 1):
            start += 1
        starts.append(start)
    return starts
