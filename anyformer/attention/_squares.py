"""Softmax attention over a pattern of blocks out of ordinary operators, for what is exported: O(n) memory at any length.

An exported program does not know its length, so it can hold no list whose own length follows from it. Where every block of queries
meets a fixed number of blocks of keys, their numbers are arithmetic that is exported with the rest.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.attention._band import as_wide, written_over
from anyformer.context import Context
from anyformer.ops.composite import capped
from anyformer.ops.softmax import repeat_heads
from anyformer.pattern.base import Pattern
from anyformer.pattern.pairs import facts


@dataclass(frozen=True)
class Squares:
    """As many blocks of keys for each block of queries at any length; see `Pattern.squares`."""

    pattern: Pattern
    side: int


def squares(
    path: Squares, q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float
) -> tuple[Float[Tensor, "b h n v"], Float[Tensor, "b h n"]]:
    """Output and log-sum-exp of every query over the blocks of its list; queries that meet every key are left to
    `with_full_rows`."""
    (b, heads, n, _), side, device = q.shape, path.side, q.device
    wide = torch.promote_types(torch.float32, q.dtype)
    count = -(-n // side) + 1  # never just 1: an exported program would be held to that
    row, head = torch.arange(count, device=device), torch.arange(heads, device=device)
    batch = torch.arange(b, device=device)[:, None, None]
    near = path.pattern.squares(batch, head[:, None], row, facts(context))
    index = torch.stack([each.expand(b, heads, count) for each in near], dim=-1)  # [b h t w]
    listed = _once(index) & (index < count)
    index = index.clamp(0, count - 1)

    def blocks(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, count * side - n)).unflatten(2, (count, side))  # [b h t side d]

    def gathered(x: Tensor) -> Tensor:
        flat = blocks(repeat_heads(x, heads).to(wide)).flatten(3)  # [b h t side*d]
        found = flat.gather(2, index.flatten(2)[..., None].expand(-1, -1, -1, flat.shape[3]))
        return found.unflatten(3, (side, -1)).unflatten(2, (count, -1)).flatten(3, 4)  # [b h t w*side d]

    inside = torch.arange(side, device=device)
    q_places = (row[:, None] * side + inside)[..., None]  # [t side 1]
    k_places = (index[..., None] * side + inside).flatten(3)[..., None, :]  # [b h t 1 w*side]
    allowed = path.pattern.allows(batch[..., None, None], head[:, None, None, None], q_places, k_places, facts(context))
    allowed = allowed & listed.repeat_interleave(side, dim=3)[..., None, :] & (k_places < n)
    k_places = k_places.clamp(max=n - 1)
    for known, same in ((context.keys.keep, False), (context.keys.documents, True)):
        if known is not None:
            of_keys = known.gather(1, k_places.flatten(1)).view(k_places.shape)
            of_queries = F.pad(known, (0, count * side - n)).view(b, 1, count, side, 1)
            allowed = allowed & (of_keys == of_queries if same else of_keys)
    logits = capped(blocks(q.to(wide)) @ gathered(k).mT * scale, context.softcap)
    if context.encoding.offsets is not None:
        table = as_wide(context.encoding.offsets(1 - n, n - 1).bias, q)
        assert table is not None
        offset = (k_places - q_places + n - 1).clamp(0, 2 * n - 2).transpose(0, 1)  # [h b t side w*side]
        logits = logits + table.gather(1, offset.flatten(1)).view(offset.shape).transpose(0, 1)
    logits = logits.masked_fill(~allowed, -torch.inf)
    empty = (logits == -torch.inf).all(dim=-1, keepdim=True)
    logits = logits.masked_fill(empty, 0.0)
    lse = torch.logsumexp(logits, dim=-1, keepdim=True).masked_fill(empty, -torch.inf)
    weights = F.dropout(torch.softmax(logits, dim=-1).masked_fill(empty, 0.0), context.dropout)
    out = (weights @ gathered(v)).flatten(2, 3)[:, :, :n]
    return out.to(q.dtype), lse.flatten(2)[:, :, :n]


def with_full_rows(
    path: Squares, out: Tensor, q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float
) -> Float[Tensor, "b h n v"]:
    """`out` with the rows of the blocks of queries that meet every key written over."""
    b, n, side = q.shape[0], q.shape[2], path.side
    batch = torch.arange(b, device=q.device)
    full = path.pattern.full_squares(batch, facts(context))
    if not full:
        return out
    index = torch.stack([each.expand(b) for each in full], dim=-1)  # [b g]
    slots = (index[..., None] * side + torch.arange(side, device=q.device)).flatten(1)
    real = _once(index).repeat_interleave(side, dim=1) & (slots < n)
    return written_over(out, torch.where(real, slots, -1), q, k, v, context, scale)


def _once(index: Int[Tensor, "*l w"]) -> Bool[Tensor, "*l w"]:
    """Which entries of a list are numbers that do not stand before them, -1 being none."""
    again = (index[..., :, None] == index[..., None, :]).tril(-1).any(dim=-1)
    return (index >= 0) & ~again
