"""Softmax attention of each block of queries over a mixture of blocks of keys and its own block.

With W the weights of the mixtures, K_i and V_i the keys and values of block i, G the gradient of the output,

    K'_i = sum_j W_ij K_j,   V'_i = sum_j W_ij V_j,   P_i = softmax(scale Q_i [K'_i K_i]^T),   out_i = P_i [V'_i V_i]
    [dV'_i dV_i] = P_i^T G_i,   dS_i = P_i (G_i [V'_i V_i]^T - rows),   dQ_i = scale dS_i [K'_i K_i],
    [dK'_i dK_i] = scale dS_i^T Q_i,   dW = dK' K^T + dV' V^T,   dK += W^T dK',   dV += W^T dV'

When causal W is strictly lower triangular, half of its products are left out, and block 0 reads itself only. The mixtures are kept
for the backward; scores and weights never leave the processor's cache.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from anyformer.ops.node import expressed, node
from anyformer.ops.pages import in_huge_pages
from anyformer.ops.softmax import dense
from anyformer.ops.tile import SHUT, Scratch, product, tiles_at_once, working_dtype

_ROWS = 64  # of a triangle at once: fewer are slow, more multiply by zeros


class Blocks:
    """The blocks of one key head after the other, a few at a time."""

    def __init__(self, q: Tensor, k: Tensor, causal: bool, scale: float):
        self.groups, self.count, self.size = q.shape[1] // k.shape[1], q.shape[2], q.shape[3]
        self.causal, self.scale = causal, scale
        self.work = Scratch(working_dtype(q), q.device)
        self.at_once = tiles_at_once(4 * self.groups * self.size**2, torch.get_num_threads())
        self.shut = torch.zeros(self.groups * self.size, 2 * self.size, dtype=self.work.dtype, device=q.device)
        if causal:
            places = torch.arange(self.size, device=q.device)
            self.shut.view(self.groups, self.size, -1)[..., self.size :].masked_fill_(places > places[:, None], SHUT)

    def parts(self) -> Iterator[slice]:
        """Blocks few enough that their weights stay in the cache."""
        for start in range(0, self.count, self.at_once):
            yield slice(start, min(start + self.at_once, self.count))

    def triangles(self) -> Iterator[slice]:
        """Rows of the weights of mixtures that are multiplied at once."""
        rows = _ROWS if self.causal else self.count
        for start in range(0, self.count, rows):
            yield slice(start, min(start + rows, self.count))

    def mix(self, weights: Tensor, x: Tensor, out: Tensor) -> None:
        """out = W x for blocks as rows [g e]."""
        for rows in self.triangles():
            read = slice(rows.stop) if self.causal else slice(None)
            torch.mm(weights[rows, read], x[read], out=out[rows])

    def mix_backward(self, weights: Tensor, x: Tensor, d_mixed: Tensor, d_weights: Tensor, d_x: Tensor) -> None:
        """Add the gradients of `mix` to those of W and x."""
        for rows in self.triangles():
            read, later = (slice(rows.stop), slice(rows.start, None)) if self.causal else (slice(None), slice(None))
            d_weights[rows, read].addmm_(d_mixed[rows], x[read].mT)
            d_x[rows].addmm_(weights[later, rows].mT, d_mixed[later])

    def queries(self, x: Tensor, name: str, scale: float = 1.0) -> Tensor:
        """Queries that read a key head [groups C s w] as rows of its blocks, [C groups * s w]."""
        room = self.work.take(name, x.shape[1], self.groups, *x.shape[2:])
        torch.mul(x.transpose(0, 1), scale, out=room)
        return room.view(len(room), -1, x.shape[3])

    def pair(self, mixed: Tensor, own: Tensor, name: str) -> Tensor:
        """What a few blocks read [C 2s w]."""
        room = self.work.take(name, len(own), 2 * self.size, own.shape[2])
        room[:, : self.size], room[:, self.size :] = mixed, own
        return room

    def weigh(self, queries: Tensor, keys: Tensor, first: bool) -> Tensor:
        """The weights of scaled queries [C groups * s w] and keys [C 2s w].

        Args:
            first: whether the first of these blocks is that of the row.
        """
        weights = self.work.take("weights", *queries.shape[:2], keys.shape[1])
        torch.baddbmm(self.shut[None], queries, keys.mT, out=weights)
        if first and self.causal:
            weights[0, :, : self.size] = SHUT
        return torch.softmax(weights, -1, out=weights)


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """out [b h g s v] and the mixtures [b k g s d] and [b k g s v], all in the dtype of sums.

    Args:
        q, k, v: [b h g s d], [b k g s d] and [b k g s v] in g blocks of s; query head h reads key head h // (h / k).
        weights: of the mixtures, [b k g g].
    """
    with torch.autocast(q.device.type, enabled=False):
        made = Blocks(q, k, causal, scale)
        dtype, groups = made.work.dtype, made.groups
        out = in_huge_pages(torch.empty(*q.shape[:4], v.shape[4], dtype=dtype, device=q.device))
        mixed_k, mixed_v = (in_huge_pages(torch.empty(x.shape, dtype=dtype, device=x.device)) for x in (k, v))
        for at in itertools.product(range(k.shape[0]), range(k.shape[1])):
            own_k, own_v, mixing = k[at].to(dtype), v[at].to(dtype), weights[at].to(dtype)
            for own, mixed in ((own_k, mixed_k), (own_v, mixed_v)):
                made.mix(mixing, own.flatten(1), mixed[at].flatten(1))
            heads = slice(at[1] * groups, (at[1] + 1) * groups)
            for part in made.parts():
                queries = made.queries(q[at[0], heads, part], "q", scale)
                keys = made.pair(mixed_k[at][part], own_k[part], "k")
                values = made.pair(mixed_v[at][part], own_v[part], "v")
                found = made.work.take("o", *queries.shape[:2], v.shape[4])
                torch.bmm(made.weigh(queries, keys, part.start == 0), values, out=found)
                out[at[0], heads, part] = found.unflatten(1, (groups, -1)).transpose(0, 1)
        return out, mixed_k, mixed_v


def fake_forward(q, k, v, weights, causal, scale):
    dtype = working_dtype(q)
    return (
        v.new_empty(*q.shape[:4], v.shape[4], dtype=dtype),
        k.new_empty(k.shape, dtype=dtype),
        v.new_empty(v.shape, dtype=dtype),
    )


def run_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    mixed_k: Tensor,
    mixed_v: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and the weights."""
    with torch.autocast(q.device.type, enabled=False):
        made = Blocks(q, k, causal, scale)
        work, groups = made.work, made.groups
        dtype = work.dtype
        d_q, d_k, d_v = (in_huge_pages(torch.empty(x.shape, dtype=dtype, device=x.device)) for x in (q, k, v))
        d_weights = torch.zeros(weights.shape, dtype=dtype, device=q.device)
        for at in itertools.product(range(k.shape[0]), range(k.shape[1])):
            own_k, own_v, mixing = k[at].to(dtype), v[at].to(dtype), weights[at].to(dtype)
            heads = slice(at[1] * groups, (at[1] + 1) * groups)
            d_mixed_k, d_mixed_v = work.take("dmk", *own_k.shape), work.take("dmv", *own_v.shape)
            for part in made.parts():
                queries = made.queries(q[at[0], heads, part], "q", scale)
                keys = made.pair(mixed_k[at][part], own_k[part], "k")
                values = made.pair(mixed_v[at][part], own_v[part], "v")
                asked = made.queries(d_out[at[0], heads, part], "do")
                chosen = made.weigh(queries, keys, part.start == 0)
                _parted(torch.bmm(chosen.mT, asked, out=work.take("dv", *values.shape)), d_mixed_v[part], d_v[at][part])
                d_scores = torch.bmm(asked, values.mT, out=work.take("ds", *chosen.shape))
                softmax_backward = torch.ops.aten._softmax_backward_data.out
                softmax_backward(d_scores, chosen, -1, dtype, grad_input=d_scores)
                found = product(d_scores, keys, scale, work.take("dq", *queries.shape))
                d_q[at[0], heads, part] = found.unflatten(1, (groups, -1)).transpose(0, 1)
                _parted(
                    torch.bmm(d_scores.mT, queries, out=work.take("dk", *keys.shape)), d_mixed_k[part], d_k[at][part]
                )
            for own, d_mixed, d_own in ((own_k, d_mixed_k, d_k), (own_v, d_mixed_v, d_v)):
                made.mix_backward(mixing, own.flatten(1), d_mixed.flatten(1), d_weights[at], d_own[at].flatten(1))
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), d_weights.to(weights.dtype)


