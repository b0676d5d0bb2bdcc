"""Softmax attention on arbitrary lists of key blocks: O(n + blocks kept) memory, forward and backward."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.ops import tile, tile_passes
from anyformer.ops.block_cut import Lists
from anyformer.ops.block_tiles import BlockTiles
from anyformer.ops.node import node, refuse_second_derivative


def block_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b k m d"],
    v: Float[Tensor, "b k m v"],
    *,
    block: int,
    offsets: Int[Tensor, "lists rowblocks"],
    keys: Int[Tensor, " entries"],
    partial: Int[Tensor, " entries"] | None = None,
    masks: Bool[Tensor, "masks block block"] | None = None,
    keep: Bool[Tensor, "b m"] | None = None,
    asking: Bool[Tensor, "b n"] | None = None,
    documents: Int[Tensor, "b m"] | None = None,
    bias: Float[Tensor, "h offsets"] | None = None,
    scale: float,
    softcap: float | None = None,
    dropout: float = 0.0,
    want_lse: bool = True,
) -> tuple[Float[Tensor, "b h n v"], Float[Tensor, "b h lse"]]:
    """Softmax attention of each block of queries to the key blocks listed for it.

    Queries t * block to (t + 1) * block - 1 read the key blocks keys[offsets[l, t] : offsets[l, t + 1]]; in each of
    them every pair meets, or those that the entry's mask allows:

        s_ij = softcap(scale * q_i . k_j) + bias[j - p],   p = i + m - n
        w_ij = exp(s_ij) / sum_j' exp(s_ij');    out_i = sum_j w_ij v_j

    Query head i reads key head i // (h / k). Scores, weights and sums are kept in the wider of float32 and q's dtype. A
    query without any key gives 0, a gradient of 0 and a log-sum-exp of -inf.

    Args:
        block: queries in a block and keys in a block; the last blocks may be short.
        offsets: [1 or h or b * h, ceil(n / block) + 1]: where in `keys` the list of each block of queries begins and
            ends, for all heads, for each head, or for each head of each sample.
        keys: numbers of key blocks, distinct in a list.
        partial: for each entry of `keys` the number of its mask, -1 where every pair meets.
        masks: True where query and key of a block pair may meet.
        keep: True for keys that may be read. What the others hold, even NaN, moves nothing.
        asking: True for queries that ask; the others give 0.
        documents: a number for each key; queries (the last n of them) meet only keys of their own.
        bias: added to the scores by offset j - p, from -(m - 1) to n - 1 (-inf shuts an offset); learnable.
        scale: factor of q . k before everything else.
        softcap: c * tanh(s / c) on the scores before the bias.
        dropout: probability of dropping a weight, drawn from torch's global generator.
        want_lse: without it the second result is `[b h 0]`, a few per cent faster.

    Returns:
        The output, and the log of each row's normaliser.
    """
    seed = torch.randint(2**62, ()) if dropout else None
    tensors = (q, k, v, offsets, keys, partial, masks, keep, asking, documents, bias, seed)
    return block_forward(*tensors, block, scale, softcap or 0.0, dropout, want_lse)


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    keys: Tensor,
    partial: Tensor | None,
    masks: Tensor | None,
    keep: Tensor | None,
    asking: Tensor | None,
    documents: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    block: int,
    scale: float,
    softcap: float,
    dropout: float,
    want_lse: bool,
) -> tuple[Tensor, Tensor]:
    """`block_attention` on plain arguments."""
    if k.shape[2] == 0 or q.numel() == 0:
        return tile.without_keys(q, v, want_lse)
    lists = Lists(block, offsets, keys, partial, masks)
    layout = BlockTiles(q, k, lists, keep, documents, bias, tile.threads(dropout))
    return tile_passes.forward(layout, q, k, v, asking, tile.rule(scale, softcap, dropout, seed), want_lse)


def fake_forward(q, k, v, *arguments):
    return tile.empty_result(q, v, arguments[-1])


def run_backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    keys: Tensor,
    partial: Tensor | None,
    masks: Tensor | None,
    keep: Tensor | None,
    asking: Tensor | None,
    documents: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    block: int,
    scale: float,
    softcap: float,
    dropout: float,
    learning: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and bias, the last empty without a bias and 0 unless `learning`."""
    if k.shape[2] == 0 or q.numel() == 0:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), tile.gradient_of(bias, None)
    lists = Lists(block, offsets, keys, partial, masks)
    layout = BlockTiles(q, k, lists, keep, documents, bias, tile.threads(dropout), learning)
    rule = tile.rule(scale, softcap, dropout, seed)
    d_q, d_k, d_v = tile_passes.backward(layout, d_out, d_lse, q, k, v, asking, rule)
    return d_q, d_k, d_v, tile.gradient_of(bias, layout.bias_gradient())


def fake_backward(d_out, d_lse, q, k, v, offsets, keys, partial, masks, keep, asking, documents, bias, *arguments):
    return *(x.new_empty(x.shape) for x in (q, k, v)), tile.gradient_of(bias, None)


def save_inputs(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:12])
    ctx.plain = inputs[12:]


def differentiate(ctx, d_out, d_lse):
    *plain, want_lse = ctx.plain
    q, k, v, *rest = ctx.saved_tensors
    d_out = q.new_zeros(*q.shape[:3], v.shape[3]) if d_out is None else d_out
    d_lse, learning = d_lse if want_lse else None, ctx.needs_input_grad[10]
    d_q, d_k, d_v, d_bias = block_backward(d_out, d_lse, q, k, v, *rest, *plain, learning)
    return d_q, d_k, d_v, *[None] * 7, d_bias if rest[7] is not None else None, *[None] * 6


block_forward = node("block_forward", run_forward, fake_forward)
block_backward = node("block_backward", run_backward, fake_backward)
torch.library.register_autograd("anyformer::block_forward", differentiate, setup_context=save_inputs)
torch.library.register_autograd("anyformer::block_backward", refuse_second_derivative)
