"""Softmax attention over the blocks of a pattern as one node of a graph.

Which blocks meet follows from the lengths, which a graph does not know while it is traced: the node is given the pattern's text,
and makes the lists when it runs. `torch.export` does not take it: what is exported holds ordinary operators only; see `_squares`.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.attention._band import as_wide
from anyformer.attention._lists import Given, Lists, back, multiples, tables
from anyformer.context import Context
from anyformer.ops import blocks, tile
from anyformer.ops.node import constant, node, refuse_second_derivative
from anyformer.pattern import Facts
from anyformer.pattern.base import Pattern
from anyformer.pattern.pairs import facts
from anyformer.pattern.read import pattern_of


@dataclass(frozen=True)
class Listed:
    """Blocks of `block` keys for each block of queries, to be found when the graph runs."""

    pattern: Pattern
    block: int


def listed(
    path: Listed, q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float, *, want_lse: bool
) -> tuple[Float[Tensor, "b h n v"], Float[Tensor, "b h lse"]]:
    """Output and log-sum-exp (`[b h 0]` unless wanted) of every query over its blocks."""
    n, m = q.shape[2], k.shape[2]
    offsets, known = context.encoding.offsets, facts(context)
    bias = None if offsets is None else as_wide(offsets(1 - m, n - 1).bias, q)
    seed = torch.randint(2**62, ()) if context.dropout else None
    tensors = (q, k, v, context.keys.keep, context.keys.documents, bias, known.lengths, seed)
    plain = (_text(path.pattern), path.block, context.layer, context.causal)
    return listed_forward(*tensors, *plain, scale, context.softcap or 0.0, context.dropout, want_lse)


@constant
def _text(pattern: Pattern) -> str:
    return repr(pattern)


@lru_cache(maxsize=64)
def _read(text: str) -> Pattern:
    return pattern_of(text)


def _path(
    q: Tensor, k: Tensor, lengths: Tensor | None, pattern: str, block: int, layer: int, causal: bool
) -> tuple[Lists, Facts]:
    """The layout for these lengths, and what the pattern knows."""
    n, m, found = q.shape[2], k.shape[2], _read(pattern)
    known = Facts(lengths=lengths, length=m, layer=layer, causal=causal)
    layout = found.blocks(n, block, m, heads=q.shape[1], causal=causal, facts=known)
    return Lists(found, layout, causal), known


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    documents: Tensor | None,
    bias: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    pattern: str,
    block: int,
    layer: int,
    causal: bool,
    scale: float,
    softcap: float,
    dropout: float,
    want_lse: bool,
) -> tuple[Tensor, Tensor]:
    """`block_attention` over the lists of a pattern, from and to the order of the tokens."""
    path, known = _path(q, k, lengths, pattern, block, layer, causal)
    given = Given(q, k, v, keep, documents, bias).ordered(path)
    out, lse = blocks.run_forward(
        given.q, given.k, given.v, *tables(path, known, q), given.keep, None, given.documents, given.bias, seed,
        block, scale, softcap, dropout, want_lse,
    )  # fmt: skip
    return back(path, out), back(path, lse) if want_lse else lse


def fake_forward(q, k, v, *arguments):
    return tile.empty_result(q, v, arguments[-1])


def run_backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    documents: Tensor | None,
    bias: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    pattern: str,
    block: int,
    layer: int,
    causal: bool,
    scale: float,
    softcap: float,
    dropout: float,
    learning: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and bias, the last empty without a bias and 0 unless `learning`."""
    path, known = _path(q, k, lengths, pattern, block, layer, causal)
    given = Given(q, k, v, keep, documents, bias).ordered(path)
    if path.layout.order is not None:
        order = path.layout.order.to(q.device)
        d_out, d_lse = d_out[:, :, order], None if d_lse is None else d_lse[:, :, order]
    *grads, d_bias = blocks.run_backward(
        d_out, d_lse, given.q, given.k, given.v, *tables(path, known, q), given.keep, None, given.documents,
        given.bias, seed, block, scale, softcap, dropout, learning,
    )  # fmt: skip
    if bias is not None and path.layout.order is not None:
        near, found = multiples(path), d_bias
        d_bias = torch.zeros_like(bias)
        first = k.shape[2] - 1 - (k.shape[2] - 1) // near.step
        d_bias[:, near] = found[:, first : first + d_bias[:, near].shape[1]]
    d_q, d_k, d_v = (back(path, grad) for grad in grads)
    return d_q, d_k, d_v, d_bias


def fake_backward(d_out, d_lse, q, k, v, keep, documents, bias, *arguments):
    return *(x.new_empty(x.shape) for x in (q, k, v)), q.new_empty(0) if bias is None else bias.new_empty(bias.shape)


def save_inputs(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:8])
    ctx.plain = inputs[8:]


def differentiate(ctx, d_out, d_lse):
    *plain, want_lse = ctx.plain
    q, _, v, _, _, bias, *_ = ctx.saved_tensors
    d_out = q.new_zeros(*q.shape[:3], v.shape[3]) if d_out is None else d_out
    d_lse, learning = d_lse if want_lse else None, ctx.needs_input_grad[5]
    *grads, d_bias = listed_backward(d_out, d_lse, *ctx.saved_tensors, *plain, learning)
    return *grads, None, None, None if bias is None else d_bias, *[None] * 10


listed_forward = node("listed_forward", run_forward, fake_forward)
listed_backward = node("listed_backward", run_backward, fake_backward)
torch.library.register_autograd("anyformer::listed_forward", differentiate, setup_context=save_inputs)
torch.library.register_autograd("anyformer::listed_backward", refuse_second_derivative)
