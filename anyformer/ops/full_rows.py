"""Rows that meet every key, beside a tiled layout: written into its result, their gradients added to its gradients in place."""

from typing import NamedTuple

import torch
from torch import Tensor

from anyformer.ops.tile import (
    DEAD,
    SHUT,
    Rule,
    Scratch,
    document_numbers,
    document_rows,
    dropout_multiplier,
    product,
    working_dtype,
)


class FullRows(NamedTuple):
    """Indices [b g] of rows, -1 for none, a bias [b|1 h|1 g m] of their scores, and what hides keys and rows."""

    rows: Tensor
    bias: Tensor | None
    keep: Tensor | None
    asking: Tensor | None
    documents: Tensor | None


class _Weighed(NamedTuple):
    """The rows of one sample; those of the heads that share keys follow each other: [k r d], k heads of keys, r = h / k * g."""

    entries: Tensor
    rows: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    scores: Tensor
    capped: Tensor | None
    dead: Tensor | None
    weights: Tensor
    multiplier: Tensor | None


def forward(full: FullRows, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, rule: Rule) -> None:
    """Write these rows of out [b h n v], and of lse [b h n] if wanted, over."""
    heads = q.shape[1]
    for sample in range(q.shape[0]):
        x = _weigh(full, sample, q, k, v, rule)
        weights = x.weights if x.multiplier is None else x.weights * x.multiplier
        found, sums = torch.bmm(weights, x.values), torch.logsumexp(x.scores, -1) if lse is not None else None
        if x.dead is not None:
            found.masked_fill_(x.dead, 0.0)
        out[sample].index_copy_(1, x.rows, found.view(heads, -1, v.shape[3]).to(out.dtype))
        if lse is not None and sums is not None:
            sums = sums if x.dead is None else sums.masked_fill_(x.dead[..., 0], -torch.inf)
            lse[sample].index_copy_(1, x.rows, sums.view(heads, -1))


def backward(
    full: FullRows,
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    rule: Rule,
    *,
    learning: bool,
) -> Tensor | None:
    """Add to the gradients of k and v, write these rows of that of q over; the gradient of the bias where there is one to learn."""
    d_q, d_k, d_v = grads
    heads, bias = q.shape[1], full.bias
    d_bias = bias.new_zeros(bias.shape, dtype=working_dtype(q)) if bias is not None and learning else None
    for sample in range(q.shape[0]):
        x = _weigh(full, sample, q, k, v, rule)
        d_o = _by_keys(d_out[sample, :, x.rows], x)
        d_o = d_o if x.dead is None else d_o.masked_fill(x.dead, 0.0)
        d_scores = torch.bmm(d_o, x.values.transpose(1, 2))
        kept = x.weights if x.multiplier is None else x.weights * x.multiplier
        d_scores = d_scores if x.multiplier is None else d_scores.mul_(x.multiplier)
        d_scores = torch.ops.aten._softmax_backward_data(d_scores, x.weights, -1, x.weights.dtype)
        if d_lse is not None:
            row = _by_keys(d_lse[sample, :, x.rows, None], x)
            d_scores.addcmul_(x.weights, row if x.dead is None else row.masked_fill(x.dead, 0.0))
        if d_bias is not None:
            sums = d_scores.view(heads, -1, k.shape[2])
            target = d_bias[sample if len(d_bias) > 1 else 0]
            target.index_add_(1, x.entries, sums.sum(0, keepdim=True) if len(target) == 1 else sums)
        if x.capped is not None:
            d_scores.addcmul_(d_scores, x.capped.square_(), value=-1.0)
        _add(d_v[sample], kept, d_o, 1.0)
        _add(d_k[sample], d_scores, x.queries, rule.scale)
        d_queries = product(d_scores, x.keys, rule.scale, torch.empty_like(x.queries))
        d_q[sample].index_copy_(1, x.rows, d_queries.view(heads, -1, q.shape[3]).to(d_q.dtype))
    return d_bias


def _weigh(full: FullRows, sample: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> _Weighed:
    wide, heads, (n, m) = working_dtype(q), q.shape[1], (q.shape[2], k.shape[2])
    chosen = full.rows[sample] >= 0
    if full.asking is not None:
        chosen = chosen & full.asking[sample, full.rows[sample].clamp(min=0)]
    entries = chosen.nonzero()[:, 0]
    rows = full.rows[sample, entries]
    queries = q[sample, :, rows].to(wide).reshape(k.shape[1], -1, q.shape[3])
    keys, values = k[sample].to(wide), v[sample].to(wide)
    shut = None
    if full.keep is not None:
        hidden = ~full.keep[sample]
        keys, values = (x.masked_fill(hidden[:, None], 0.0) for x in (keys, values))
        shut = hidden.expand(len(rows), -1)
    if full.documents is not None:
        numbers = document_numbers(full.documents[sample : sample + 1])
        of_rows = document_rows(numbers, n, numbers.new_empty(1, n, 1, dtype=wide))[0, rows]
        apart = of_rows != numbers
        shut = apart if shut is None else shut | apart
    scores = product(queries, keys.transpose(1, 2), rule.scale, queries.new_empty(*queries.shape[:2], m))
    capped = None
    if rule.softcap:
        capped = scores.div_(rule.softcap).tanh_()
        scores = capped * rule.softcap
    by_head = scores.view(heads, -1, m)
    if full.bias is not None:
        by_head.add_(full.bias[sample if len(full.bias) > 1 else 0][:, entries].clamp(min=SHUT))
    if shut is not None:
        by_head.masked_fill_(shut, SHUT)
    may_die = shut is not None or full.bias is not None
    dead = scores.amax(-1, keepdim=True) < DEAD if may_die else None
    weights, scratch = torch.softmax(scores, -1), Scratch(wide, q.device)
    # the chunks of the layout count from 0 on
    multiplier = dropout_multiplier(weights.shape, rule, -1 - sample, scratch) if rule.dropout else None
    return _Weighed(entries, rows, queries, keys, values, scores, capped, dead, weights, multiplier)


def _by_keys(x: Tensor, like: _Weighed) -> Tensor:
    """[h g d] -> [k r d]."""
    return x.to(like.weights.dtype).reshape(*like.queries.shape[:2], x.shape[-1])


def _add(target: Tensor, weights: Tensor, rows: Tensor, scale: float) -> None:
    """Add scale * weights^T rows, [k r m] and [k r d], to [k m d]."""
    columns = weights.transpose(1, 2)
    if target.dtype == rows.dtype:
        target.baddbmm_(columns, rows, alpha=scale)
    else:
        target.add_(torch.bmm(columns, rows).mul_(scale))
