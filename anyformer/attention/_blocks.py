"""Keys and queries laid out in blocks of places, in one pass and when a sequence is continued from a cache."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.context import Context
from anyformer.ops import left
from anyformer.side import Side


@dataclass(frozen=True)
class Blocks:
    """The blocks that keys and queries of one forward fall into.

    A row below is one block of queries. In one pass there is one a block of keys; in a cache only the newest blocks have queries.

    Args:
        size: tokens a block.
        count: number of blocks of keys.
        real: which slots of them hold a real key.
        rows: the block of keys at each row, at most `count - 1`.
        slots: where each query goes among the slots of all rows, one after the last for padding.
        causal: whether a query sees the keys of its block up to its own place only.
        whole: whether it is known without looking that every slot holds a real key.
        straight: whether it is known without looking that queries stand in the order of the slots, in all blocks, none padding.
    """

    size: int
    count: int
    real: Bool[Tensor, "b g s"]
    rows: Int[Tensor, "b r"]
    slots: Int[Tensor, "b n"]
    causal: bool
    whole: bool
    straight: bool

    def keys(self, x: Float[Tensor, "b k m d"]) -> Float[Tensor, "b k g s d"]:
        """Keys or values by blocks, the last one filled up with zeros."""
        more = self.count * self.size - x.shape[2]
        x = F.pad(x, (0, 0, 0, more)) if more else x  # a pad of nothing is a copy
        return x.unflatten(2, (self.count, self.size))

    def queries(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h r s d"]:
        """Queries by rows, zeros where there is none."""
        if self.straight:
            return self.keys(x)
        slots = self.rows.shape[1] * self.size
        laid = x.new_zeros(*x.shape[:2], slots + 1, x.shape[3])
        laid = laid.scatter(2, self.slots[:, None, :, None].expand_as(x), x)
        return laid[:, :, :slots].unflatten(2, (-1, self.size))

    def back(self, x: Float[Tensor, "b h r s d"]) -> Float[Tensor, "b h n d"]:
        """The inverse of `queries`; padding gets what the last slot holds."""
        flat = x.flatten(2, 3)
        if self.straight:
            return flat[:, :, : self.slots.shape[1]]
        slots = self.slots.clamp(max=flat.shape[2] - 1)[:, None, :, None]
        return flat.gather(2, slots.expand(*flat.shape[:2], -1, flat.shape[3]))

    def query_slots(self) -> Int[Tensor, "b r s"]:
        """Which query stands in each slot of each row; any where none does."""
        size = self.rows.shape[1] * self.size
        numbers = torch.arange(self.slots.shape[1], device=self.slots.device).expand_as(self.slots)
        found = numbers.new_zeros(len(self.slots), size + 1).scatter(1, self.slots, numbers)
        return found[:, :size].unflatten(1, (-1, self.size))

    def at_rows(self, x: Float[Tensor, "b k g *rest"]) -> Float[Tensor, "b k r *rest"]:
        """What belongs to the block of each row."""
        if self.straight:
            return x
        rows = self.rows.reshape(len(self.rows), 1, -1, *(1,) * (x.dim() - 3))
        return x.gather(2, rows.expand(len(self.rows), x.shape[1], -1, *x.shape[3:]))

    def own(self) -> Bool[Tensor, "b r s s"]:
        """The pairs of a query and a key of its own block that may meet, by row."""
        real = self.real.gather(1, self.rows[..., None].expand(-1, -1, self.size))[:, :, None]
        if not self.causal:
            return real.expand(-1, -1, self.size, -1)
        return real & torch.ones(self.size, self.size, dtype=torch.bool, device=real.device).tril()


def blocks(context: Context, keys: Side, batch: int, size: int) -> Blocks:
    """The blocks of a forward, and which of them have queries.

    Args:
        keys: the side of the keys, real ones at the left (see `leftmost`).
        batch: rows of the batch.
        size: tokens a block.
    """
    queries = context.queries
    n, m = queries.length, keys.length
    count = -(-m // size)
    real = torch.ones(batch, m, dtype=torch.bool, device=keys.places.device) if keys.keep is None else keys.keep
    real = F.pad(real, (0, count * size - m)).unflatten(1, (count, size))
    places = queries.places.expand(batch, -1)
    if context.cache is None:
        first, rows = places.new_zeros(batch, 1), count
    else:
        first, rows = places[:, :1] // size, (n + size - 2) // size + 1
    slots = places - first * size
    if queries.keep is not None:
        slots = torch.where(queries.keep, slots, rows * size)
    numbers = (first + torch.arange(rows, device=first.device)).clamp(max=count - 1)
    whole = keys.keep is None and m % size == 0
    straight = context.cache is None and queries.keep is None and keys.keep is None and n == m
    return Blocks(size, count, real, numbers, slots, context.causal, whole, straight)


def leftmost(context: Context, *parts: Float[Tensor, "b k m _"]) -> tuple[Side, list[Tensor]]:
    """The side of the keys with real tokens first, and keys and values in that order, zeros for padding.

    In one pass the mixer has moved them; in a cache padding of earlier calls stands between them.
    """
    keys = context.keys
    if context.cache is not None:
        keys, moved = left.leftmost(keys, *(x.transpose(1, 2) for x in parts))
        parts = tuple(x.transpose(1, 2) for x in moved)
    if keys.keep is None:
        return keys, list(parts)
    return keys, [torch.where(keys.keep[:, None, :, None], x, torch.zeros_like(x)) for x in parts]
