"""Softmax attention of each cluster's queries over its keys, and for each token the mean over the clusters that hold it.

With s the tokens that a cluster c holds and T_i the number of clusters that hold query i,

    P_c = softmax(scale Q_c K_c^T),    out_i = 1 / T_i sum over c of (P_c V_c)_i,    G_c = (dO / T)_c
    dV += P_c^T G_c,    dS_c = P_c (G_c V_c^T - rows(P_c G_c V_c^T)),    dQ += scale dS_c K_c,    dK += scale dS_c^T Q_c

A few clusters are gathered, weighed and put back at a time, so that nothing between is larger than the cache.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from anyformer.ops.node import expressed, node
from anyformer.ops.pages import in_huge_pages
from anyformer.ops.softmax import repeat_heads
from anyformer.ops.tile import Scratch, product, tiles_at_once, working_dtype


class Held(NamedTuple):
    """A few clusters: the slots of their queries [C w] and of their keys [C u]."""

    queries: Tensor
    keys: Tensor


class Groups:
    """The clusters of one head after the other."""

    def __init__(self, q: Tensor, q_slots: Tensor, k_slots: Tensor, counts: Tensor | None):
        self.work = Scratch(working_dtype(q), q.device)
        self.slots = q_slots, k_slots
        self.counts = None if counts is None else counts.tolist()
        self.at_once = tiles_at_once(2 * q_slots.shape[3] * k_slots.shape[3], torch.get_num_threads())

    def held(self, sample: int, head: int) -> Iterator[Held]:
        """Clusters few enough that their weights stay in the cache, with what counts of them."""
        queries, keys = (slots[sample, head] for slots in self.slots)
        if self.counts is not None:
            w, u = self.counts[sample]
            queries, keys = queries[:, :w], keys[:, :u]
        if not queries.shape[1] or not keys.shape[1]:
            return
        for start in range(0, len(queries), self.at_once):
            yield Held(queries[start : start + self.at_once], keys[start : start + self.at_once])

    def take(self, x: Tensor, slots: Tensor, name: str) -> Tensor:
        """The tokens [n d] in slots [C w], [C w d]."""
        room = self.work.take(name, slots.numel(), x.shape[1])
        if x.dtype == room.dtype:
            torch.index_select(x, 0, slots.flatten(), out=room)
        else:
            room.copy_(x.index_select(0, slots.flatten()))
        return room.view(*slots.shape, -1)

    def weigh(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """softmax(scale q k^T)."""
        weights = product(q, k.mT, scale, self.work.take("weights", *q.shape[:2], k.shape[1]))
        return torch.softmax(weights, -1, out=weights)

    def times(self, sample: int, head: int, n: int) -> Tensor:
        """How many clusters hold each query, at least 1, [n 1]."""
        queries = self.slots[0][sample, head]
        queries = queries if self.counts is None else queries[:, : self.counts[sample][0]]
        return queries.flatten().bincount(minlength=n).clamp_(min=1).to(self.work.dtype)[:, None]


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, q_slots: Tensor, k_slots: Tensor, counts: Tensor | None, scale: float
) -> Tensor:
    """out [b h n v] in the dtype of sums, 0 for a query that no cluster holds.

    Args:
        k, v: [b k m d] and [b k m v]; query head h reads head h // (h / k).
        q_slots, k_slots: the queries [b h c w] and keys [b h c u] that each cluster holds.
        counts: for each sample how many queries and keys of a cluster count, the first ones, [b 2]; None: all.
    """
    with torch.autocast(q.device.type, enabled=False):
        groups, of_key, of_value = Groups(q, q_slots, k_slots, counts), _share(q, k), _share(q, v)
        out = torch.empty(*q.shape[:3], v.shape[3], dtype=groups.work.dtype, device=q.device)
        in_huge_pages(out).zero_()
        for sample, head in itertools.product(range(q.shape[0]), range(q.shape[1])):
            total = out[sample, head]
            for held in groups.held(sample, head):
                queries = groups.take(q[sample, head], held.queries, "q")
                keys = groups.take(k[sample, head // of_key], held.keys, "k")
                values = groups.take(v[sample, head // of_value], held.keys, "v")
                weights = groups.weigh(queries, keys, scale)
                found = torch.bmm(weights, values, out=groups.work.take("o", *queries.shape[:2], v.shape[3]))
                total.index_add_(0, held.queries.flatten(), found.flatten(0, 1))
            total.div_(groups.times(sample, head, q.shape[2]))
        return out


def fake_forward(q, k, v, q_slots, k_slots, counts, scale):
    return v.new_empty(*q.shape[:3], v.shape[3], dtype=working_dtype(q))


def run_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_slots: Tensor,
    k_slots: Tensor,
    counts: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    with torch.autocast(q.device.type, enabled=False):
        groups, of_key, of_value = Groups(q, q_slots, k_slots, counts), _share(q, k), _share(q, v)
        work = groups.work
        d_q, d_k, d_v = (_zeros(x, work.dtype) for x in (q, k, v))
        for sample, head in itertools.product(range(q.shape[0]), range(q.shape[1])):
            owed = work.take("owed", *d_out.shape[2:])
            torch.div(d_out[sample, head], groups.times(sample, head, q.shape[2]), out=owed)
            key, value = (sample, head // of_key), (sample, head // of_value)
            for held in groups.held(sample, head):
                queries = groups.take(q[sample, head], held.queries, "q")
                keys, values = groups.take(k[key], held.keys, "k"), groups.take(v[value], held.keys, "v")
                asked = groups.take(owed, held.queries, "do")
                weights = groups.weigh(queries, keys, scale)
                spread = torch.bmm(weights.mT, asked, out=work.take("dv", *values.shape))
                d_v[value].index_add_(0, held.keys.flatten(), spread.flatten(0, 1))
                d_weights = torch.bmm(asked, values.mT, out=work.take("dw", *weights.shape))
                d_scores = _through_softmax(d_weights, weights)
                spread = product(d_scores, keys, scale, work.take("dq", *queries.shape))
                d_q[sample, head].index_add_(0, held.queries.flatten(), spread.flatten(0, 1))
                spread = product(d_scores.mT, queries, scale, work.take("dk", *keys.shape))
                d_k[key].index_add_(0, held.keys.flatten(), spread.flatten(0, 1))
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)


def fake_backward(d_out, q, k, v, *others):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def composite(
    q: Tensor, k: Tensor, v: Tensor, q_slots: Tensor, k_slots: Tensor, counts: Tensor | None, scale: float
) -> Tensor:
    """`run_forward` out of ordinary operators: to differentiate it twice."""
    b, heads, n = q.shape[:3]
    wide = working_dtype(q)
    sample = torch.arange(b, device=q.device)[:, None, None, None]
    head = torch.arange(heads, device=q.device)[:, None, None]
    queries, keys, values = (
        x.to(wide)[sample, head, slots]
        for x, slots in ((q, q_slots), (repeat_heads(k, heads), k_slots), (repeat_heads(v, heads), k_slots))
    )
    logits = queries @ keys.mT * scale
    real = logits.new_ones(q_slots.shape)
    if counts is not None:
        rank = torch.arange(k_slots.shape[3], device=q.device)
        logits = logits.masked_fill(rank >= counts[:, 1, None, None, None, None].clamp(min=1), -torch.inf)
        rank = torch.arange(q_slots.shape[3], device=q.device)
        real = (rank < torch.where(counts[:, 1] > 0, counts[:, 0], 0)[:, None, None, None]).expand_as(q_slots).to(wide)
    found = torch.softmax(logits, -1) @ values * real[..., None]
    rows = (q_slots + n * torch.arange(b * heads, device=q.device).view(b, heads, 1, 1)).flatten()
    total = found.new_zeros(b * heads * n, v.shape[3]).index_add(0, rows, found.flatten(0, 3))
    times = real.new_zeros(b * heads * n).index_add(0, rows, real.flatten())
    return (total / times.clamp(min=1.0)[:, None]).view(b, heads, n, -1)


def _share(q: Tensor, x: Tensor) -> int:
    """How many query heads read each head of x."""
    return q.shape[1] // x.shape[1]


def _zeros(x: Tensor, dtype: torch.dtype) -> Tensor:
    return in_huge_pages(torch.empty(x.shape, dtype=dtype, device=x.device)).zero_()


def _through_softmax(d_weights: Tensor, weights: Tensor) -> Tensor:
    """The gradient of what a softmax was taken of, in the place of that of the weights."""
    softmax_backward = torch.ops.aten._softmax_backward_data.out
    return softmax_backward(d_weights, weights, -1, weights.dtype, grad_input=d_weights)


def _save(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, d_out):
    q, k, v, q_slots, k_slots, counts = ctx.saved_tensors
    nothing = [None] * 4
    if not torch.is_grad_enabled():
        return (*groups_backward(d_out, q, k, v, q_slots, k_slots, counts, ctx.scale), *nothing)
    return (*expressed([composite(q, k, v, q_slots, k_slots, counts, ctx.scale)], [d_out], (q, k, v)), *nothing)


groups_forward = node("bucket_groups_forward", run_forward, fake_forward)
groups_backward = node("bucket_groups_backward", run_backward, fake_backward)
torch.library.register_autograd("anyformer::bucket_groups_forward", _differentiate, setup_context=_save)
