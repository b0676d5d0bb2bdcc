"""Softmax attention where all later queries read the same columns of keys: these are laid side by side before the others.

A column is a few keys of every period, so a list of whole blocks of keys would hold them all. Side by side they fill whole blocks,
and a block of queries reads those of them that stand before it, then the blocks of the rest of the pattern.
"""

from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.attention._ways import Way
from anyformer.context import Context
from anyformer.ops.blocks import block_attention
from anyformer.pattern import Facts, union_of
from anyformer.pattern.base import Pattern
from anyformer.pattern.leaves import Columns

_BLOCK = 64


@dataclass(frozen=True)
class Columned:
    """Columns of a causal pattern, and the pairs of the rest that are not in them."""

    columns: Columns
    rest: Pattern | None

    @property
    def name(self) -> Way:
        return "block lists"

    def places(self, n: int) -> Int[Tensor, " c"]:
        """Places of the keys in columns, whole blocks of them; n or more where there is no key."""
        period, count = self.columns.period, self.columns.count
        first = torch.arange(0, n, period)[:, None]
        found = (first + torch.arange(period - count, period)).flatten()
        return F.pad(found, (0, -len(found) % _BLOCK), value=n)

    def side_by_side(self, x: Float[Tensor, "b k n d"]) -> Float[Tensor, "b k c d"]:
        """Keys or values of the columns."""
        period, count = self.columns.period, self.columns.count
        by_period = F.pad(x, (0, 0, 0, -x.shape[2] % period)).unflatten(2, (-1, period))
        found = by_period[:, :, :, period - count :].flatten(2, 3)
        return F.pad(found, (0, 0, 0, -found.shape[2] % _BLOCK))


class _Tables(NamedTuple):
    """The blocks that each block of queries reads, as `block_attention` takes them."""

    offsets: Int[Tensor, "h edges"]
    keys: Int[Tensor, " entries"]
    partial: Int[Tensor, " entries"]
    masks: Bool[Tensor, "masks block block"]


def columned(pattern: Pattern) -> Columned | None:
    """The way of a causal pattern of which a part are columns; None where none is."""
    terms = union_of(pattern)
    columns = next((term for term in terms if isinstance(term, Columns)), None)
    if columns is None:
        return None
    others = [term for term in terms if term is not columns]
    return Columned(columns, reduce(Pattern.__or__, others) & ~columns if others else None)


def share(path: Columned, n: int, heads: int, layer: int) -> float:
    """The pairs of the blocks that are read, as a share of all."""
    tables = _tables(path, n, heads, layer)
    return len(tables.keys) * _BLOCK**2 / (tables.offsets.shape[0] * n * n)


def columns(
    path: Columned, q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float, *, want_lse: bool
) -> tuple[Float[Tensor, "b h n v"], Float[Tensor, "b h lse"]]:
    """Output and log-sum-exp (`[b h 0]` unless wanted) of every query over the columns and the rest."""
    n, device = q.shape[2], q.device
    k, v = (torch.cat([path.side_by_side(x), x], dim=2) for x in (k, v))
    slots = torch.cat([path.places(n).clamp(max=n - 1), torch.arange(n)]).to(device)
    keep, documents = (None if x is None else x[:, slots] for x in (context.keys.keep, context.keys.documents))
    tables = _Tables(*(x.to(device) for x in _tables(path, n, q.shape[1], context.layer)))
    return block_attention(
        q,
        k,
        v,
        **tables._asdict(),
        block=_BLOCK,
        keep=keep,
        documents=documents,
        scale=scale,
        softcap=context.softcap,
        dropout=context.dropout,
        want_lse=want_lse,
    )


@lru_cache(maxsize=16)
def _tables(path: Columned, n: int, heads: int, layer: int) -> _Tables:
    with torch.inference_mode(False), torch.device("cpu"):  # what is kept must serve training too
        return _made(path, n, heads, layer)


def _made(path: Columned, n: int, heads: int, layer: int) -> _Tables:
    places, inside = path.places(n), torch.arange(_BLOCK)
    known = Facts(length=n, layer=layer, causal=True)
    rows, by_block = -(-n // _BLOCK), places.view(-1, _BLOCK)
    first_query = torch.arange(rows)[:, None] * _BLOCK
    near = by_block[:, 0] < first_query + _BLOCK  # [rows blocks]: some key is not after all queries
    row, block = near.nonzero(as_tuple=True)
    whole = by_block[block, -1] <= first_query[row, 0]
    met = by_block[block[~whole], None, :] <= (first_query[row[~whole]] + inside)[:, :, None]
    count = 1
    group, masks = torch.zeros_like(row), [met]
    if path.rest is not None:
        layout = path.rest.blocks(n, _BLOCK, heads=heads, causal=True, facts=known, reorder=False)
        count = layout.heads
        row, block, whole, group = (x.repeat(count) for x in (row, block, whole, group))
        masks = masks * count
        group = torch.arange(count).repeat_interleave(len(row) // count)
        head, line, column = (part[~layout.whole] for part in layout.tiles())
        q, k = ((part[:, None] * _BLOCK + inside) for part in (line, column))
        head = head[:, None, None]
        masks.append(path.rest.allows(torch.zeros_like(head), head, q[:, :, None], k[:, None, :], known))
        more = layout.tiles()
        group, row = torch.cat([group, more[0]]), torch.cat([row, more[1]])
        block, whole = torch.cat([block, more[2] + len(by_block)]), torch.cat([whole, layout.whole])
    different, numbers = torch.unique(torch.cat(masks).flatten(1), dim=0, return_inverse=True)
    partial = torch.full((len(row),), -1)
    partial[~whole] = numbers
    line = group * rows + row
    order = (line * (len(by_block) + rows) + block).argsort()
    offsets = torch.searchsorted(line[order], torch.arange(count * rows + 1))
    by_head = torch.arange(count)[:, None] * rows + torch.arange(rows + 1)
    return _Tables(offsets[by_head], block[order].int(), partial[order], different.unflatten(1, (_BLOCK, _BLOCK)))
