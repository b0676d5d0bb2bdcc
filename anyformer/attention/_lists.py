"""Softmax attention over lists of key blocks, and over lists of keys."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.attention._band import as_wide
from anyformer.context import Context
from anyformer.ops.blocks import block_attention
from anyformer.ops.gathered import gathered_attention, lists_of
from anyformer.ops.pair_products import PairLists
from anyformer.pattern import Facts
from anyformer.pattern.base import Pattern
from anyformer.pattern.layout import BlockLayout
from anyformer.pattern.pairs import facts

_MOST_REMEMBERED = 2**21  # pairs whose keys are remembered: 16 MB


@dataclass(frozen=True)
class Lists:
    """Blocks of keys for each block of queries."""

    pattern: Pattern
    layout: BlockLayout
    causal: bool


@dataclass(frozen=True)
class Gathered:
    """Single keys for each query: of those in the layout, whose blocks are one token wide, the ones that the pattern allows."""

    pattern: Pattern
    layout: BlockLayout


def lists(
    path: Lists, q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float, *, want_lse: bool
) -> tuple[Float[Tensor, "b h n v"], Float[Tensor, "b h lse"]]:
    """Output and log-sum-exp (`[b h 0]` unless wanted) of every query over its blocks."""
    n, m = q.shape[2], k.shape[2]
    offsets = context.encoding.offsets
    bias = None if offsets is None else as_wide(offsets(1 - m, n - 1).bias, q)
    keep, documents = context.keys.keep, context.keys.documents
    given = Given(q, k, v, keep, documents, bias).ordered(path)
    out, lse = block_attention(
        given.q,
        given.k,
        given.v,
        **tables(path, facts(context), q)._asdict(),
        block=path.layout.block,
        keep=given.keep,
        documents=given.documents,
        bias=given.bias,
        scale=scale,
        softcap=context.softcap,
        dropout=context.dropout,
        want_lse=want_lse,
    )
    return back(path, out), back(path, lse) if want_lse else lse


class Tables(NamedTuple):
    """A layout as `block_attention` reads it."""

    offsets: Tensor
    keys: Tensor
    partial: Tensor | None
    masks: Tensor | None


def tables(path: Lists, known: Facts, q: Float[Tensor, "b h n d"]) -> Tables:
    """The lists of a layout, and the masks of the blocks in which only some pairs meet."""
    layout, offsets = path.layout, path.layout.offsets
    if layout.batch > 1 and layout.heads == 1:  # lists of a sample are said for each of its heads
        offsets = offsets.repeat_interleave(q.shape[1], dim=0)
    return Tables(offsets.to(q.device), layout.keys.to(q.device), *_masks(path, known, q.device))


class Given(NamedTuple):
    """What is given for each slot, or by difference of slots (the bias)."""

    q: Tensor
    k: Tensor
    v: Tensor
    keep: Tensor | None
    documents: Tensor | None
    bias: Tensor | None

    def ordered(self, path: Lists) -> "Given":
        """The same in the order of the layout's slots."""
        if path.layout.order is None:
            return self
        order = path.layout.order.to(self.q.device)
        q, k, v = (part[:, :, order] for part in (self.q, self.k, self.v))
        keep, documents = (None if part is None else part[:, order] for part in (self.keep, self.documents))
        return Given(q, k, v, keep, documents, None if self.bias is None else _by_slot(path, self.bias))


def back(path: Lists, out: Float[Tensor, "b h n *v"]) -> Float[Tensor, "b h n *v"]:
    """What came in the order of the layout's slots, in the order of the tokens."""
    if path.layout.order is None:
        return out
    return torch.empty_like(out).index_copy(2, path.layout.order.to(out.device), out)


def gathered(
    path: Gathered, q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float
) -> tuple[Float[Tensor, "b h n v"], Float[Tensor, "b h n"]]:
    """Output and log-sum-exp of every query over its keys."""
    layout, device, known = path.layout, q.device, facts(context)
    depends = path.pattern.traits(context.causal).depends
    alike = not depends & {"lengths", "flags"} or (known.lengths is None and known.flags is None)
    if alike and device.type == "cpu" and known.length == layout.m and len(layout.keys) <= _MOST_REMEMBERED:
        samples = [_remembered(path, q.shape[1], context.layer, context.causal)]
    else:
        samples = [_looked_up(path, sample, q.shape[1], known, device) for sample in range(layout.batch)]
    if len(samples) == 1:
        return _over_keys(path, samples[0], q, k, v, context, scale)
    found = []
    for sample, listed in enumerate(samples):
        row = torch.tensor([sample], device=device)
        sides = {"queries": context.queries.rows(row), "keys": context.keys.rows(row)}
        one = q[row], k[row], v[row]
        found.append(_over_keys(path, listed, *one, replace(context, **sides), scale))
    outs, lses = zip(*found, strict=True)
    return torch.cat(outs), torch.cat(lses)


