"""The delta rule: a state that is corrected at the key instead of added to, chunk by chunk, in O(n) memory.

    u_t = beta_t (v_t - S_(t-1)^T e_t),      S_t = S_(t-1) + k_t u_t^T,      out_i = S_i^T q_i

Inside a chunk the corrections u solve a triangular system: (I + diag(beta) tril(E K^T, -1)) u = diag(beta) (v - E S), S the state
before the chunk (Yang et al. 2024, 2406.06484, section 3.2).
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.ops.delta_node import run_pass
from anyformer.ops.linear import starts
from anyformer.ops.linear_scan import Parts, Run, both_ways, full_precision, one_way
from anyformer.ops.softmax import repeat_heads

CHUNK = 64


def delta_rule(
    q: Float[Tensor, "b h n f"],
    k: Float[Tensor, "b k m f"],
    v: Float[Tensor, "b k m v"],
    beta: Float[Tensor, "b k m"],
    *,
    causal: bool,
    read: Float[Tensor, "b k m f"] | None = None,
    keep: Bool[Tensor, "b m"] | None = None,
    documents: Int[Tensor, "b m"] | None = None,
    chunk: int = CHUNK,
) -> Float[Tensor, "b h n v"]:
    """Outputs of queries that read a state corrected token by token.

    Query i stands at place i + m - n. Query head h reads key head h // (h / k). Sums run in the wider of float32 and the dtypes
    given; the output has v's dtype. A query without any key gives 0 and a gradient of 0.

    Args:
        beta: how far the state's value at a key is moved to the new one, from 0 to 2.
        causal: whether a query reads the state after its own token; if not, what the state of a pass backward over the later tokens
            gives is added.
        read: where the state is read before it is corrected, e in the equation; None: k. With read . k = 1 and beta = 1 the value
            there is replaced.
        keep: True for keys that may be read. What the others hold moves nothing.
        documents: a number for each key; the state begins anew with each document.
        chunk: tokens of a chunk. Changes speed and rounding only.

    Raises:
        ValueError: not causal and more queries than keys.
    """
    if causal:
        return delta_rule_with_state(
            q, k, v, beta, read=read, keep=keep, documents=documents, chunk=chunk
        )[0]  # fmt: skip
    q, parts, first = _prepared(q, k, v, beta, read, keep, documents)
    with full_precision(q):
        return both_ways(_run(chunk, documents is not None), q, parts, first).to(v.dtype)


def delta_rule_with_state(
    q: Float[Tensor, "b h n f"],
    k: Float[Tensor, "b k m f"],
    v: Float[Tensor, "b k m v"],
    beta: Float[Tensor, "b k m"],
    *,
    state: Float[Tensor, "b k f v"] | None = None,
    read: Float[Tensor, "b k m f"] | None = None,
    keep: Bool[Tensor, "b kept"] | None = None,
    documents: Int[Tensor, "b known"] | None = None,
    chunk: int = CHUNK,
) -> tuple[Float[Tensor, "b h n v"], Float[Tensor, "b k f v"]]:
    """`delta_rule` with causal=True that continues after `state`, and the state after the last key.

    Args:
        state: what came before the first key; None: nothing.
        keep, documents: may be longer than the keys: the tokens before the first key are those in the state.
    """
    q, parts, first = _prepared(q, k, v, beta, read, keep, documents)
    with full_precision(q):
        state = first if state is None else state.to(first.dtype)
        out, state = one_way(_run(chunk, documents is not None), q, parts, state)
    return out.to(v.dtype), state


def _prepared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    read: Tensor | None,
    keep: Tensor | None,
    documents: Tensor | None,
) -> tuple[Tensor, Parts, Tensor]:
    """The operands in the dtype of sums, hidden tokens without effect, and the state of nothing; cuts are -1."""
    m = k.shape[2]
    wide = torch.promote_types(torch.promote_types(q.dtype, k.dtype), torch.promote_types(v.dtype, torch.float32))
    q, k, v, beta, read = (x.to(wide) for x in (q, k, v, beta.unsqueeze(-1), k if read is None else read))
    if keep is not None:
        hidden = ~keep[:, None, keep.shape[1] - m :, None]
        k, v, beta, read = (x.masked_fill(hidden, 0.0) for x in (k, v, beta, read))
    cuts = torch.zeros_like(beta)
    if documents is not None:
        cuts = cuts.masked_fill(starts(documents, keep)[:, None, documents.shape[1] - m :, None], -1.0)
    return q, (k, v, beta, read, cuts), k.new_zeros(*k.shape[:2], k.shape[3], v.shape[3])


def _run(chunk: int, cut: bool) -> Run:
    """The pass for so many tokens a chunk; `cut`: whether there are cuts."""

    def run(q: Tensor, parts: Parts, state: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
        k, v, beta, read, cuts = parts
        if q.shape[2] == 1 and not reverse:  # decoding: no chunk to cut
            state = state * (1 + cuts)
            state = state + k.mT @ (beta * (v - read @ state))
            return q @ repeat_heads(state, q.shape[1]), state
        return run_pass(q, k, v, beta, read, cuts if cut else None, state, reverse, chunk)

    return run
