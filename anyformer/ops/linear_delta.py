"""The delta rule: a state that is corrected at the key instead of added to, chunk by chunk, in O(n) memory.

    u_t = beta_t (v_t - S_(t-1)^T e_t),      S_t = S_(t-1) + k_t u_t^T,      out_i = S_i^T q_i

Inside a chunk the corrections u solve a triangular system: (I + diag(beta) tril(E K^T, -1)) u = diag(beta) (v - E S), S the state
before the chunk (Yang et al. 2024, 2406.06484, section 3.2).
"""

from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.ops.linear import starts
from anyformer.ops.linear_scan import Parts, both_ways, full_precision, one_way, tiles
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
        return both_ways(partial(_pass, chunk=chunk, cut=documents is not None), q, parts, first).to(v.dtype)


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
        out, state = one_way(partial(_pass, chunk=chunk, cut=documents is not None), q, parts, state)
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


def _pass(q: Tensor, parts: Parts, state: Tensor, own: bool, *, chunk: int, cut: bool) -> tuple[Tensor, Tensor]:
    k, v, beta, read, cuts = parts
    n, groups = q.shape[2], k.shape[1]
    if n == 1 and own:  # decoding
        state = state * (1 + cuts)
        state = state + k.mT @ (beta * (v - read @ state))
        return q @ repeat_heads(state, q.shape[1]), state
    chunk = min(chunk, max(n, 1))
    q = tiles(q, chunk).unflatten(1, (groups, q.shape[1] // groups))  # [b g r t C f]
    k, v, beta, read, cuts = (tiles(x, chunk) for x in (k, v, beta, read, cuts))  # [b g t C w]
    eye = torch.eye(chunk, dtype=torch.bool, device=q.device)
    apart = torch.ones_like(eye).triu()[None, None, None]
    before, q_in, after, total = read, q, k, None
    if cut:  # tokens meet those after the same number of cuts, and the states of the chunk's two edges
        place = cuts.cumsum(3)
        apart = apart | (place != place.mT)
        first, last = place == 0, place == place[..., -1:, :]
        before, q_in, after, total = read * first, q * first.unsqueeze(2), k * last, first[..., -1:, :].to(k.dtype)
    system = (beta * (read @ k.mT)).masked_fill(apart, 0.0)
    solved = torch.linalg.solve_triangular(
        system, torch.cat([beta * v, beta * before], dim=-1), upper=False, unitriangular=True
    )
    alone, seen = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    firsts, moves, state = _corrections(alone, seen, after, total, state)
    products = q @ k.mT.unsqueeze(2)
    products = products.masked_fill((apart & ~eye if own else apart).unsqueeze(2), 0.0)
    out = q_in @ firsts.unsqueeze(2) + products @ moves.unsqueeze(2)
    return out.flatten(1, 2).flatten(2, 3)[:, :, :n], state


def _corrections(
    alone: Tensor, seen: Tensor, after: Tensor, total: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the chunks: the state before each [b g t f v], the corrections of each [b g t C v], and the last state.

    Args:
        alone: corrections where the state before the chunk is 0.  seen: what a state takes away from them.
        after: keys that reach the state after the chunk.  total: 0 where a cut keeps the state before the chunk from it.
    """
    firsts, moves = [], []
    kept = [None] * alone.shape[2] if total is None else total.unbind(2)
    for own, minus, keys, keeps in zip(alone.unbind(2), seen.unbind(2), after.mT.unbind(2), kept, strict=True):
        firsts.append(state)
        moves.append(own - minus @ state)
        state = (state if keeps is None else state * keeps) + keys @ moves[-1]
    if not firsts:
        return alone.new_zeros(*alone.shape[:3], *state.shape[2:]), alone, state
    return torch.stack(firsts, dim=2), torch.stack(moves, dim=2), state
