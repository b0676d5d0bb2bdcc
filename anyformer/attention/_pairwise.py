"""Weights that are products of features, each pair by itself: for a few new queries, and where positions are no function of places.

A block of queries at a time, and in the backward once more, so that memory grows with the number of keys only.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.attention._products import Products, divided
from anyformer.context import Context
from anyformer.ops.gates import gate_sums, last_seen
from anyformer.ops.recomputed import recomputed
from anyformer.ops.softmax import repeat_heads
from anyformer.pattern.pairs import pairs

PAIRS = 1 << 22
"""Pairs that are in memory at once."""


def pairwise(x: Products, context: Context) -> Float[Tensor, "b h n v"]:
    """The outputs of the pairs of the context."""
    keep, (b, heads, n), m = context.keys.keep, x.q.shape[:3], x.k.shape[2]
    x = x.ready()

    def shown(keys: Tensor) -> Tensor:
        keys = repeat_heads(keys, heads)
        return keys if keep is None else keys.masked_fill(~keep[:, None, :, None], 0.0)

    fade = x.by_token()
    fade = None if fade is None else fade.expand(b, -1, -1)
    fade = fade if fade is None or keep is None else fade.masked_fill(~keep[:, None], 0.0)
    counted = None if x.counted is None else (x.counted[0], shown(x.counted[1]))
    x = x._replace(k=shown(x.k), v=shown(x.v), raw=(x.raw[0], shown(x.raw[1])), counted=counted, log_decay=fade)
    count, outs = max(1, PAIRS // max(b * heads * m, 1)), []
    for start in range(0, n, count):
        rows = slice(start, start + count)
        block = x._replace(q=x.q[:, :, rows], raw=(x.raw[0][:, :, rows], x.raw[1]))
        if x.counted is not None:
            block = block._replace(counted=(x.counted[0][:, :, rows], x.counted[1]))
        outs.append(recomputed(_block, block, replace(context, queries=context.queries.part(start, start + count))))
    return torch.cat(outs, dim=2) if outs else x.v.new_zeros(b, heads, n, x.v.shape[3])


def _block(x: Products, context: Context) -> Tensor:
    encoding, queries, keys = context.encoding, context.queries, context.keys
    encoding = encoding if encoding.rebind is None else encoding.rebind(queries, keys)
    logits = x.q.new_zeros(1, 1, 1, 1) if encoding.logits is None else encoding.logits(*x.raw)
    if x.log_decay is not None:
        logits = logits - gate_sums(x.log_decay, last_seen(queries.places, keys.places)).abs()
    allowed = pairs(context, x.q.shape[1])
    factors = (logits if allowed is None else torch.where(allowed, logits, -torch.inf)).exp().to(x.q.dtype)
    weights, den = (x.q @ x.k.mT) * factors, None
    if x.rule.denominator != "none":
        counts = weights if x.counted is None else (x.counted[0] @ x.counted[1].mT) * factors
        den = counts.sum(-1)
    out = divided(weights @ x.v.to(weights.dtype), den, x.rule, weights)
    if encoding.values is not None:
        out = out + encoding.values(weights if den is None else divided(weights, den, x.rule, weights)).to(out.dtype)
    return out.to(x.v.dtype)
