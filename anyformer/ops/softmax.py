"""Softmax attention over all pairs at once: the dense reference, and the same through torch's fused kernel."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor


def dense(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b k m d"],
    v: Float[Tensor, "b k m v"],
    *,
    allowed: Bool[Tensor, "#b #h #n m"] | None = None,
    bias: Float[Tensor, "#b #h #n m"] | None = None,
    scale: float,
    softcap: float | None = None,
    dropout: float = 0.0,
    values: Callable[[Tensor], Tensor] | None = None,
    rows: Callable[[Tensor], Tensor] | None = None,
    sink: Float[Tensor, " h"] | None = None,
) -> tuple[Float[Tensor, "b h n v"], Float[Tensor, "b h n"]]:
    """Softmax attention written out; the specification of every faster path.

        s_ij = scale * q_i . k_j, capped as c * tanh(s / c), plus bias_ij
        w_ij = exp(s_ij) / (sum_j' exp(s_ij') + exp(sink)) over the allowed j;   out_i = sum_j w_ij v_j + values(w)_i

    Query head h reads key head h // (h / k). Softmax and sums run in the wider of float32 and the input's dtype. A row with
    nothing allowed gives exactly 0, with zero gradient, and a log-sum-exp of -inf.

    Args:
        allowed: True where a pair may meet.
        bias: added to the scaled logits, in every dtype.
        dropout: probability of dropping a weight.
        values: maps the weights `[b h n m]` to a term on the output.
        rows: maps the logits `[b h n m]`, bias and -inf where nothing may meet included, to those that count.
        sink: logit of a key that every query meets and that holds no value; None: there is none.

    Returns:
        The output, and the log of each row's sum over the keys, the sink not among them.
    """
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    wide = torch.promote_types(torch.float32, q.dtype)
    logits = torch.einsum("bhnd,bhmd->bhnm", q.to(wide), k.to(wide)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.to(wide)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    if logits.shape[-1] == 0:
        return q.new_zeros(*q.shape[:-1], v.shape[-1]), logits.new_full(q.shape[:-1], -torch.inf)
    if rows is not None:
        logits = rows(logits) if allowed is None else rows(logits).masked_fill(~allowed, -torch.inf)
    empty = (logits == -torch.inf).all(dim=-1, keepdim=True)
    logits = logits.masked_fill(empty, 0.0)  # before the softmax: its backward would be NaN otherwise
    lse, weights = torch.logsumexp(logits, dim=-1), torch.softmax(logits, dim=-1)
    if sink is not None:
        weights = weights * beside_sink(lse, sink)[..., None]
    lse, weights = lse.masked_fill(empty[..., 0], -torch.inf), F.dropout(weights.masked_fill(empty, 0.0), dropout)
    out = torch.einsum("bhnm,bhmv->bhnv", weights, v.to(wide))
    if values is not None:
        out = out + values(weights)
    return out.to(q.dtype), lse


def fused(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b k m d"],
    v: Float[Tensor, "b k m v"],
    *,
    allowed: Bool[Tensor, "#b #h #n m"] | None = None,
    bias: Float[Tensor, "#b #h #n m"] | None = None,
    lower_triangle: bool = False,
    scale: float,
    dropout: float = 0.0,
    sink: Float[Tensor, " h"] | None = None,
) -> Float[Tensor, "b h n v"]:
    """`dense` without softcap and value terms, through `scaled_dot_product_attention`.

    Args:
        lower_triangle: whether the allowed pairs are exactly those of a square lower triangle (then `allowed` is None).
        sink: logit of a key that every query meets and that holds no value; None: there is none.
    """
    if bias is not None:
        bias = bias.to(q.dtype)
        # a query that may look nowhere: the kernels agree on 0 only for a boolean mask or -inf, so both are given as one
        mask = bias if allowed is None else torch.where(allowed, bias, -torch.inf)
        if lower_triangle:
            n = q.shape[2]
            mask = mask.masked_fill(torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    else:
        mask = allowed
    triangle = lower_triangle and bias is None
    shared = {"dropout_p": dropout, "is_causal": triangle, "enable_gqa": q.shape[1] != k.shape[1]}
    if sink is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, **shared)
    width, first = v.shape[3], int(triangle)
    if not scale:
        q, scale = torch.zeros_like(q), 1.0  # a product with the sink's key has to give its logit
    most = torch.finfo(k.dtype).max  # and not infinity, which the other heads' queries multiply by 0
    product = (sink.to(torch.promote_types(sink.dtype, k.dtype)) / scale).clamp(-most, most)
    q, k, v, mask = _with_sink(q, k, v, mask, product, first)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, **shared)[:, :, first:, :width]


def beside_sink(lse: Float[Tensor, "b h n"], sink: Float[Tensor, " h"]) -> Float[Tensor, "b h n"]:
    """The share of a row's weight that its keys keep, from the log of their sum."""
    return torch.sigmoid(lse - sink.to(lse.dtype)[:, None])


def _with_sink(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, product: Float[Tensor, " h"], more_queries: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Operands with a key in front that holds no value, whose product with every query of head h is product[h].

    It is a key and no mask, because the kernel that keeps no tensor of all pairs has no gradient for a mask: a channel for each
    query head that shares a key head, 1 in the queries of that head, holds the products.

    Args:
        more_queries: queries to put in front, so that the square with a lower triangle stays one.
    """
    (b, heads, n, d), kv_heads = q.shape, k.shape[1]
    groups = heads // kv_heads
    own = torch.eye(groups, dtype=q.dtype, device=q.device).repeat(kv_heads, 1)  # [h groups]
    q = F.pad(torch.cat([q, own[:, None].expand(b, -1, n, -1)], dim=3), (0, 0, more_queries, 0))
    key = F.pad(product.to(k.dtype).view(1, kv_heads, 1, groups), (d, 0)).expand(b, -1, -1, -1)
    k, v = torch.cat([key, F.pad(k, (0, groups))], dim=2), F.pad(v, (0, groups, 1, 0))
    return q, k, v, None if mask is None else F.pad(mask, (1, 0), value=float(mask.dtype == torch.bool))


def repeat_heads(x: Float[Tensor, "b k m d"], heads: int) -> Float[Tensor, "b h m d"]:
    """Each key head once for every query head that reads it: query head h reads key head h // (h / k)."""
    groups = heads // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)
