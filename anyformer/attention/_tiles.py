"""Softmax attention through tiles: windows, global tokens, lists of blocks and of keys, without an n x m tensor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.attention._band import Window, band, with_global_rows
from anyformer.attention._costs import LOOKED_UP, ROW, Costs, costs
from anyformer.attention._listed import Listed, listed
from anyformer.attention._lists import Gathered, Lists, gathered, lists
from anyformer.attention._squares import Squares, squares, with_full_rows
from anyformer.attention._ways import Way
from anyformer.context import Context, Offsets
from anyformer.forms import Form
from anyformer.ops.node import constant
from anyformer.pattern import Parts, Piece, decompose
from anyformer.pattern.base import Pattern
from anyformer.pattern.leaves import Full
from anyformer.pattern.pairs import facts

_BLOCK = 64
_SPARSE = 0.5  # share of dense attention up to which one list of blocks for all parts is good enough
_SHORT = 512  # tokens below which lists and unions cost more than they save


@dataclass(frozen=True)
class Path:
    """Ways whose pairs are disjoint, to be merged, and the parts of the pattern whose global queries meet every key."""

    ways: tuple[Window | Lists | Listed | Gathered | Squares, ...]
    parts: Parts | None = None

    @property
    def name(self) -> Way:
        match self.ways:
            case (Window(),):
                return "windows"
            case (Lists() | Listed() | Squares(),):
                return "block lists"
        return "union"


def choose(q: Tensor, k: Tensor, context: Context, *, always: bool = False) -> Path | None:
    """The cheapest path through tiles; None where the dense path is cheaper, or the only one.

    Args:
        always: take tiles wherever they can do it, whatever they cost.
    """
    encoding, heads = context.encoding, q.shape[1]
    n, m = q.shape[2], k.shape[2]
    traced = torch.compiler.is_compiling()
    terms = encoding.offsets is not None
    pattern = Full() if context.pattern is None and terms and not traced else context.pattern
    own = (context.cache, context.mask, context.bias)
    if not context.aligned:
        return None
    if not isinstance(pattern, Pattern) or any(part is not None for part in own) or not n * m:
        return None
    if not readable(context) or (traced and context.queries.flags is not None):
        return None  # while tracing, the number of flagged tokens would be a size
    parts = _common_parts(pattern, heads, context.layer, context.causal)
    window = _window(parts, n, m)
    alone = window is not None and parts is not None and not parts.pieces
    if window is not None and alone and _globals_fit(window, encoding.offsets):
        known = Costs() if traced else costs()
        dense_is_cheaper = known.tile * (window.left + window.right + ROW) >= m
        if terms and not traced:
            dense_is_cheaper = dense_is_cheaper and n < (known.learned if encoding.learned else known.biased)
        return Path((window,), parts) if always or not _known(dense_is_cheaper) else None
    if context.queries.flags is not None or not bias_only(encoding.offsets):
        return None
    if not always and _known(n * m < _SHORT**2):
        return None
    if traced and torch.compiler.is_exporting():
        return Path((Squares(pattern, pattern.side),)) if pattern.side is not None and _known(n == m) else None
    if traced:
        return Path((Listed(pattern, _BLOCK),))
    layout = pattern.blocks(n, _BLOCK, m, heads=heads, causal=context.causal, facts=facts(context))
    cost, path = layout.density * costs().tile, Path((Lists(pattern, layout, context.causal),))
    worth = cost > _SPARSE and (always or n * m > _SHORT**2)
    if worth and parts is not None and (union := _union(parts, window, q, k, context, min(cost, 1.0))):
        return union
    return path if always or cost < 1 else None


def run(path: Path, q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float) -> Float[Tensor, "b h n v"]:
    """Softmax attention along a chosen path; the same as the dense reference."""
    merging = len(path.ways) > 1 or context.sink is not None
    alone = len(path.ways) == 1 and not torch.compiler.is_exporting()
    found = [_along(way, q, k, v, context, scale, want_lse=merging, alone=alone) for way in path.ways]
    out = merged(found, context.sink) if merging else found[0][0]
    match path:
        case Path(ways=(Window(),)) if alone:
            return out
        case Path(ways=(Squares() as way,)):
            return with_full_rows(way, out, q, k, v, context, scale)
        case Path(parts=Parts() as parts):
            return with_global_rows(parts, out, q, k, v, context, scale)
    return out


def _along(
    way: Window | Lists | Listed | Gathered | Squares,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: Context,
    scale: float,
    *,
    want_lse: bool,
    alone: bool,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over one set of keys; over all of them for the rows of global queries, if it is a window alone."""
    match way:
        case Window():
            rows = alone and not context.causal
            return band(way, q, k, v, context, scale, want_lse=want_lse, global_rows=rows)
        case Lists():
            return lists(way, q, k, v, context, scale, want_lse=want_lse)
        case Listed():
            return listed(way, q, k, v, context, scale, want_lse=want_lse)
        case Squares():
            return squares(way, q, k, v, context, scale)
    return gathered(way, q, k, v, context, scale)