def fake_backward(d_out, q, k, v, weights, *others):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), weights.new_empty(weights.shape)


def composite(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, causal: bool, scale: float) -> Tensor:
    """out of `run_forward` out of ordinary operators: to differentiate it twice."""
    b, _, count, size = q.shape[:4]
    wide = working_dtype(q)
    if causal:
        weights = weights.tril(-1)

    def by_block(x: Tensor) -> Tensor:  # [b h g s w] -> [b * g, h, s, w]
        return x.transpose(1, 2).flatten(0, 1)

    both = (torch.cat([(weights.to(wide) @ x.to(wide).flatten(3)).view(x.shape), x.to(wide)], dim=3) for x in (k, v))
    allowed = torch.ones(count, size, 2 * size, dtype=torch.bool, device=q.device)
    if causal:
        allowed[..., size:].tril_()
        allowed[0, :, :size] = False
    allowed = allowed.repeat(b, 1, 1)[:, None]
    out = dense(by_block(q.to(wide)), *(by_block(x) for x in both), allowed=allowed, scale=scale)[0]
    return out.unflatten(0, (b, count)).transpose(1, 2)


def _parted(pair: Tensor, mixed: Tensor, own: Tensor) -> None:
    size = own.shape[1]
    mixed.copy_(pair[:, :size])
    own.copy_(pair[:, size:])


def _save(ctx, inputs, output):
    *tensors, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx, d_out, *nothing):
    q, k, v, weights, mixed_k, mixed_v = ctx.saved_tensors
    rule = ctx.causal, ctx.scale
    if not torch.is_grad_enabled():
        return (*sorted_backward(d_out, q, k, v, weights, mixed_k, mixed_v, *rule), None, None)
    return (*expressed([composite(q, k, v, weights, *rule)], [d_out], (q, k, v, weights)), None, None)


sorted_forward = node("bucket_sorted_forward", run_forward, fake_forward)
sorted_backward = node("bucket_sorted_backward", run_backward, fake_backward)
torch.library.register_autograd("anyformer::bucket_sorted_forward", _differentiate, setup_context=_save)
