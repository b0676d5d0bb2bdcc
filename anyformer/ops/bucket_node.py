"""The passes of `bucket_pass` and `bucket_pairs` as one node of a graph, with its gradient."""

import torch
from torch import Tensor

from anyformer.ops import bucket_pairs, bucket_pass
from anyformer.ops.node import expressed, node
from anyformer.ops.softmax import dense
from anyformer.ops.tile import working_dtype


def pairs_are_fewer(order: Tensor, causal: bool, size: int) -> bool:
    """Whether a row has no more keys than the windows of all rounds [b h rounds n] together."""
    rounds, n = order.shape[2:]
    return n <= rounds * size * (3 if causal else 4)


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, order: Tensor, chunk: Tensor, causal: bool, scale: float, size: int
) -> tuple[Tensor, Tensor]:
    """`bucket_pass.forward`, or the same over all pairs."""
    with torch.autocast(q.device.type, enabled=False):
        if pairs_are_fewer(order, causal, size):
            return bucket_pairs.forward(q, k, v, chunk, causal, scale)
        return bucket_pass.forward(q, k, v, order, chunk, causal, scale, size)


def fake_forward(q, k, v, order, chunk, causal, scale, size):
    dtype = working_dtype(q)
    return v.new_empty(*q.shape[:3], v.shape[3], dtype=dtype), q.new_empty(q.shape[:3], dtype=dtype)


def run_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: Tensor,
    chunk: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`bucket_pass.backward`, or the same over all pairs."""
    with torch.autocast(q.device.type, enabled=False):
        if pairs_are_fewer(order, causal, size):
            return bucket_pairs.backward(d_out, q, k, v, chunk, out, lse, causal, scale)
        return bucket_pass.backward(d_out, q, k, v, order, chunk, out, lse, causal, scale, size)


def fake_backward(d_out, q, k, v, *others):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def pass_composite(q: Tensor, k: Tensor, v: Tensor, chunk: Tensor, causal: bool, scale: float) -> Tensor:
    """out [b h n v] of `bucket_pass` over all pairs, out of ordinary operators: to differentiate it twice."""
    slots = torch.arange(q.shape[2], device=q.device)
    ahead = chunk[..., :, None] - torch.where(chunk < 0, torch.iinfo(torch.int32).max // 2, chunk)[..., None, :]
    other = slots < slots[:, None] if causal else slots != slots[:, None]
    allowed = ((ahead == 0) | (ahead == 1)).any(dim=2) & other
    alone = ~allowed.any(dim=-1, keepdim=True) & (chunk[:, :, 0, :, None] >= 0)
    allowed = allowed | (alone & (slots == slots[:, None]))
    return dense(q, k, v, allowed=allowed, scale=scale)[0].to(working_dtype(q))


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.mark_non_differentiable(output[1])
    ctx.rule = inputs[5:]


def _differentiate(ctx, d_out, d_lse):
    q, k, v, order, chunk, out, lse = ctx.saved_tensors
    nothing = [None] * 5
    if not torch.is_grad_enabled():
        return (*bucket_backward(d_out, q, k, v, order, chunk, out, lse, *ctx.rule), *nothing)
    causal, scale, _ = ctx.rule
    return (*expressed([pass_composite(q, k, v, chunk, causal, scale)], [d_out], (q, k, v)), *nothing)


bucket_forward = node("bucket_forward", run_forward, fake_forward)
bucket_backward = node("bucket_backward", run_backward, fake_backward)
torch.library.register_autograd("anyformer::bucket_forward", _differentiate, setup_context=_save)
