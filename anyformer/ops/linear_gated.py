"""Linear attention whose state fades channel by channel, chunk by chunk, in O(n) memory.

    S_t = diag(exp(g_t)) S_(t-1) + k_t v_t^T,    out_i = q_i . S_i = sum_(j <= i) (q_i . exp(G_i - G_j) k_j) v_j

with G the running sum of g.

Inside a chunk the weight of a pair is a factor of the query times one of the key, split at a place between the two, so that neither
is ever above one, whatever the gates. Joining blocks of 1, 2, 4 ... tokens gives every pair such a place.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.ops.gated_node import run_pass
from anyformer.ops.linear import starts
from anyformer.ops.linear_scan import Parts, Run, both_ways, full_precision, one_way
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
        return both_ways(_run(chunk), q, parts, first).to(v.dtype)


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
        out, state = one_way(_run(chunk), q, parts, state)
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


def _run(chunk: int) -> Run:
    """The pass for so many tokens a chunk."""

    def run(q: Tensor, parts: Parts, state: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
        k, v, fade = parts
        if q.shape[2] == 1 and not reverse:  # decoding: no chunk to cut
            state = state * fade.mT.exp() + k.mT @ v
            return q @ repeat_heads(state, q.shape[1]), state
        return run_pass(q, k, v, fade, state, reverse, chunk)

    return run
