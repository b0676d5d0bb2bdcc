"""Which pairs may meet in one forward, as a dense boolean tensor, and how many there are."""

from dataclasses import replace
from functools import lru_cache

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anyformer.context import Context
from anyformer.pattern._algebra import from_head
from anyformer.pattern._decompose import Piece, decompose
from anyformer.pattern.base import Facts, Pattern

_BLOCK = 64  # side of the tiles that pairs are counted in
_MOST = 2**27  # pairs that are looked at one by one
_FEW = 32  # keys of a query up to which its pairs are listed one by one
_ROWS = 32  # queries that are looked at to see how many keys one has
_SHORT = (
    512  # tokens up to which the pairs of a pattern are remembered: a layer over so few takes no longer than they do
)
_MOST_REMEMBERED = 2**21  # pairs of all heads that are remembered as a bias: 8 MB


def pairs(context: Context, heads: int) -> Bool[Tensor, "#b #h n m"] | None:
    """The pairs that pattern, causality, padding and documents leave together; None where all may meet.

    Args:
        heads: number of query heads.
    """
    if not context.causal and not context.restricted:
        return None
    queries, keys = context.queries, context.keys
    q, k = queries.places[:, None, :, None], keys.places[:, None, None, :]
    if context.pattern is not None and _plain(context):
        allowed = _remembered(context.pattern, keys.length, heads, context.layer, context.causal)
    else:
        allowed = torch.ones(1, 1, queries.length, keys.length, dtype=torch.bool, device=q.device)
        if context.pattern is not None:
            batch = torch.arange(max(queries.batch, keys.batch), device=q.device)[:, None, None, None]
            head = torch.arange(heads, device=q.device)[:, None, None]
            allowed = allowed & context.pattern.allows(batch, head, q, k, facts(context))
        elif context.causal:
            allowed = allowed & (k <= q)
    if keys.keep is not None:
        allowed = allowed & keys.keep[:, None, None, :]
    if context.mask is not None:
        allowed = allowed & context.mask
    if keys.documents is not None and queries.documents is not None:
        allowed = allowed & (queries.documents[:, None, :, None] == keys.documents[:, None, None, :])
    return allowed


def remembered_bias(context: Context, heads: int) -> Float[Tensor, "1 #h m m"] | None:
    """`pairs` as a bias of 0 and -inf, where it is remembered; else None.

    The fused kernel makes this of booleans, anew in every call, which over short inputs costs up to half of its time.
    """
    own = (context.mask, context.keys.documents, context.queries.documents)
    if context.pattern is None or any(part is not None for part in own) or not _plain(context):
        return None
    return _remembered_bias(context.pattern, context.keys.length, heads, context.layer, context.causal)


def facts(context: Context) -> Facts:
    """What a pattern may know of this forward."""
    places, keep, flags = context.keys.places, context.keys.keep, context.keys.flags
    m = context.keys.length
    lengths = None
    if keep is not None:
        lengths = (torch.where(keep, places, -1).amax(dim=1) + 1) if m else keep.sum(dim=1)
    if flags is not None:
        flags = flags if keep is None else flags & keep
        by_place = torch.zeros_like(flags, dtype=torch.int32)
        flags = by_place.scatter_add(1, places.expand_as(flags).clamp(max=max(m - 1, 0)), flags.to(torch.int32)) > 0
    length = m if context.cache is None else context.cache.seen
    return Facts(lengths=lengths, length=length, flags=flags, layer=context.layer, causal=context.causal)


def _plain(context: Context) -> bool:
    """Whether the pattern knows no more than the number of tokens, of which there are few, and the answer may be kept."""
    keys, m = context.keys, context.keys.length
    if torch.compiler.is_compiling() or type(keys.places) is not Tensor:
        return False  # what is traced is of no use later
    if context.queries is not keys or context.cache is not None or not 0 < m <= _SHORT:
        return False
    if keys.keep is not None or keys.flags is not None or keys.places.device.type != "cpu":
        return False
    return torch.equal(keys.places, torch.arange(m, device="cpu")[None])


@lru_cache(maxsize=16)
def _remembered(pattern: Pattern, m: int, heads: int, layer: int, causal: bool) -> Bool[Tensor, "1 #h m m"]:
    with torch.inference_mode(False), torch.device("cpu"):  # what is kept must serve training too
        places, known = torch.arange(m), Facts(length=m, layer=layer, causal=causal)
        head = torch.arange(heads)[:, None, None]
        allowed = pattern.allows(torch.zeros((), dtype=torch.int64), head, places[:, None], places, known)
        return torch.ones(1, 1, m, m, dtype=torch.bool) & allowed


@lru_cache(maxsize=16)
def _remembered_bias(
    pattern: Pattern, m: int, heads: int, layer: int, causal: bool
) -> Float[Tensor, "1 #h m m"] | None:
    allowed = _remembered(pattern, m, heads, layer, causal)
    if allowed.numel() > _MOST_REMEMBERED:
        return None
    with torch.inference_mode(False), torch.device("cpu"):
        return torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)


@lru_cache(maxsize=64)
def most_keys(pattern: Pattern, n: int, m: int, layer: int, causal: bool) -> int:
    """The most keys that a query of head 0 meets, by a look at some of them."""
    with torch.inference_mode(False), torch.device("cpu"):
        q, zero = torch.linspace(m - n, m - 1, _ROWS).long()[:, None], torch.zeros((), dtype=torch.int64)
        met = pattern.allows(zero, zero, q, torch.arange(m), Facts(length=m, layer=layer, causal=causal))
        return int(met.expand(_ROWS, m).sum(dim=1).max())


def count(pattern: Pattern, n: int, m: int, heads: int, *, causal: bool, layer: int = 0) -> int:
    """Allowed pairs of all heads, exactly: part by part, whole tiles by their size, the others pair by pair."""
    known, total = Facts(length=m, layer=layer, causal=causal), 0
    for own, numbers in pattern.groups_of(heads, layer):
        parts = decompose(from_head(own, numbers.start, causal=causal), causal=causal)
        near = [Piece(part, part) for part in replace(parts, rest=None).disjoint()]
        total += sum(_count(piece, n, m, len(numbers), known) for piece in (*near, *parts.pieces))
    return total


def _count(piece: Piece, n: int, m: int, heads: int, known: Facts) -> int:
    """The pairs of a piece: single pairs of its source where these are few, else tiles."""
    few = n * m and most_keys(piece.source, n, m, known.layer, known.causal) <= _FEW
    source, block = (piece.source, 1) if few else (piece.pattern, _BLOCK)
    layout = source.blocks(n, block, m, heads=heads, causal=known.causal, facts=known)
    sure = layout.whole & (piece.source == piece.pattern or not few)
    some = (~sure).nonzero()[:, 0]
    if len(some) * block**2 > _MOST:
        return round(piece.pattern.density(n, m, heads=heads, causal=known.causal) * n * m * heads)
    group, row, column = layout.tiles()
    inside = [(length - part * block).clamp(max=block) for part, length in ((row, n), (column, m))]
    total = int((inside[0] * inside[1])[sure].sum())
    slots = torch.arange(block)
    for part in some.split(2**22 // block**2):
        q, k = row[part, None] * block + slots, column[part, None] * block + slots
        real = (q < n)[:, :, None] & (k < m)[:, None, :]
        q, k = (q + m - n, k) if layout.order is None else (layout.order[x.clamp(max=m - 1)] for x in (q, k))
        head = group[part, None, None]
        met = piece.pattern.allows(torch.zeros_like(head), head, q[:, :, None], k[:, None, :], known)
        total += int((met & real).sum())
    return total * (heads // layout.heads)
