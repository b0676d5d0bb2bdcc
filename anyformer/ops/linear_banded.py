"""Linear attention with terms of the offset that are alike beyond a clip: a band of exact pairs, and running sums on either side.

Beyond the clip the factor exp(t_ij) of a pair falls apart into one of the query and one of the key, so that what lies there is
summed once for all queries, as without positions. Time O(n (clip + f v)), memory O(n) forward and backward.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from anyformer.ops.recomputed import recomputed

PAIRS = 1 << 22
"""Pairs of the band that are in memory at once."""


class Terms(NamedTuple):
    """t_ij = scale ((asked_i + shift) . keys[r] + told_j . (shift + queries[r])) + bias[r], rows r for offsets -left to right.

    Args:
        asked, told: what the tables meet of queries and keys, [b h n d].
        keys, queries: tables [h r d].  shift: [h d].  bias: [h r].
        values: [h r v], added to the values: sum_j w_ij (v_j + values[r]).
        fade: [h], at most 0: fade |j - i| more on t_ij.
    """

    scale: float
    asked: Tensor
    told: Tensor
    keys: Tensor | None = None
    queries: Tensor | None = None
    shift: Tensor | None = None
    bias: Tensor | None = None
    values: Tensor | None = None
    fade: Tensor | None = None


def banded_sums(
    q: Float[Tensor, "b h n f"],
    k: Float[Tensor, "b h n f"],
    v: Float[Tensor, "b h n v"],
    terms: Terms,
    *,
    left: int,
    right: int,
    causal: bool,
    block: int | None = None,
) -> tuple[Float[Tensor, "b h n v"], Float[Tensor, "b h n"]]:
    """sum_j w_ij (v_j + values[r]) and sum_j w_ij for w_ij = (q_i . k_j) exp(t_ij), with the row r of clip(j - i, -left, right).

    Keys that do not count are 0.

    Args:
        left, right: the clip in tokens, before and after the query.
        causal: whether j <= i only.
        block: queries that share a window; None: as suits the clip. Changes speed and rounding only.
    """
    n = q.shape[2]
    terms, left, right = _cut(terms, left, right, n, causal)
    if terms.shift is not None:
        terms = terms._replace(asked=terms.asked + terms.shift.to(terms.asked.dtype)[:, None])
    size = max(32, min(512, (left + right) // 2)) if block is None else block
    count = -(-n // size)
    v = torch.cat([v, v.new_ones(*v.shape[:3], 1)], dim=-1)

    def padded(x: Tensor, before: int, after: int) -> Tensor:
        return F.pad(x, (0, 0, before, count * size - n + after))

    queries, asked = (padded(x, 0, 0).unflatten(2, (count, size)) for x in (q, terms.asked))
    window = size + left + right
    keys, values, told = (padded(x, left, right) for x in (k, v, terms.told))
    together, parts = max(1, PAIRS // max(q.shape[0] * q.shape[1] * size * window, 1)), []
    for first in range(0, count, together):
        last = min(first + together, count)
        seen = slice(first * size, (last - 1) * size + window)
        windows = (x[:, :, seen].unfold(2, window, size).mT for x in (keys, values, told))  # [b h t window w]
        here = terms._replace(asked=asked[:, :, first:last])
        parts.append(recomputed(_band, queries[:, :, first:last], *windows, here, left, right, causal))
    out = torch.cat(parts, dim=2) if parts else q.new_zeros(*q.shape[:2], 0, size, v.shape[3])
    out = out + _beyond(queries, k, v, terms, asked, left, size, before=True)
    if not causal:
        out = out + _beyond(queries, k, v, terms, asked, right, size, before=False)
    out = out.flatten(2, 3)[:, :, :n]
    return out[..., :-1], out[..., -1]


def _cut(terms: Terms, left: int, right: int, n: int, causal: bool) -> tuple[Terms, int, int]:
    """The tables without the offsets that do not occur."""
    most = max(n - 1, 0)
    new_left, new_right = min(left, most), 0 if causal else min(right, most)
    rows = slice(left - new_left, left + new_right + 1)
    tables = {name: getattr(terms, name) for name in ("keys", "queries", "bias", "values")}
    tables = {name: None if table is None else table[:, rows] for name, table in tables.items()}
    return terms._replace(**tables), new_left, new_right


def _band(q: Tensor, k: Tensor, v: Tensor, told: Tensor, terms: Terms, left: int, right: int, causal: bool) -> Tensor:
    """Sums of blocks of queries [b h t size w] over their windows [b h t window w], whose first key stands `left` before them."""
    size, window = q.shape[3], k.shape[3]
    index = torch.arange(window, device=q.device)[None, :] - torch.arange(size, device=q.device)[:, None]
    rows = index.clamp(0, left + right)  # [size window]
    logits = q.new_zeros(1, 1, 1, 1, 1)
    if terms.keys is not None:
        logits = logits + _products(terms.asked, terms.keys, rows)
    if terms.queries is not None:
        logits = logits + _products(told, terms.queries, rows.T).mT
    if terms.shift is not None:
        logits = logits + (told.to(logits.dtype) @ terms.shift.to(logits.dtype)[:, None, :, None]).mT
    logits = terms.scale * logits
    if terms.bias is not None:
        logits = logits + terms.bias[:, rows][:, None]
    if terms.fade is not None:
        logits = logits + terms.fade[:, None, None, None] * (index - left).abs()
    if causal:
        logits = logits.masked_fill(index > left, -torch.inf)
    weights = (q @ k.mT) * logits.exp().to(q.dtype)
    out = weights @ v
    if terms.values is None:
        return out
    sums = weights.new_zeros(*weights.shape[:4], terms.values.shape[1])
    sums = sums.scatter_add(-1, rows.expand_as(weights), weights) @ terms.values.to(weights.dtype)[:, None]
    return out + F.pad(sums, (0, 1))


def _products(x: Tensor, table: Tensor, rows: Tensor) -> Tensor:
    """x_i . table[rows_ij] for x [b h t i d] and rows [i j]."""
    wide = torch.promote_types(torch.float32, x.dtype)
    by_row = x.to(wide) @ table.to(wide).mT[:, None]
    return by_row.gather(-1, rows.expand(*x.shape[:3], *rows.shape))


def _beyond(
    queries: Tensor, k: Tensor, v: Tensor, terms: Terms, asked: Tensor, clip: int, size: int, *, before: bool
) -> Tensor:
    """Sums over the keys before (or after) the windows of all blocks [b h t size v]."""
    count, row = queries.shape[2], 0 if before else -1
    q, k = _placed(queries, k, terms, asked, row)
    pad = (clip, count * size - k.shape[2] - clip) if before else (-clip, count * size - k.shape[2] + clip)
    k, v = (F.pad(x, (0, 0, *pad)).unflatten(2, (count, size)) for x in (k, v))
    steps = torch.arange(size, device=q.device)
    carry = None
    if terms.fade is not None:
        to_query, to_key = (steps, size - steps) if before else (size - steps, steps)
        fade = terms.fade[:, None, None, None]
        q = q * (fade * (to_query + clip)[:, None]).exp().to(q.dtype)
        k = k * (fade * to_key[:, None]).exp().to(k.dtype)
        carry = (terms.fade * size).exp().to(k.dtype)[:, None, None]
    out = q @ _running(k.mT @ v, carry, before)
    if terms.values is None:
        return out
    return out + F.pad(out[..., -1:] * terms.values[:, row].to(out.dtype)[:, None, None], (0, 1))


def _placed(queries: Tensor, k: Tensor, terms: Terms, asked: Tensor, row: int) -> tuple[Tensor, Tensor]:
    """Queries and keys times their own factor of exp(t_ij) in the last row of the tables, the same for all pairs beyond it."""
    of_query, of_key = asked.new_zeros(1, 1, 1, 1, 1), k.new_zeros(1, 1, 1, 1)
    if terms.keys is not None:
        of_query = of_query + terms.scale * (asked.to(k.dtype) @ terms.keys[:, row].to(k.dtype)[:, None, :, None])
    if terms.bias is not None:
        of_query = of_query + terms.bias[:, row, None, None, None]
    for table in (terms.shift, None if terms.queries is None else terms.queries[:, row]):
        if table is not None:
            of_key = of_key + terms.scale * (terms.told.to(k.dtype) @ table.to(k.dtype)[:, :, None])
    return queries * of_query.exp().to(queries.dtype), k * of_key.exp().to(k.dtype)


def _running(steps: Tensor, carry: Tensor | None, before: bool) -> Tensor:
    """Sums of the blocks before (or after) each, [b h t f v]."""
    if not before:
        return _running(steps.flip(2), carry, True).flip(2)
    if carry is None or not steps.shape[2]:
        return F.pad(steps[:, :, :-1], (0, 0, 0, 0, 1, 0)).cumsum(2)
    sums = [torch.zeros_like(steps[:, :, 0])]
    for step in steps[:, :, :-1].unbind(2):
        sums.append(sums[-1] * carry + step)
    return torch.stack(sums, dim=2)
