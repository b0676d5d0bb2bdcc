"""Softmax attention over tiles, forward and backward, for every layout:

    S = softcap(scale * Q K^T + R) + B,   P = softmax(S),   O = (P * D) V + U,   lse = log sum exp S

with R terms of a query or a key and the offset between them, B additive terms (biases, and SHUT for pairs that may not meet), D the
dropout multiplier and U terms that depend on the weights. Each row meets all its keys inside one tile, so the backward recomputes P
instead of keeping it, and needs neither O nor lse:

    dP = (dO V^T) * D,          dS = P * (dP - sum(P * dP) + dlse)
    dQ = scale * dS K,          dK = scale * dS^T Q,          dV = (P * D)^T dO

Memory is O(n + m). Everything runs in the wider of float32 and the inputs' dtype.
"""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from anyformer.ops.pages import in_huge_pages
from anyformer.ops.tile import (
    DEAD,
    Layout,
    Operands,
    Place,
    Rule,
    dropout_multiplier,
    empty_result,
    load_rows,
    product,
    result_rows,
    store_rows,
)


def weigh(layout: Layout, place: Place, queries: Tensor, keys: Tensor, slots: Any, rule: Rule, want_lse: bool):
    """The weights [C q s] of one chunk, its rows that give 0 [C q 1] or None, and its lse [C q 1] or None."""
    shape = (*queries.shape[:2], keys.shape[1])
    scores = layout.scratch.take("scores", *shape)
    terms = layout.terms(place)
    if rule.softcap:
        capped = product(queries, keys.transpose(1, 2), rule.scale, layout.scratch.take("capped", *shape))
        layout.query_terms(place, queries, capped, rule.scale)
        layout.key_terms(place, slots, capped, rule.scale)
        torch.mul(capped.div_(rule.softcap).tanh_(), rule.softcap, out=scores)
        scores.add_(0.0 if terms is None else terms)
    else:
        product(queries, keys.transpose(1, 2), rule.scale, scores, terms)
        layout.query_terms(place, queries, scores, rule.scale)
        layout.key_terms(place, slots, scores, rule.scale)
    may_die = layout.restrict(place, scores)
    if layout.globals:
        score_globals(layout, place, queries, layout.shared(slots), scores, rule)
    dead = lse = top = None
    if may_die or want_lse:
        top = scores.amax(-1, keepdim=True)
        dead = top < DEAD
    if (replaced := layout.replaced(place)) is not None:
        dead = replaced if dead is None else dead | replaced
    torch.softmax(scores, -1, out=scores)
    if want_lse and top is not None and dead is not None:
        lse = (top - scores.amax(-1, keepdim=True).log_()).masked_fill_(dead, -math.inf)
    return scores, dead, lse


def score_globals(layout: Layout, place: Place, queries: Tensor, keys: Tensor, scores: Tensor, rule: Rule) -> None:
    """Put the scores of global keys [g d] in."""
    columns = torch.matmul(queries, keys.t()).mul_(rule.scale)
    if rule.softcap:
        layout.put_in(layout.scratch.take("capped", *scores.shape), columns.div_(rule.softcap).tanh_())
        columns.mul_(rule.softcap)
    layout.restrict_globals(place, columns)
    layout.put_in(scores, columns)


def chunk_forward(
    layout: Layout, place: Place, operands: Operands, out: Tensor, lse: Tensor | None, rule: Rule
) -> None:
    """Fill one chunk's rows of out [rows v], and of lse [rows 1] if wanted."""
    chunk = place.chunk
    queries, keys = layout.queries(chunk, operands.queries, "q"), layout.keys(chunk, operands.keys, "k")
    weights, dead, lse_tile = weigh(layout, place, queries, keys, operands.keys, rule, want_lse=lse is not None)
    if rule.dropout:
        weights.mul_(dropout_multiplier(weights.shape, rule, place.number, layout.scratch))
    tile, columns = layout.room(chunk, out, "o"), layout.take_out(weights) if layout.globals else None
    torch.bmm(weights, layout.keys(chunk, operands.values, "v"), out=tile)
    if columns is not None:
        tile.flatten(0, 1).addmm_(columns.flatten(0, 1), layout.shared(operands.values))
    layout.value_terms(place, weights, tile)
    if dead is not None:
        tile.masked_fill_(dead, 0.0)
    layout.put(chunk, tile, out)
    if lse is not None and lse_tile is not None:
        layout.put(chunk, layout.room(chunk, lse, "l").copy_(lse_tile), lse)


