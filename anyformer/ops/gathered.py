"""Softmax attention of each query to a short list of keys of its own: O(n + pairs) memory."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.ops.softmax import repeat_heads


def gathered_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b k m d"],
    v: Float[Tensor, "b k m v"],
    *,
    index: Int[Tensor, "#h n r"],
    allowed: Bool[Tensor, "#b #h n r"],
    bias: Float[Tensor, "#b #h n r"] | None = None,
    scale: float,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> tuple[Float[Tensor, "b h n v"], Float[Tensor, "b h n"]]:
    """Query i of head h reads the keys index[h, i], those that are allowed:

        s_ir = softcap(scale * q_i . k_index[h, i, r]) + bias_ir;   w_i = softmax(s_i);   out_i = sum_r w_ir v_index[h, i, r]

    A query without any key gives 0, with zero gradient, and a log-sum-exp of -inf. Softmax and sums run in the wider of float32
    and q's dtype.

    Returns:
        The output, and the log of each row's normaliser.
    """
    wide = torch.promote_types(torch.float32, q.dtype)
    keys, values = (_listed(repeat_heads(x, q.shape[1]), index).to(wide) for x in (k, v))
    logits = (keys @ q.to(wide)[..., None])[..., 0] * scale  # [b h n r]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.to(wide)
    logits = logits.masked_fill(~allowed, -torch.inf)
    empty = ~allowed.any(dim=-1, keepdim=True).expand_as(logits[..., :1])
    logits = logits.masked_fill(empty, 0.0)  # before the softmax: its backward would be NaN otherwise
    lse = torch.logsumexp(logits, dim=-1).masked_fill(empty[..., 0], -torch.inf)
    weights = torch.nn.functional.dropout(torch.softmax(logits, dim=-1).masked_fill(empty, 0.0), dropout)
    return (weights[..., None, :] @ values)[..., 0, :].to(q.dtype), lse


def _listed(x: Float[Tensor, "b h m d"], index: Int[Tensor, "#h n r"]) -> Float[Tensor, "b h n r d"]:
    b, h, _, d = x.shape
    _, n, r = index.shape
    flat = index.expand(h, n, r).reshape(1, h, n * r, 1).expand(b, h, n * r, d)
    return x.gather(2, flat).view(b, h, n, r, d)