def merged(
    found: Sequence[tuple[Float[Tensor, "b h n v"], Float[Tensor, "b h n"]]], sink: Float[Tensor, " h"] | None
) -> Float[Tensor, "b h n v"]:
    """One softmax over disjoint sets of keys, from the output and log-sum-exp over each, and over the sink."""
    logits = torch.stack([lse for _, lse in found], dim=-1)  # [b h n ways]
    empty = (logits == -torch.inf).all(dim=-1, keepdim=True)
    logits = logits.masked_fill(empty, 0.0)
    if sink is not None:
        logits = torch.cat([logits, sink.to(logits.dtype)[:, None, None].expand(*logits.shape[:3], 1)], dim=-1)
    shares = torch.softmax(logits, dim=-1).masked_fill(empty, 0.0)
    out = torch.zeros_like(found[0][0])
    for share, (part, _) in zip(shares.unbind(-1), found, strict=sink is None):
        out = out + share[..., None].to(out.dtype) * part
    return out


def _union(parts: Parts, window: Window | None, q: Tensor, k: Tensor, context: Context, most: float) -> Path | None:
    """The parts each in the way that is cheapest for them, if together they cost less than `most`, a share of dense attention."""
    if window is None and (parts.tokens or parts.flagged):
        return None
    m, known = k.shape[2], costs()
    ways: list[Window | Lists | Gathered] = [] if window is None else [window]
    total = 0.0 if window is None else known.tile * (window.left + window.right + ROW) / m
    for piece in parts.pieces:
        way, costing = _cheapest(piece, q, k, context)
        ways.append(way)
        total += costing
    return Path(tuple(ways), parts) if len(ways) > 1 and total < most else None


def _cheapest(piece: Piece, q: Tensor, k: Tensor, context: Context) -> tuple[Lists | Gathered, float]:
    n, m, heads = q.shape[2], k.shape[2], q.shape[1]
    shared = {"heads": heads, "causal": context.causal, "facts": facts(context)}
    blocks = Lists(piece.pattern, piece.pattern.blocks(n, _BLOCK, m, **shared), context.causal)
    in_blocks = blocks.layout.density * costs().tile
    if in_blocks < 0.25 or blocks.layout.order is not None or context.keys.batch > 1:
        return blocks, in_blocks
    single = Gathered(piece.pattern, piece.source.blocks(n, 1, m, **shared))
    widest = int(single.layout.offsets.diff(dim=1).max())
    gathering = LOOKED_UP * widest / m
    return (single, gathering) if gathering < in_blocks else (blocks, in_blocks)


def readable(context: Context) -> bool:
    """Whether every term of the encoding can be had as a table by offset."""
    encoding = context.encoding
    if encoding.forms & {Form.BIAS, Form.SCORE, Form.ROW, Form.PRODUCT}:
        return False
    if encoding.logits is None and encoding.values is None:
        return True
    return encoding.offsets is not None and encoding.arithmetic and context.softcap is None


@constant
def _common_parts(pattern: Pattern, heads: int, layer: int, causal: bool) -> Parts | None:
    """`parts_of`, which a traced graph takes as it is found."""
    return parts_of(pattern, heads, layer, causal)


@lru_cache(maxsize=64)
def parts_of(pattern: Pattern, heads: int, layer: int, causal: bool) -> Parts | None:
    """The parts of the pattern of all heads, remembered; None where heads differ, or it has none."""
    if len(pattern.groups_of(heads, layer)) > 1:
        return None
    return decompose(pattern.at(0, layer), causal=causal)


def _known(condition: bool) -> bool:
    """Whether a condition on lengths holds; while tracing, whether it does for every length that the graph will serve."""
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def _window(parts: Parts | None, n: int, m: int) -> Window | None:
    """The band of the parts, with the global tokens."""
    if parts is None or parts.band is None:
        return None
    reach = max(n, m)
    left, right = (reach if side is None else side for side in parts.band)
    return Window(left, right, parts)


def bias_only(offsets: Callable[[int, int], Offsets] | None) -> bool:
    """Whether the tables by offset hold nothing but a bias."""
    if offsets is None:
        return True
    tables = offsets(0, 0)
    return tables.keys is None and tables.values is None and tables.queries is None and tables.shift is None


def _globals_fit(window: Window, offsets: Callable[[int, int], Offsets] | None) -> bool:
    """Global columns beyond the window know biases only."""
    return not (window.parts.tokens or window.parts.flagged) or bias_only(offsets)
