"""Which centroids tokens lie nearest to, by the cosine, and which tokens lie nearest to a centroid.

Cosines are made a few rows, or a few clusters, at a time and never leave the processor's cache.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.ops.node import node
from anyformer.ops.tile import Scratch, tiles_at_once, working_dtype

STEPS = 2**16
"""Cosines are ranked in steps of 1 / STEPS: equal tokens then tie, whatever the order of summation."""

_SHORTEST = 1e-12
_FEWEST = 16  # clusters at once: products of fewer rows are slow


def units(x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """Vectors of length 1, or 0."""
    return torch.nn.functional.normalize(x.to(working_dtype(x)), dim=-1)


def ranked(cosines: Float[Tensor, "*b n"]) -> Int[Tensor, "*b n"]:
    """Whole numbers in the order of the cosines, the earlier of two equal tokens first."""
    n = cosines.shape[-1]
    whole = torch.int32 if (STEPS + 2) * n < torch.iinfo(torch.int32).max else torch.int64
    steps = (cosines * STEPS).round_().to(whole)
    return torch.sub(steps.mul_(n), torch.arange(n, dtype=whole, device=cosines.device), out=steps)


def most_near(cosines: Float[Tensor, "*b n"], keep: Bool[Tensor, "*#b n"] | None, most: int) -> Int[Tensor, "*b most"]:
    """The slots of the tokens with the largest cosines, the largest first; padding last."""
    rank = ranked(cosines)
    if keep is not None:
        rank.masked_fill_(~keep, torch.iinfo(rank.dtype).min)
    return rank.topk(most, dim=-1).indices


def run_slots(x: Tensor, centroids: Tensor, keep: Tensor | None, most: int) -> Tensor:
    """For each head's centroids [h c d] the slots [b h c most] of the nearest tokens of `x` [b k n d], the nearest first."""
    (b, kinds, n, width), (heads, count, _) = x.shape, centroids.shape
    work, directions = Scratch(working_dtype(x), x.device), units(centroids)
    at_once = max(_FEWEST, tiles_at_once(n, torch.get_num_threads()))
    slots = torch.empty(b, heads, count, most, dtype=torch.int64, device=x.device)
    with torch.autocast(x.device.type, enabled=False):
        for sample in range(b):
            kept = None if keep is None else keep[sample]
            for head in range(heads):
                if head % (heads // kinds) == 0:
                    unit = work.take("unit", n, width)
                    _unit(x[sample, head // (heads // kinds)], unit)
                for start in range(0, count, at_once):
                    part = slice(start, min(start + at_once, count))
                    cosines = work.take("cosines", part.stop - start, n)
                    torch.mm(directions[head, part], unit.mT, out=cosines)
                    slots[sample, head, part] = most_near(cosines, kept, most)
    return slots


def fake_slots(x: Tensor, centroids: Tensor, keep: Tensor | None, most: int) -> Tensor:
    return x.new_empty(x.shape[0], *centroids.shape[:2], most, dtype=torch.int64)


def run_own(x: Tensor, centroids: Tensor, summed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The centroid nearest to each token of `x` [b k n d], [b h n]; if `summed` the sums of each cluster's tokens as vectors of
    length 1, [h c d], and how many of a head's tokens are not 0, [h]; else zeros."""
    (b, kinds, n, width), (heads, count, _) = x.shape, centroids.shape
    work, directions = Scratch(working_dtype(x), x.device), units(centroids)
    own = torch.empty(b, heads, n, dtype=torch.int64, device=x.device)
    sums = torch.zeros(heads, count, width, dtype=work.dtype, device=x.device)
    tokens = torch.zeros(heads, dtype=torch.int64, device=x.device)
    with torch.autocast(x.device.type, enabled=False):
        for sample in range(b):
            for head in range(heads):
                taken = x[sample, head // (heads // kinds)]
                for rows in _rows(n, count + width):
                    unit = work.take("unit", rows.stop - rows.start, width)
                    length = _unit(taken[rows], unit)
                    cosines = torch.mm(unit, directions[head].mT, out=work.take("cosines", len(unit), count))
                    found = cosines.argmax(dim=-1)
                    own[sample, head, rows] = found
                    if summed:
                        sums[head].index_add_(0, found, unit)
                        tokens[head] += torch.count_nonzero(length)
    return own, sums, tokens


def fake_own(x: Tensor, centroids: Tensor, summed: bool) -> tuple[Tensor, Tensor, Tensor]:
    heads = centroids.shape[0]
    own = x.new_empty(x.shape[0], heads, x.shape[2], dtype=torch.int64)
    return own, x.new_empty(centroids.shape, dtype=working_dtype(x)), own.new_empty(heads)


def _rows(n: int, width: int) -> Iterator[slice]:
    at_once = tiles_at_once(width, torch.get_num_threads())
    for start in range(0, n, at_once):
        yield slice(start, min(start + at_once, n))


def _unit(x: Tensor, room: Tensor) -> Tensor:
    """Write vectors of length 1, or 0, into the room; their lengths."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=room.dtype)
    torch.div(x, length.clamp(min=_SHORTEST), out=room)
    return length


nearest_slots = node("nearest_slots", run_slots, fake_slots)
nearest_own = node("nearest_own", run_own, fake_own)