def chunk_backward(
    layout: Layout, place: Place, operands: Operands, d_out: Tensor, d_lse: Tensor | None, grads: Operands, rule: Rule
) -> None:
    """Fill one chunk's rows of the gradient of the queries, and add to those of the keys and values."""
    work, chunk = layout.scratch, place.chunk
    queries, keys = layout.queries(chunk, operands.queries, "q"), layout.keys(chunk, operands.keys, "k")
    values, d_o = layout.keys(chunk, operands.values, "v"), layout.queries(chunk, d_out, "do")
    weights, dead, _ = weigh(layout, place, queries, keys, operands.keys, rule, want_lse=False)
    if dead is not None:
        d_o = d_o.masked_fill(dead, 0.0)

    kept, multiplier = weights, None
    if rule.dropout:
        multiplier = dropout_multiplier(weights.shape, rule, place.number, work)
        kept = torch.mul(weights, multiplier, out=work.take("kept_weights", *weights.shape))
    d_scores = torch.bmm(d_o, values.transpose(1, 2), out=work.take("d_scores", *weights.shape))
    layout.value_terms_backward(place, kept, d_o, d_scores)
    if layout.globals:
        layout.put_in(d_scores, torch.matmul(d_o, layout.shared(operands.values).t()))
    if multiplier is not None:
        d_scores.mul_(multiplier)
    torch.ops.aten._softmax_backward_data.out(d_scores, weights, -1, weights.dtype, grad_input=d_scores)
    if d_lse is not None:
        row = layout.queries(chunk, d_lse, "dl")
        d_scores.addcmul_(weights, row if dead is None else row.masked_fill(dead, 0.0))
    layout.terms_backward(place, d_scores)
    if rule.softcap:
        d_scores.addcmul_(d_scores, work.take("capped", *weights.shape).square_(), value=-1.0)

    columns = d_columns = None
    if layout.globals:
        columns, d_columns = layout.take_out(kept).flatten(0, 1), layout.take_out(d_scores).flatten(0, 1)
        layout.shared(grads.values).addmm_(columns.t(), d_o.flatten(0, 1))
        layout.shared(grads.keys).addmm_(d_columns.t(), queries.flatten(0, 1), alpha=rule.scale)
    layout.spread(chunk, kept, d_o, grads.values)
    layout.spread(chunk, d_scores, queries, grads.keys, rule.scale)
    d_queries = product(d_scores, keys, rule.scale, layout.room(chunk, grads.queries, "dq"))
    if d_columns is not None:
        d_queries.flatten(0, 1).addmm_(d_columns, layout.shared(operands.keys), alpha=rule.scale)
    layout.query_terms_backward(place, queries, d_scores, d_queries, rule.scale)
    layout.key_terms_backward(place, operands.keys, d_scores, grads.keys, rule.scale)
    layout.put(chunk, d_queries, grads.queries)


def forward(layout: Layout, q: Tensor, k: Tensor, v: Tensor, asking: Tensor | None, rule: Rule, want_lse: bool):
    """q [b h n d], k [b k m d], v [b k m v] -> out [b h n v] and lse [b h n] ([b h 0] unless wanted)."""
    (batch, heads), groups = q.shape[:2], k.shape[1]
    out, lse = empty_result(q, v, want_lse)
    in_huge_pages(out)
    number = 0
    for sample, group in itertools.product(range(batch), range(groups)):
        asks = None if asking is None else asking[sample]
        keys, values = layout.load(sample, k[sample, group], "keys"), layout.load(sample, v[sample, group], "values")
        for head in range(group * heads // groups, (group + 1) * heads // groups):
            operands = Operands(load_rows(layout, q[sample, head], asks, "queries"), keys, values)
            rows = result_rows(layout, target := out[sample, head], "out")
            lse_target = lse[sample, head, :, None] if want_lse else None
            lse_rows = None if lse_target is None else result_rows(layout, lse_target, "lse")
            for chunk in layout.chunks(sample, head):
                chunk_forward(layout, Place(sample, head, chunk, number), operands, rows, lse_rows, rule)
                number += 1
            store_rows(rows, target)
            if lse_target is not None and lse_rows is not None:
                store_rows(lse_rows, lse_target)
    if asking is not None:
        out.masked_fill_(~asking[:, None, :, None], 0.0)
        if want_lse:
            lse.masked_fill_(~asking[:, None], -math.inf)
    return out, lse


def backward(
    layout: Layout,
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    asking: Tensor | None,
    rule: Rule,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; those of the tables stay with the layout."""
    (batch, heads), groups = q.shape[:2], k.shape[1]
    d_q, d_k, d_v = (in_huge_pages(torch.empty(x.shape, dtype=x.dtype, device=x.device)) for x in (q, k, v))
    number = 0
    for sample, group in itertools.product(range(batch), range(groups)):
        asks = None if asking is None else asking[sample]
        keys, values = layout.load(sample, k[sample, group], "keys"), layout.load(sample, v[sample, group], "values")
        target_k, target_v = d_k[sample, group], d_v[sample, group]
        d_keys, d_values = layout.gradient_room(target_k, "d_keys"), layout.gradient_room(target_v, "d_values")
        for head in range(group * heads // groups, (group + 1) * heads // groups):
            operands = Operands(load_rows(layout, q[sample, head], asks, "queries"), keys, values)
            d_rows = load_rows(layout, d_out[sample, head], asks, "d_out")
            d_lse_rows = None if d_lse is None else load_rows(layout, d_lse[sample, head, :, None], asks, "d_lse")
            grads = Operands(result_rows(layout, target := d_q[sample, head], "d_queries"), d_keys, d_values)
            for chunk in layout.chunks(sample, head):
                place = Place(sample, head, chunk, number)
                chunk_backward(layout, place, operands, d_rows, d_lse_rows, grads, rule)
                number += 1
            store_rows(grads.queries, target)
        layout.unload(sample, d_keys, target_k)
        layout.unload(sample, d_values, target_v)
    return d_q, d_k, d_v