class _Listed(NamedTuple):
    """The key of each pair, which of them count (None: all) and, on the CPU, the lists of all heads."""

    index: Int[Tensor, "g n r"]
    allowed: Bool[Tensor, "1 g n r"] | None
    lists: PairLists | None


def _over_keys(
    path: Gathered, listed: _Listed, q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float
) -> tuple[Float[Tensor, "b h n v"], Float[Tensor, "b h n"]]:
    """Of samples that have the same lists."""
    layout, device, (index, allowed, lists) = path.layout, q.device, listed
    if context.keys.keep is not None:
        real = context.keys.keep[:, index]
        allowed = real if allowed is None else allowed & real
    if (documents := context.keys.documents) is not None:
        same = documents[:, index] == documents[:, None, -layout.n :, None]
        allowed = same if allowed is None else allowed & same
    bias = None
    if context.encoding.offsets is not None:
        table = context.encoding.offsets(1 - layout.m, layout.m - 1).bias
        assert table is not None
        place = torch.arange(layout.n, device=device)[:, None] + layout.m - layout.n
        offset = (index.long() - place + layout.m - 1).expand(len(table), -1, -1)
        bias = table.to(device).gather(1, offset.flatten(1)).view(1, *offset.shape)
    shared = {"scale": scale, "softcap": context.softcap, "dropout": context.dropout}
    return gathered_attention(q, k, v, index=index, allowed=allowed, bias=bias, lists=lists, **shared)


def _looked_up(path: Gathered, sample: int, heads: int, known: Facts, device: torch.device) -> _Listed:
    """The lists of a sample."""
    layout = path.layout
    offsets = layout.offsets.unflatten(0, (layout.batch, layout.heads))[sample]
    counts = offsets.diff(dim=1)  # [g n]
    rank = torch.arange(max(int(counts.max()), 1))
    listed = rank < counts[..., None]
    keys = torch.cat([layout.keys.long(), layout.keys.new_zeros(1, dtype=torch.int64)])
    index = keys[torch.where(listed, offsets[:, :-1, None] + rank, len(layout.keys))].to(device)
    place = torch.arange(layout.n, device=device)[:, None] + layout.m - layout.n
    head = torch.arange(len(index), device=device)[:, None, None]
    listed = listed.to(device) & path.pattern.allows(torch.full_like(head, sample), head, place, index, known)
    lists = lists_of(index, heads, layout.m) if device.type == "cpu" else None
    return _Listed(index, None if bool(listed.all()) else listed[None], lists)


@lru_cache(maxsize=16)
def _remembered(path: Gathered, heads: int, layer: int, causal: bool) -> _Listed:
    known = Facts(length=path.layout.m, layer=layer, causal=causal)
    with torch.inference_mode(False), torch.device("cpu"):  # what is kept must serve training too
        found = _looked_up(path, 0, heads, known, torch.device("cpu"))
    return found._replace(index=found.index.int())


def _by_slot(path: Lists, bias: Float[Tensor, "h r"]) -> Float[Tensor, "h r"]:
    """The bias by difference of slots. Where an order sorts places by residue class, pairs meet within a class alone, and slots
    that are 1 apart there are places that are the stride apart."""
    near, n, m = multiples(path), path.layout.n, path.layout.m
    far = (m - 1) // near.step
    return torch.nn.functional.pad(bias[:, near], (m - 1 - far, n - 1 - far))


def multiples(path: Lists) -> slice:
    """Which offsets, of those from -(m - 1) on, are multiples of the stride by which an order sorts."""
    stride = path.pattern.traits(path.causal).stride
    return slice((path.layout.m - 1) % stride, None, stride)


def _masks(path: Lists, known: Facts, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """The number of each entry's mask, -1 where every pair meets, and the masks of the others."""
    layout = path.layout
    some = ~layout.whole
    count = int(some.sum())
    if not count:
        return None, None
    group, row, column = (part[some].to(device) for part in layout.tiles())
    inside = torch.arange(layout.block, device=device)
    q, k = ((part[:, None] * layout.block + inside) for part in (row, column))
    if layout.order is None:
        q, k = q + layout.m - layout.n, k
    else:
        order = layout.order.to(device)
        q, k = (order[part.clamp(max=layout.m - 1)] for part in (q, k))
    sample, head = (part[:, None, None] for part in (group // layout.heads, group % layout.heads))
    masks = path.pattern.allows(sample, head, q[:, :, None], k[:, None, :], known)
    numbers = torch.full((len(layout.keys),), -1, device=device)
    numbers[some.to(device)] = torch.arange(count, device=device)
    return numbers, masks.expand(count, layout.block, layout.block)
