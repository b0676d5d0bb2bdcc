"""Reformer: queries are their own keys, hashed into buckets; each token reads earlier and later ones of its bucket.

Paper: Kitaev, Kaiser and Levskaya 2020, 2001.04451.
Equation, with q one projection for queries and keys, and rounds r of hashing:

    k_j = sqrt(d) q_j / |q_j|,   bucket_r(j) = argmax [q_j A_r, -q_j A_r],   A_r normal, drawn once for each head and round
    out_i = sum_j softmax_j(s q_i . k_j + b_ij) v_j   over the j met in any round, j != i; i itself where there is no other

    i meets j in round r where both are in one bucket, and j in the same or the preceding chunk of it: the tokens of a bucket, in
    order, are cut every `bucket` tokens. When causal, j < i.
Deviations: the row sorted by buckets is not cut, but each bucket by itself: what comes later, or pads, then moves no chunk. Hashes
    stay as drawn in training. There are 2 max_length / bucket buckets whatever the length, two hashes together where that is many.
    The factor s is that of the encoding, so that s q . k = q . q_j / |q_j| by default, as in the released code.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.attention._chunks import attend_buckets, placed
from anyformer.attention._groups import FORMS
from anyformer.attention.base import Attention
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.ops import softmax as ops
from anyformer.ops.bucket_keys import as_keys
from anyformer.ops.draws import generator, normal
from anyformer.site import Site
from anyformer.typing import Size

_ONE_HASH = 64  # buckets up to which one hash finds them


class Reformer(Attention):
    """Each token reads the tokens that hash to its bucket, itself only where there is no other.

    Dropout acts on the output: where a weight stands depends on the buckets, and with them would what is dropped.

    Args:
        bucket: tokens of a bucket that are cut off together; a token reads the chunk it is in and the one before.
        rounds: hashes, each with buckets of its own; a pair met in several counts once.
    """

    name = "reformer"
    summary = "queries are their own keys; each reads the tokens hashed to its bucket"
    paper = "Kitaev et al. 2020, 2001.04451"
    family = ("clustering", "hashing")
    forms = FORMS
    refusal = (
        "it reads chosen pairs one by one, and this form needs every key between two tokens or another product; "
        "use an encoding that embeds, rotates, biases or scores, such as rope or alibi"
    )
    cross = False
    decodes = "cache"
    rotates = "self"
    ordered = True
    shares = True
    weights = False

    def __init__(self, site: Site, *, bucket: Size = 64, rounds: Size = 4) -> None:
        super().__init__(site)
        self.bucket = bucket
        self.rounds = rounds
        self.sizes = sizes(2 * -(-site.max_length // bucket))
        """Buckets of each of the hashes that name a bucket together."""
        self.rows: Tensor
        self.register_buffer("rows", torch.empty(site.heads, rounds, sum(self.sizes) // 2, site.head_dim))
        if not self.rows.is_meta:
            for head in range(site.heads):
                for at in range(rounds):
                    drawn = generator(site.seed, "reformer", site.layer, head, at)
                    self.rows[head, at] = normal(sum(self.sizes) // 2, site.head_dim, drawn)

    def cost(self) -> Cost:
        """Each round compares tiles of a bucket's size with four of them, the causal one with three; and the hashes."""
        return Cost(
            self.site,
            f"{6 if self.site.causal else 8} h rounds n bucket d + h rounds n rows d",
            memory=f"{3 if self.site.causal else 4} h rounds n bucket",
            sizes={"rounds": self.rounds, "bucket": self.bucket, "rows": self.rows.shape[2]},
        )

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h m d"], v: Float[Tensor, "b k m v"], context: Context
    ) -> Float[Tensor, "b h n v"]:
        """Outputs of the queries; see the module's equation. `k` holds the queries of all tokens, `q` the newest."""
        keys, encoding = context.keys, context.encoding
        if keys.keep is not None:
            k, v = (torch.where(keys.keep[:, None, :, None], part, torch.zeros_like(part)) for part in (k, v))
        buckets = hashed(k[:, :, k.shape[2] - q.shape[2] :].detach(), self.rows, self.sizes)
        if context.cache is not None:
            buckets = context.cache.extend("buckets", buckets.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        if keys.documents is not None:
            buckets = buckets + keys.documents[:, None, None] * math.prod(self.sizes)
        q, k = placed(encoding, q, as_keys(k), self.site.kv_heads)
        v = ops.repeat_heads(v if encoding.turn is None else encoding.turn(v), q.shape[1])
        scale = self.site.head_dim**-0.5 if encoding.scale is None else encoding.scale
        out = attend_buckets(q, k, v, buckets, context, scale, self.bucket)
        return out if encoding.turn_back is None else encoding.turn_back(out)


def sizes(buckets: int) -> tuple[int, ...]:
    """Even sizes of one hash, or of two whose product is at least `buckets`."""
    if buckets <= _ONE_HASH:
        return (buckets,)
    first = 2 * math.ceil(buckets**0.5 / 2)
    return first, 2 * math.ceil(buckets / first / 2)


def hashed(
    x: Float[Tensor, "b h n d"], rows: Float[Tensor, "h r f d"], sizes: tuple[int, ...]
) -> Int[Tensor, "b h r n"]:
    """The bucket of each vector in each round."""
    wide = torch.promote_types(torch.float32, x.dtype)
    parts = torch.einsum("bhnd,hrfd->bhrnf", x.to(wide), rows.to(wide)).split([size // 2 for size in sizes], dim=-1)
    bucket = torch.zeros(1, dtype=torch.int64, device=x.device)
    for size, part in zip(sizes, parts, strict=True):
        bucket = bucket * size + torch.cat([part, -part], dim=-1).argmax(dim=-1)
    return bucket
