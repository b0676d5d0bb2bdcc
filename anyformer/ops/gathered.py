"""Softmax attention of each query to a short list of keys of its own: O(n + pairs) memory."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.ops.pair_products import PairLists, pair_lists, products, sums
from anyformer.ops.softmax import repeat_heads


def gathered_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b k m d"],
    v: Float[Tensor, "b k m v"],
    *,
    index: Int[Tensor, "#h n r"],
    allowed: Bool[Tensor, "#b #h n r"] | None,
    bias: Float[Tensor, "#b #h n r"] | None = None,
    lists: PairLists | None = None,
    scale: float,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> tuple[Float[Tensor, "b h n v"], Float[Tensor, "b h n"]]:
    """Query i of head h reads the keys index[h, i], those that are allowed:

        s_ir = softcap(scale * q_i . k_index[h, i, r]) + bias_ir;   w_i = softmax(s_i);   out_i = sum_r w_ir v_index[h, i, r]

    A query without any key gives 0, with zero gradient, and a log-sum-exp of -inf. Softmax and sums run in the wider of float32
    and q's dtype.

    Args:
        allowed: None: all.
        lists: `lists_of` the index, where it is at hand; read on the CPU.

    Returns:
        The output, and the log of each row's normaliser.
    """
    wide = torch.promote_types(torch.float32, q.dtype)
    k, v = (repeat_heads(x, q.shape[1]) for x in (k, v))
    copying = q.device.type != "cpu" or not q.shape[0]  # lists are read sample by sample
    if copying:
        logits = (_listed(k, index).to(wide) @ q.to(wide)[..., None])[..., 0] * scale  # [b h n r]
    else:
        lists = lists_of(index, q.shape[1], k.shape[2]) if lists is None else lists
        logits = _products(q.to(wide), k.to(wide), lists) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.to(wide)
    if allowed is None:
        lse, weights = torch.logsumexp(logits, dim=-1), torch.softmax(logits, dim=-1)
    else:
        logits = logits.masked_fill(~allowed, -torch.inf)
        empty = ~allowed.any(dim=-1, keepdim=True).expand_as(logits[..., :1])
        logits = logits.masked_fill(empty, 0.0)  # before the softmax: its backward would be NaN otherwise
        lse = torch.logsumexp(logits, dim=-1).masked_fill(empty[..., 0], -torch.inf)
        weights = torch.softmax(logits, dim=-1).masked_fill(empty, 0.0)
    weights = torch.nn.functional.dropout(weights, dropout)
    if copying:
        return (weights[..., None, :] @ _listed(v, index).to(wide))[..., 0, :].to(q.dtype), lse
    assert lists is not None
    return _sums(weights, v.to(wide), lists).to(q.dtype), lse


def lists_of(index: Int[Tensor, "#h n r"], heads: int, slots: int) -> PairLists:
    """The lists of all heads, of queries and keys one head after the other."""
    begins = slots * torch.arange(heads, device=index.device)[:, None, None]
    return pair_lists((index + begins).flatten(0, 1), heads * slots)


def _products(q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h m d"], lists: PairLists) -> Float[Tensor, "b h n r"]:
    found = [products(x.flatten(0, 1), y.flatten(0, 1), lists) for x, y in zip(q, k, strict=True)]
    return torch.stack(found).unflatten(1, q.shape[1:3])


def _sums(w: Float[Tensor, "b h n r"], v: Float[Tensor, "b h m d"], lists: PairLists) -> Float[Tensor, "b h n d"]:
    found = [sums(x.flatten(0, 1), y.flatten(0, 1), lists) for x, y in zip(w, v, strict=True)]
    return torch.stack(found).unflatten(1, w.shape[1:3])


def _listed(x: Float[Tensor, "b h m d"], index: Int[Tensor, "#h n r"]) -> Float[Tensor, "b h n r d"]:
    b, h, _, d = x.shape
    _, n, r = index.shape
    flat = index.expand(h, n, r).reshape(1, h, n * r, 1).expand(b, h, n * r, d)
    return x.gather(2, flat).view(b, h, n, r, d)
