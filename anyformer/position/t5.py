"""T5's relative bias: one learned number a head for each bucket of offsets, buckets widening with distance.

Paper: Raffel et al. 2019, 1910.10683.
Equation: s_ij = q_i . k_j + b[bucket(j - i), h], without the factor d ** -0.5. With H buckets a direction, e = H // 2
    and a = |j - i|:
    bucket = a                                                                      where a < e
           = min(H - 1, e + floor((H - e) ln(a / e) / ln(max_distance / e)))        else
    Bidirectional: H is half the buckets, and keys after the query use the upper half. Causal: H is all of them, and a
    key after the query counts as distance 0.
Cost: one look-up a pair; buckets * h weights.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.ops.buckets import log_bucket, log_bucket_starts
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.typing import Size


class T5(Position):
    """Adds a learned number for each head and bucket of offsets: near offsets have a bucket each, far ones share.

    One table serves every layer, as in T5. T5 leaves cross-attention without it; here it acts wherever it is given.

    Args:
        buckets: number of buckets, both directions together; even where the site is bidirectional.
        max_distance: distance in tokens from which all keys of a direction share the last bucket.
        scaled: whether q . k keeps the factor d ** -0.5. T5 has none and draws smaller query weights instead.

    Raises:
        SpecError: too few buckets, an odd number of them for two directions, or a max_distance among the exact buckets.
    """

    name = "t5"
    summary = "one learned number a head for each bucket of offsets, added to the logits"
    paper = "Raffel et al. 2019, 1910.10683"
    family = ("relative", "t5")
    scope = "model"

    def __init__(self, site: Site, *, buckets: Size = 32, max_distance: Size = 128, scaled: bool = False) -> None:
        super().__init__(site)
        self.forms = ((Form.TOEPLITZ, Form.BIAS),)
        self.scaled = scaled
        least = 2 if site.causal else 4
        if buckets < least or (buckets % 2 and not site.causal):
            kind = "causal" if site.causal else "bidirectional"
            even = "" if site.causal else "an even number of "
            raise SpecError(f"t5: a {kind} site needs {even}at least {least} buckets, got buckets={buckets}")
        side = buckets if site.causal else buckets // 2
        if max_distance <= side // 2:
            raise SpecError(
                f"t5: distances up to {side // 2} have a bucket each; expected a max_distance above that, got {max_distance}"
            )
        self.starts = log_bucket_starts(side, max_distance)
        self.table = nn.Parameter(torch.empty(buckets, site.heads))
        nn.init.normal_(self.table, std=site.dim**-0.5)

    def scale(self, head_dim: int) -> float:
        """1, or head_dim ** -0.5 where `scaled`."""
        return head_dim**-0.5 if self.scaled else 1.0

    def bucket(self, offset: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Row of the table for an offset of key minus query."""
        return log_bucket(offset, self.starts, causal=self.site.causal)

    def bias(
        self, head: Int[Tensor, "..."], q_pos: Int[Tensor, "..."], k_pos: Int[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        """`table[bucket(k_pos - q_pos), head]`."""
        return self.table[self.bucket(k_pos - q_pos), head]

    def offsets(self, low: int, high: int) -> Float[Tensor, "h r"]:
        """`table[bucket(offset), h]` for offsets low..high."""
        return self.table[self.bucket(torch.arange(low, high + 1, device=self.table.device))].T
