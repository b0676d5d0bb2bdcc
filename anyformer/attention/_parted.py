"""The way of a pattern through tiles, where heads differ, keys stand in columns, or single keys are looked up: beside `_tiles`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.attention import _tiles
from anyformer.attention._columns import Columned, columned, columns, share
from anyformer.attention._costs import LOOKED_UP, costs
from anyformer.attention._lists import Gathered
from anyformer.attention._tiles import Path
from anyformer.attention._ways import Way
from anyformer.context import Context, Encoding, Offsets
from anyformer.ops import softmax as ops
from anyformer.ops.softmax import repeat_heads
from anyformer.pattern import Piece, from_head
from anyformer.pattern.base import Pattern
from anyformer.pattern.pairs import facts, most_keys, pairs
from anyformer.side import Side

_BLOCK = 64
_SHORT = 512  # tokens below which one dense call costs less than several others


@dataclass(frozen=True)
class Split:
    """Heads in groups, each along a way of its own; None: dense."""

    groups: tuple[tuple[range, Pattern, "Path | Columned | None"], ...]

    @property
    def name(self) -> Way:
        return "by head"


def choose(q: Tensor, k: Tensor, context: Context, *, always: bool = False) -> "Path | Columned | Split | None":
    """The cheapest way that makes no tensor of all pairs; None where the dense path is cheaper, or the only one.

    Args:
        always: take one wherever there is one, whatever it costs.
    """
    n, m, heads = q.shape[2], k.shape[2], q.shape[1]
    if torch.compiler.is_compiling() or not n * m or (n * m < _SHORT**2 and not always) or not _may_be_parted(context):
        return _tiles.choose(q, k, context, always=always)
    assert isinstance(context.pattern, Pattern)
    groups = context.pattern.groups_of(heads, context.layer)
    if len(groups) == 1:
        return _of_all_heads(q, k, context, groups[0][0], always=always)
    found = []
    for pattern, numbers in groups:
        own = from_head(pattern, numbers.start, causal=context.causal)
        part = _of_heads(context, own, numbers, heads)
        q_part, k_part = q[:, numbers.start : numbers.stop], repeat_heads(k[:, :1], len(numbers))
        found.append((numbers, own, _of_all_heads(q_part, k_part, part, own, always=always)))
    if all(way is None for _, _, way in found) or (always and any(way is None for _, _, way in found)):
        return _tiles.choose(q, k, context, always=always)
    return Split(tuple(found))


def run(
    path: "Path | Columned | Split", q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float
) -> Float[Tensor, "b h n v"]:
    """Softmax attention along a chosen way; the same as the dense reference."""
    match path:
        case Path():
            return _tiles.run(path, q, k, v, context, scale)
        case Columned():
            found = columns(path, q, k, v, context, scale, want_lse=context.sink is not None)
            return found[0] if context.sink is None else _tiles.merged([found], context.sink)
    heads, counts = q.shape[1], [len(numbers) for numbers, _, _ in path.groups]
    split, outs = zip(q.split(counts, dim=1), *(_by_group(x, heads, counts) for x in (k, v)), strict=True), []
    for (numbers, pattern, way), (q_part, k_part, v_part) in zip(path.groups, split, strict=True):
        known = _of_heads(context, pattern, numbers, heads)
        along = _dense if way is None else partial(run, way)
        outs.append(along(q_part, k_part, v_part, known, scale))
    return torch.cat(outs, dim=1)


def _may_be_parted(context: Context) -> bool:
    """Whether heads can be told apart, and every term be had as a bias by offset."""
    given = (context.cache, context.mask, context.bias, context.queries.flags, context.keys.flags)
    if not isinstance(context.pattern, Pattern) or not context.aligned or any(part is not None for part in given):
        return False
    return _tiles.readable(context) and _tiles.bias_only(context.encoding.offsets)


def _of_all_heads(
    q: Tensor, k: Tensor, context: Context, pattern: Pattern, *, always: bool
) -> "Path | Columned | None":
    """The way of heads that all have one pattern."""
    n, m, heads, tile = q.shape[2], k.shape[2], q.shape[1], costs().tile
    shared = {"heads": heads, "causal": context.causal, "facts": facts(context)}
    if context.causal and n == m and context.encoding.offsets is None and (found := columned(pattern)):
        read = share(found, n, heads, context.layer)
        if read < 0.8 * pattern.blocks(n, _BLOCK, m, **shared).density and (always or read * tile < 1):
            return found
    piece = _only_piece(pattern, context, heads)
    if piece is not None and LOOKED_UP * most_keys(pattern, n, m, context.layer, context.causal) < m:
        single = Gathered(piece.pattern, piece.source.blocks(n, 1, m, reorder=False, **shared))
        looking_up = LOOKED_UP * int(single.layout.offsets.diff(dim=1).max()) / m
        if looking_up < min(1.0, 0.7 * tile * pattern.blocks(n, _BLOCK, m, **shared).density):
            return Path((single,))
    return _tiles.choose(q, k, context, always=always)


def _only_piece(pattern: Pattern, context: Context, heads: int) -> Piece | None:
    """The pattern as one piece, where it has neither a band nor global tokens."""
    parts = _tiles.parts_of(pattern, heads, context.layer, context.causal)
    if parts is None or parts.band is not None or parts.tokens or parts.flagged or len(parts.pieces) != 1:
        return None
    return parts.pieces[0]


def _of_heads(context: Context, pattern: Pattern, numbers: range, heads: int) -> Context:
    """What is known, for some of the heads."""
    encoding, sink = _encoding_of_heads(context.encoding, numbers, heads), context.sink
    sink = None if sink is None else sink[numbers.start : numbers.stop]
    return replace(context, pattern=pattern, encoding=encoding, sink=sink)


def _encoding_of_heads(encoding: Encoding, numbers: range, heads: int) -> Encoding:
    """The encoding, whose only term is a bias by offset, for some of the heads."""
    logits, offsets, rebind = encoding.logits, encoding.offsets, encoding.rebind
    if logits is None or offsets is None:
        return encoding

    def own(x: Tensor, axis: int) -> Tensor:
        return x if x.shape[axis] == 1 else x.narrow(axis, numbers.start, len(numbers))

    def own_logits(q: Tensor, k: Tensor) -> Tensor:
        return own(logits(*(x[:, :1].expand(-1, heads, -1, -1) for x in (q, k))), 1)

    def own_offsets(low: int, high: int) -> Offsets:
        bias = offsets(low, high).bias
        return Offsets(bias=None if bias is None else own(bias, 0))

    def own_rebound(queries: Side, keys: Side) -> Encoding:
        assert rebind is not None
        return _encoding_of_heads(rebind(queries, keys), numbers, heads)

    return replace(encoding, logits=own_logits, offsets=own_offsets, rebind=None if rebind is None else own_rebound)


def _by_group(x: Float[Tensor, "b k m d"], heads: int, counts: Sequence[int]) -> Sequence[Float[Tensor, "b _ m d"]]:
    """The heads of keys or values that each group of query heads reads."""
    shared = heads // x.shape[1]
    if all(count % shared == 0 for count in counts):
        return x.split([count // shared for count in counts], dim=1)
    return repeat_heads(x, heads).split(list(counts), dim=1)


def _dense(q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float) -> Tensor:
    assert isinstance(context.pattern, Pattern)
    if context.pattern.band(causal=context.causal) == (None, 0 if context.causal else None):
        context = replace(context, pattern=None)
    logits, told = context.encoding.logits, context.plainly_causal
    bias = None if logits is None else logits(q, repeat_heads(k, q.shape[1]))
    shared = {"scale": scale, "dropout": context.dropout, "sink": context.sink}
    if context.softcap is not None or (bias is not None and context.encoding.learned):
        allowed = pairs(context, q.shape[1])
        return ops.dense(q, k, v, allowed=allowed, bias=bias, softcap=context.softcap, **shared)[0]
    allowed = None if told else pairs(context, q.shape[1])
    return ops.fused(q, k, v, allowed=allowed, bias=bias, lower_triangle=told, **shared)
