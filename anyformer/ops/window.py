"""Softmax attention in a sliding window, with optional global key columns: O(n) memory, forward and backward."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.ops import full_rows as beside
from anyformer.ops import tile, tile_passes
from anyformer.ops.full_rows import FullRows
from anyformer.ops.node import node, refuse_second_derivative
from anyformer.ops.window_cut import Extras
from anyformer.ops.window_tiles import WindowTiles


def window_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b k m d"],
    v: Float[Tensor, "b k m v"],
    *,
    left: int,
    right: int,
    causal: bool = False,
    keep: Bool[Tensor, "b m"] | None = None,
    asking: Bool[Tensor, "b n"] | None = None,
    documents: Int[Tensor, "b m"] | None = None,
    bias: Float[Tensor, "h o"] | None = None,
    query_table: Float[Tensor, "h o d"] | None = None,
    value_table: Float[Tensor, "h o v"] | None = None,
    key_table: Float[Tensor, "h o d"] | None = None,
    global_keys: Int[Tensor, "b g"] | None = None,
    global_bias: Float[Tensor, "#b h n g"] | None = None,
    full_rows: Int[Tensor, "b f"] | None = None,
    full_bias: Float[Tensor, "#b #h f m"] | None = None,
    reach: list[int] | None = None,
    scale: float,
    softcap: float | None = None,
    dropout: float = 0.0,
    want_lse: bool = True,
) -> tuple[Float[Tensor, "b h n v"], Float[Tensor, "b h lse"]]:
    """Softmax attention of each query to the keys near its place, and to the global keys.

    Query i stands at p = i + m - n, so that the last query sees the last key, and meets key j when
    -left <= j - p <= right:

        s_ij = softcap(scale * (q_i . (k_j + query_table[j - p]) + k_j . key_table[j - p])) + bias[j - p]
        w_ij = exp(s_ij) / sum_j' exp(s_ij');    out_i = sum_j w_ij (v_j + value_table[j - p])

    Query head i reads key head i // (h / k). Scores, weights and sums are kept in the wider of float32 and q's dtype. A
    query without any key gives 0, a gradient of 0 and a log-sum-exp of -inf.

    Args:
        left, right: keys before and after the query's place, which is always in. With `causal`, right counts as 0.
        causal: also hides global keys behind the query.
        keep: True for keys that may be read. What the others hold, even NaN, moves nothing.
        asking: True for queries that ask; the others give 0.
        documents: a number for each key; queries (the last n of them) meet only keys of their own.
        bias: added to the scores by offset j - p, from -left to right (-inf shuts an offset); learnable.
        query_table, value_table: vectors by the same offsets, added to keys and values; learnable.
        key_table: vectors by the same offsets, added to queries where they meet keys; learnable.
        global_keys: indices of keys that every query meets, distinct in a row; -1 for none. Where such a key lies in
            the window it is counted once, as any key there. Elsewhere the tables by offset do not apply to it.
        global_bias: added to the scores of the global columns.
        full_rows: indices of queries that meet every key instead, also with `causal`, distinct in a row; -1 for none. The tables by
            offset and `global_bias` do not apply to them.
        full_bias: added to the scores of these rows.
        reach: for each head, how far away keys still matter: what lies farther may be left out, where that saves work.
            Without global keys only.
        scale: factor of q . k before everything else.
        softcap: c * tanh(s / c) on the scores before the biases.
        dropout: probability of dropping a weight, drawn from torch's global generator.
        want_lse: without it the second result is `[b h 0]`, a few per cent faster.

    Returns:
        The output, and the log of each row's normaliser.
    """
    seed = torch.randint(2**62, ()) if dropout else None
    tensors = (
        q,
        k,
        v,
        keep,
        asking,
        documents,
        bias,
        query_table,
        value_table,
        key_table,
        global_keys,
        global_bias,
        full_rows,
        full_bias,
        seed,
    )
    return window_forward(*tensors, left, right, causal, reach, scale, softcap or 0.0, dropout, want_lse)


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    asking: Tensor | None,
    documents: Tensor | None,
    bias: Tensor | None,
    query_table: Tensor | None,
    value_table: Tensor | None,
    key_table: Tensor | None,
    global_keys: Tensor | None,
    global_bias: Tensor | None,
    full_rows: Tensor | None,
    full_bias: Tensor | None,
    seed: Tensor | None,
    left: int,
    right: int,
    causal: bool,
    reach: list[int] | None,
    scale: float,
    softcap: float,
    dropout: float,
    want_lse: bool,
) -> tuple[Tensor, Tensor]:
    """`window_attention` on plain arguments."""
    if k.shape[2] == 0 or q.numel() == 0:
        return tile.without_keys(q, v, want_lse)
    extras = Extras(keep, documents, bias, query_table, value_table, key_table, global_keys, global_bias, full_rows)
    rule = tile.rule(scale, softcap, dropout, seed)
    layout, _ = cut(q, k, left, right, causal, extras, tile.threads(dropout), reach)
    out, lse = tile_passes.forward(layout, q, k, v, asking, rule, want_lse)
    if full_rows is not None:
        full = FullRows(full_rows, full_bias, keep, asking, documents)
        beside.forward(full, q, k, v, out, lse if want_lse else None, rule)
    return out, lse


def fake_forward(q, k, v, *arguments):
    return tile.empty_result(q, v, arguments[-1])


def run_backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    asking: Tensor | None,
    documents: Tensor | None,
    bias: Tensor | None,
    query_table: Tensor | None,
    value_table: Tensor | None,
    key_table: Tensor | None,
    global_keys: Tensor | None,
    global_bias: Tensor | None,
    full_rows: Tensor | None,
    full_bias: Tensor | None,
    seed: Tensor | None,
    left: int,
    right: int,
    causal: bool,
    reach: list[int] | None,
    scale: float,
    softcap: float,
    dropout: float,
    learning: bool,
) -> list[Tensor]:
    """The gradients of q, k, v, bias, query_table, value_table, key_table, global_bias and full_bias, empty for one that is None.

    Those of the tables are 0 unless `learning`.
    """
    tables = (bias, query_table, value_table, key_table, global_bias)
    if k.shape[2] == 0 or q.numel() == 0:
        return [x.new_zeros(x.shape) for x in (q, k, v)] + [tile.gradient_of(x, None) for x in (*tables, full_bias)]
    extras = Extras(keep, documents, bias, query_table, value_table, key_table, global_keys, global_bias, full_rows)
    rule = tile.rule(scale, softcap, dropout, seed)
    layout, first = cut(q, k, left, right, causal, extras, tile.threads(dropout), reach, learning)
    grads = tile_passes.backward(layout, d_out, d_lse, q, k, v, asking, rule)
    d_full_bias = None
    if full_rows is not None:
        full = FullRows(full_rows, full_bias, keep, asking, documents)
        d_full_bias = beside.backward(full, d_out, d_lse, q, k, v, grads, rule, learning=learning)
    d_tables = zip(tables, layout.table_gradients(), (first, first, first, first, 0), strict=True)
    by_table = (tile.gradient_of(x, grad, start) for x, grad, start in d_tables)
    return [*grads, *by_table, tile.gradient_of(full_bias, d_full_bias)]


def cut(
    q: Tensor,
    k: Tensor,
    left: int,
    right: int,
    causal: bool,
    extras: Extras,
    threads: int,
    reach: list[int] | None,
    learning: bool = False,
) -> tuple[WindowTiles, int]:
    """The layout, of a window no wider than the keys, and the first row of the tables that it reads."""
    most = max(q.shape[2], k.shape[2]) - 1
    first, left_in, right_in = max(left - most, 0), min(left, most), 0 if causal else min(right, most)
    by_offset = ("bias", "query_table", "value_table", "key_table")
    tables = {name: getattr(extras, name) for name in by_offset}
    kept = slice(first, first + left_in + right_in + 1)
    extras = extras._replace(**{name: None if x is None else x[:, kept] for name, x in tables.items()})
    return WindowTiles(q, k, left_in, right_in, causal, extras, threads, reach, learning), first


def fake_backward(d_out, d_lse, q, k, v, keep, asking, documents, *arguments):
    bias, query_table, value_table, key_table, _, global_bias, _, full_bias = arguments[:8]
    tables = (bias, query_table, value_table, key_table, global_bias, full_bias)
    return [x.new_empty(x.shape) for x in (q, k, v)] + [tile.gradient_of(x, None) for x in tables]


def save_inputs(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:15])
    ctx.plain = inputs[15:]


def differentiate(ctx, d_out, d_lse):
    *plain, want_lse = ctx.plain
    q, k, v, *rest = ctx.saved_tensors
    d_out = q.new_zeros(*q.shape[:3], v.shape[3]) if d_out is None else d_out
    d_lse = d_lse if want_lse else None
    learning = any(ctx.needs_input_grad[index] for index in (6, 7, 8, 9, 11, 13))
    d_q, d_k, d_v, *d_tables = window_backward(d_out, d_lse, q, k, v, *rest, *plain, learning)
    *by_offset, d_global_bias, d_full_bias = (
        grad if x is not None else None for x, grad in zip((*rest[3:7], rest[8], rest[10]), d_tables, strict=True)
    )
    tables = (*by_offset, None, d_global_bias, None, d_full_bias)
    return d_q, d_k, d_v, None, None, None, *tables, *[None] * 9


window_forward = node("window_forward", run_forward, fake_forward)
window_backward = node("window_backward", run_backward, fake_backward)
torch.library.register_autograd("anyformer::window_forward", differentiate, setup_context=save_inputs)
torch.library.register_autograd("anyformer::window_backward", refuse_second_derivative)
