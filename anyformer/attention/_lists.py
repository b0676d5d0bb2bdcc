"""Softmax attention over lists of key blocks, and over lists of keys."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.attention._band import as_wide
from anyformer.context import Context
from anyformer.ops.blocks import block_attention
from anyformer.ops.gathered import gathered_attention
from anyformer.pattern.base import Pattern
from anyformer.pattern.layout import BlockLayout
from anyformer.pattern.pairs import facts


@dataclass(frozen=True)
class Lists:
    """Blocks of keys for each block of queries."""

    pattern: Pattern
    layout: BlockLayout


@dataclass(frozen=True)
class Gathered:
    """Single keys for each query: of those in the layout, whose blocks are one token wide, the ones that the pattern allows."""

    pattern: Pattern
    layout: BlockLayout


def lists(
    path: Lists, q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float, *, want_lse: bool
) -> tuple[Float[Tensor, "b h n v"], Float[Tensor, "b h lse"]]:
    """Output and log-sum-exp (`[b h 0]` unless wanted) of every query over its blocks."""
    layout = path.layout
    order = None if layout.order is None else layout.order.to(q.device)
    keep, documents = context.keys.keep, context.keys.documents
    bias = _bias(path, q, k, context)
    if order is not None:
        q, k, v = (part[:, :, order] for part in (q, k, v))
        keep, documents = (None if part is None else part[:, order] for part in (keep, documents))
    numbers, masks = _masks(path, context)
    out, lse = block_attention(
        q,
        k,
        v,
        block=layout.block,
        offsets=layout.offsets.to(q.device),
        keys=layout.keys.to(q.device),
        partial=numbers,
        masks=masks,
        keep=keep,
        documents=documents,
        bias=as_wide(bias, q),
        scale=scale,
        softcap=context.softcap,
        dropout=context.dropout,
        want_lse=want_lse,
    )
    if order is None:
        return out, lse
    lse = torch.empty_like(lse).index_copy(2, order, lse) if want_lse else lse
    return torch.empty_like(out).index_copy(2, order, out), lse


def gathered(
    path: Gathered, q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float
) -> tuple[Float[Tensor, "b h n v"], Float[Tensor, "b h n"]]:
    """Output and log-sum-exp of every query over its keys."""
    layout, device = path.layout, q.device
    counts = layout.offsets.diff(dim=1)  # [h n]
    most = int(counts.max())
    rank = torch.arange(most)
    listed = rank < counts[..., None]
    entry = (layout.offsets[:, :-1, None] + rank).clamp(max=len(layout.keys) - 1)
    index = torch.where(listed, layout.keys[entry].long(), 0).to(device)
    place = torch.arange(layout.n, device=device)[:, None] + layout.m - layout.n
    head = torch.arange(len(index), device=device)[:, None, None]
    allowed = path.pattern.allows(torch.zeros_like(head), head, place, index, facts(context)) & listed.to(device)
    if context.causal:
        allowed = allowed & (index <= place)
    allowed = allowed[None]
    if context.keys.keep is not None:
        allowed = allowed & context.keys.keep[:, index]
    if (documents := context.keys.documents) is not None:
        allowed = allowed & (documents[:, index] == documents[:, None, -layout.n :, None])
    bias = None
    if context.encoding.offsets is not None:
        table = context.encoding.offsets(1 - layout.m, layout.m - 1).bias
        assert table is not None
        offset = (index - place + layout.m - 1).expand(len(table), -1, -1)
        bias = table.to(device).gather(1, offset.flatten(1)).view(1, *offset.shape)
    shared = {"scale": scale, "softcap": context.softcap, "dropout": context.dropout}
    return gathered_attention(q, k, v, index=index, allowed=allowed, bias=bias, **shared)


def _bias(path: Lists, q: Tensor, k: Tensor, context: Context) -> Tensor | None:
    """The bias by difference of slots. Where an order sorts places by residue class, pairs meet within a class alone, and slots
    that are 1 apart there are places that are the stride apart."""
    if context.encoding.offsets is None:
        return None
    n, m = q.shape[2], k.shape[2]
    table = context.encoding.offsets(1 - m, n - 1).bias
    if path.layout.order is None or table is None:
        return table
    stride = path.pattern.traits(context.causal).stride
    far = (m - 1) // stride
    near = table[:, (m - 1) % stride :: stride]  # offsets that are multiples of the stride
    return torch.nn.functional.pad(near, (m - 1 - far, n - 1 - far))


def _masks(path: Lists, context: Context) -> tuple[Tensor | None, Tensor | None]:
    """The number of each entry's mask, -1 where every pair meets, and the masks of the others."""
    layout = path.layout
    some = ~layout.whole
    count = int(some.sum())
    if not count:
        return None, None
    device = context.keys.places.device
    group, row, column = (part[some].to(device) for part in layout.tiles())
    inside = torch.arange(layout.block, device=device)
    q, k = ((part[:, None] * layout.block + inside) for part in (row, column))
    if layout.order is None:
        q, k = q + layout.m - layout.n, k
    else:
        order = layout.order.to(device)
        q, k = (order[part.clamp(max=layout.m - 1)] for part in (q, k))
    sample, head = (part[:, None, None] for part in (group // layout.heads, group % layout.heads))
    masks = path.pattern.allows(sample, head, q[:, :, None], k[:, None, :], facts(context))
    numbers = torch.full((len(layout.keys),), -1, device=device)
    numbers[some.to(device)] = torch.arange(count, device=device)
    return numbers, masks.expand(count, layout.block, layout.block)
