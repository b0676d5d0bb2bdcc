"""Linear attention whose state fades channel by channel, chunk by chunk, in O(n) memory.

    S_t = diag(exp(g_t)) S_(t-1) + k_t v_t^T,    out_i = q_i . S_i = sum_(j <= i) (q_i . exp(G_i - G_j) k_j) v_j

with G the running sum of g.

Inside a chunk the weight of a pair is a factor of the query times one of the key, split at a place between the two, so that neither
is ever above one, whatever the gates. Joining blocks of 1, 2, 4 ... tokens gives every pair such a place.
"""

from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.ops.linear import starts
from anyformer.ops.linear_scan import Parts, both_ways, full_precision, one_way, tiles
from anyformer.ops.linear_tiles import GONE
from anyformer.ops.softmax import repeat_heads

CHUNK = 64


def gated_linear_attention(
    q: Float[Tensor, "b h n f"],
    k: Float[Tensor, "b k m f"],
    v: Float[Tensor, "b k m v"],
    log_decay: Float[Tensor, "#b #k m f"],
    *,
    causal: bool,
    keep: Bool[Tensor, "b m"] | None = None,
    documents: Int[Tensor, "b m"] | None = None,
    chunk: int = CHUNK,
) -> Float[Tensor, "b h n v"]:
    """Attention without a denominator whose weights are sum_f q_if k_jf exp(-|G_if - G_jf|), G the running sum of log_decay.

    Query i stands at place i + m - n. Query head h reads key head h // (h / k). Sums run in the wider of float32 and the dtypes
    given; the output has v's dtype. A query without any key gives 0 and a gradient of 0.

    Args:
        causal: whether a query sees keys up to its own place only; if not, it sees those before it, its own and those after it.
        keep: True for keys that may be read. What the others hold moves nothing, and they do not fade the others.
        log_decay: at most 0; entry t of channel f is the log of the factor on everything before t that is read from t on (and, not
            causal, on everything from t on that is read before t).
        documents: a number for each key; queries meet only keys of their own.
        chunk: tokens that are compared pair by pair, a power of two. Changes speed and rounding only.

    Raises:
        ValueError: not causal and more queries than keys.
    """
    if causal:
        return gated_linear_attention_with_state(
            q, k, v, log_decay, keep=keep, documents=documents, chunk=chunk
        )[0]  # fmt: skip
    q, parts, first = _prepared(q, k, v, log_decay, keep, documents)
    with full_precision(q):
        return both_ways(partial(_pass, chunk=chunk), q, parts, first).to(v.dtype)


def gated_linear_attention_with_state(
    q: Float[Tensor, "b h n f"],
    k: Float[Tensor, "b k m f"],
    v: Float[Tensor, "b k m v"],
    log_decay: Float[Tensor, "#b #k m f"],
    *,
    state: Float[Tensor, "b k f v"] | None = None,
    keep: Bool[Tensor, "b kept"] | None = None,
    documents: Int[Tensor, "b known"] | None = None,
    chunk: int = CHUNK,
) -> tuple[Float[Tensor, "b h n v"], Float[Tensor, "b k f v"]]:
    """`gated_linear_attention` with causal=True that continues after `state`, and the state after the last key.

    Args:
        state: what came before the first key; None: nothing.
        keep, documents: may be longer than the keys: the tokens before the first key are those in the state.
    """
    q, parts, first = _prepared(q, k, v, log_decay, keep, documents)
    with full_precision(q):
        state = first if state is None else state.to(first.dtype)
        out, state = one_way(partial(_pass, chunk=chunk), q, parts, state)
    return out.to(v.dtype), state


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, keep: Tensor | None, documents: Tensor | None
) -> tuple[Tensor, Parts, Tensor]:
    """The operands in the dtype of sums, hidden tokens without effect, documents cut; and the state of nothing."""
    m = k.shape[2]
    wide = torch.promote_types(torch.promote_types(q.dtype, k.dtype), torch.promote_types(v.dtype, torch.float32))
    q, k, v, fade = (x.to(wide) for x in (q, k, v, log_decay.expand(*k.shape)))
    if keep is not None:
        hidden = ~keep[:, None, keep.shape[1] - m :, None]
        k, v, fade = (x.masked_fill(hidden, 0.0) for x in (k, v, fade))
    if documents is not None:
        cut = starts(documents, keep)[:, None, documents.shape[1] - m :, None]
        fade = fade.masked_fill(cut, GONE)
    return q, (k, v, fade.clamp(min=GONE)), k.new_zeros(*k.shape[:2], k.shape[3], v.shape[3])


def _pass(q: Tensor, parts: Parts, state: Tensor, own: bool, chunk: int) -> tuple[Tensor, Tensor]:
    k, v, fade = parts
    n, groups = q.shape[2], k.shape[1]
    if n == 1 and own:  # decoding
        state = state * fade.mT.exp() + k.mT @ v
        return q @ repeat_heads(state, q.shape[1]), state
    chunk = min(chunk, 1 << max(n - 1, 0).bit_length())
    q = tiles(q, chunk).unflatten(1, (groups, q.shape[1] // groups))  # [b g r t C f]
    k, v, fade = (tiles(x, chunk).unsqueeze(2) for x in (k, v, fade))  # [b g 1 t C w]
    weights, q, k, total = _weights(q, k, fade.exp(), own)
    before, state = _states((k.mT @ v).squeeze(2), total.mT.squeeze(2), state)
    out = torch.matmul(weights, v) + torch.matmul(q, before.unsqueeze(2))
    return out.flatten(1, 2).flatten(2, 3)[:, :, :n], state


def _states(steps: Tensor, carry: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Each chunk's sum [b g t f v] and factor [b g t f 1] -> the state before each chunk, and after the last."""
    before = []
    for step, factor in zip(steps.unbind(2), carry.unbind(2), strict=True):
        before.append(state)
        state = torch.addcmul(step, state, factor)
    return (torch.stack(before, dim=2) if before else torch.zeros_like(steps)), state


def _weights(q: Tensor, k: Tensor, factor: Tensor, own: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The weights inside chunks [... C C]; queries times what fades the state before their chunk until they read it; keys times
    what fades them until their chunk ends; and the factor across each chunk [... 1 f].

    Blocks of 1, 2, 4 ... tokens are joined in pairs: the late block's queries and the early block's keys are then faded up to and
    from the edge between them, and their product is the square of weights that the pair adds to its two triangles.
    """
    chunk = q.shape[-2]
    diagonal = (q * k).sum(-1, keepdim=True) if own else q.new_zeros(*q.shape[:-1], 1)
    weights, q, k, total = (x.unsqueeze(-2) for x in (diagonal, q * factor, k, factor))  # [... C 1 w]
    for size in (1 << level for level in range(chunk.bit_length() - 1)):
        (w_early, w_late), (q_early, q_late), (k_early, k_late), (t_early, t_late) = (
            x.unflatten(-3, (-1, 2)).unbind(-3) for x in (weights, q, k, total)
        )  # [... pairs size w]
        square = (q_late * k_early).sum(-1, keepdim=True) if size == 1 else q_late @ k_early.mT
        upper = torch.cat([w_early, torch.zeros_like(square)], dim=-1)
        weights = torch.cat([upper, torch.cat([square, w_late], dim=-1)], dim=-2)
        q = torch.cat([q_early, q_late * t_early], dim=-2)
        k = torch.cat([k_early * t_late, k_late], dim=-2)
        total = t_early * t_late
    return weights.squeeze(-3), q.squeeze(-3), k.squeeze(-3), total.squeeze(-3)
