"""Queries as their own keys, all of one length: k_i = sqrt(d) q_i / |q_i|, a few rows at a time.

With u = q / |q|,   dq = sqrt(d) / |q| (dk - (u . dk) u).
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.ops.node import expressed, node
from anyformer.ops.pages import in_huge_pages
from anyformer.ops.tile import Scratch, tiles_at_once, working_dtype

_SHORTEST = 1e-12  # length of a query from which on it can be told from 0


def as_keys(q: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n d"]:
    """Queries as their own keys: all of length sqrt(d), or the longest of them would be read by all."""
    if q.device.type == "cpu" and not torch.compiler.is_exporting():
        return keys_forward(q)
    return composite(q)


def composite(q: Tensor) -> Tensor:
    """`as_keys` out of ordinary operators."""
    length = torch.linalg.vector_norm(q, dim=-1, keepdim=True).clamp(min=_SHORTEST)
    return q * (q.shape[-1] ** 0.5 / length)  # a division of all channels has a slower gradient


def run_forward(q: Tensor) -> Tensor:
    """The keys [b h n d]."""
    keys = in_huge_pages(torch.empty(q.shape, dtype=q.dtype, device=q.device))
    for rows, room in _pieces(q, keys):
        torch.mul(rows, _factor(_length(rows), rows.shape[1]), out=room)
    return keys


def fake_forward(q: Tensor) -> Tensor:
    return q.new_empty(q.shape)


def run_backward(d_keys: Tensor, q: Tensor) -> Tensor:
    """The gradient of q."""
    d_q = in_huge_pages(torch.empty(q.shape, dtype=q.dtype, device=q.device))
    work = Scratch(working_dtype(q), q.device)
    for rows, asked, room in _pieces(q, d_keys, d_q):
        length = _length(rows)
        along = torch.linalg.vecdot(rows.to(work.dtype), asked.to(work.dtype)).unsqueeze(-1)
        along.div_(length.clamp(min=_SHORTEST).square_()).masked_fill_(length < _SHORTEST, 0.0)
        across = torch.mul(rows, along, out=work.take("across", *rows.shape))
        torch.sub(asked, across, out=across).mul_(_factor(length, rows.shape[1]))
        room.copy_(across)
    return d_q


def fake_backward(d_keys: Tensor, q: Tensor) -> Tensor:
    return q.new_empty(q.shape)


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows [r d] of each [b h n d], few enough to stay in the cache."""
    b, heads, n, width = tensors[0].shape
    at_once = tiles_at_once(3 * width, torch.get_num_threads())
    for sample in range(b):
        for head in range(heads):
            for start in range(0, n, at_once):
                yield tuple(x[sample, head, start : start + at_once] for x in tensors)


def _length(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=working_dtype(rows))


def _factor(length: Tensor, width: int) -> Tensor:
    return width**0.5 / length.clamp(min=_SHORTEST)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, d_keys):
    (q,) = ctx.saved_tensors
    if not torch.is_grad_enabled():
        return keys_backward(d_keys, q)
    return expressed([composite(q)], [d_keys], [q])[0]


keys_forward = node("bucket_keys_forward", run_forward, fake_forward)
keys_backward = node("bucket_keys_backward", run_backward, fake_backward)
torch.library.register_autograd("anyformer::bucket_keys_forward", _differentiate, setup_context=_save)
