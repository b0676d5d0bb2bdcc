"""Softmax attention through tiles: windows, global tokens and lists of blocks, without an n x m tensor."""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.attention._costs import ROW, Costs, costs
from anyformer.attention._ways import Way
from anyformer.context import Context, Offsets
from anyformer.forms import Form
from anyformer.ops.blocks import block_attention
from anyformer.ops.composite import window_attention_composite
from anyformer.ops.softmax import dense, repeat_heads
from anyformer.ops.window import window_attention
from anyformer.pattern import Parts, decompose
from anyformer.pattern.base import Pattern
from anyformer.pattern.layout import BlockLayout
from anyformer.pattern.leaves import Full
from anyformer.pattern.pairs import facts, pairs
from anyformer.side import left_order

_BLOCK = 64
_VANISHES = {torch.float32: 104.0, torch.float64: 746.0}  # exp of minus this is 0


@dataclass(frozen=True)
class Window:
    """A band, and global tokens that all queries meet."""

    left: int
    right: int
    parts: Parts
    way: ClassVar[Way] = "windows"


@dataclass(frozen=True)
class Lists:
    """Blocks of keys for each block of queries."""

    layout: BlockLayout
    way: ClassVar[Way] = "block lists"


Path = Window | Lists


def choose(q: Tensor, k: Tensor, context: Context, *, always: bool = False) -> Path | None:
    """The cheapest way through tiles; None where the dense path is cheaper, or the only one.

    Args:
        always: take tiles wherever they can do it, whatever they cost.
    """
    encoding, heads = context.encoding, q.shape[1]
    n, m = q.shape[2], k.shape[2]
    traced = torch.compiler.is_compiling()
    terms = encoding.offsets is not None
    pattern = Full() if context.pattern is None and terms and not traced else context.pattern
    unreadable = encoding.forms & {Form.BIAS, Form.SCORE, Form.ROW, Form.PRODUCT}
    by_offset = encoding.offsets is not None and encoding.arithmetic and context.softcap is None
    if (
        not isinstance(pattern, Pattern)
        or context.cache is not None
        or context.mask is not None
        or context.bias is not None
    ):
        return None
    if unreadable or ((encoding.logits is not None or encoding.values is not None) and not by_offset) or not n * m:
        return None
    if _keys_meet_table(encoding.offsets):
        return None
    if traced and context.queries.flags is not None:
        return None  # the number of flagged tokens would be a size
    window = _window(_common_parts(pattern, heads, context.layer, context.causal), n, m)
    if window is not None and _globals_fit(window, encoding.offsets):
        known = Costs() if traced else costs()
        dense_is_cheaper = known.tile * (window.left + window.right + ROW) >= m
        if terms and not traced:
            dense_is_cheaper = dense_is_cheaper and n < (known.learned if encoding.learned else known.biased)
        return window if always or not _known(dense_is_cheaper) else None
    if traced or context.queries.flags is not None or not _bias_only(encoding.offsets):
        return None  # the lists follow from the length, which a graph does not know
    layout = pattern.blocks(n, _BLOCK, m, heads=heads, causal=context.causal, facts=facts(context))
    return Lists(layout) if always or layout.density * costs().tile < 1 else None


def run(path: Path, q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float) -> Float[Tensor, "b h n v"]:
    """Softmax attention along a chosen path; the same as the dense reference."""
    if isinstance(path, Lists):
        return _lists(path.layout, q, k, v, context, scale)
    return _band(path, q, k, v, context, scale)


def _common_parts(pattern: Pattern, heads: int, layer: int, causal: bool) -> Parts | None:
    """The parts of the pattern of all heads; None where heads differ."""
    if len(pattern.groups_of(heads, layer)) > 1:
        return None
    return decompose(pattern.at(0, layer), causal=causal)


# what `torch.compiler.assume_constant_result` sets: calling that would load the compiler on import
_common_parts._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _known(condition: bool) -> bool:
    """Whether a condition on lengths holds; while tracing, whether it does for every length that the graph will serve."""
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def _window(parts: Parts | None, n: int, m: int) -> Window | None:
    if parts is None or parts.band is None or parts.rest is not None:
        return None
    reach = max(n, m)
    left, right = (reach if side is None else side for side in parts.band)
    return Window(left, right, parts)


def _bias_only(offsets: object) -> bool:
    if offsets is None:
        return True
    tables: Offsets = offsets(0, 0)  # type: ignore[operator]  # a callable, checked above
    return tables.keys is None and tables.values is None and tables.queries is None and tables.shift is None


def _keys_meet_table(offsets: object) -> bool:
    """Tiles look rows up for queries only."""
    return offsets is not None and offsets(0, 0).queries is not None  # type: ignore[operator]  # a callable, as above


def _globals_fit(window: Window, offsets: object) -> bool:
    """Global columns beyond the window know biases only."""
    return not (window.parts.tokens or window.parts.flagged) or _bias_only(offsets)


def _band(path: Window, q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float) -> Tensor:
    tables = Offsets() if context.encoding.offsets is None else context.encoding.offsets(-path.left, path.right)
    slots = _global_slots(path.parts, context, k)
    columns = None
    if slots is not None and context.encoding.logits is not None:
        columns = _column_bias(slots, q, k, context)
    shifted = q if tables.shift is None else q + tables.shift[:, None].to(q.dtype)
    if torch.compiler.is_exporting():
        attend = window_attention_composite
    else:
        attend = partial(window_attention, reach=_reach(path, tables, shifted, k, context, scale), want_lse=False)
    out, _ = attend(
        shifted,
        k,
        v,
        left=path.left,
        right=path.right,
        causal=context.causal,
        keep=context.keys.keep,
        documents=context.keys.documents,
        bias=_as(tables.bias, q),
        query_table=_as(tables.keys, q),
        value_table=_as(tables.values, q),
        global_keys=slots,
        global_bias=columns,
        scale=scale,
        softcap=context.softcap,
        dropout=context.dropout,
    )
    return out if slots is None or context.causal else _with_global_rows(out, slots, q, k, v, context, scale)


def _reach(path: Window, tables: Offsets, q: Tensor, k: Tensor, context: Context, scale: float) -> list[int] | None:
    """For each head, the distance beyond which a bias makes every weight 0.

    A query sees itself, with a logit of -s + bias[0] at least, where s bounds the products; a pair whose bias is so far below
    bias[0] that exp rounds to 0 is as good as absent. None: nothing is known, as where a query need not see itself.
    """
    bias, hidden = tables.bias, context.keys.keep is not None or path.parts.tokens or path.parts.flagged
    if bias is None or tables.keys is not None or hidden or torch.compiler.is_compiling() or q.shape[2] > k.shape[2]:
        return None
    bias = bias.detach()
    longest = [x.detach().norm(dim=-1).amax(dim=(0, 2)).to(bias) for x in (q, repeat_heads(k, q.shape[1]))]
    bound = longest[0] * longest[1] * abs(scale)
    least = bias[:, path.left] - 2 * bound - _VANISHES[torch.promote_types(torch.float32, q.dtype)]
    distance = torch.arange(-path.left, path.right + 1, device=bias.device).abs()
    return torch.where(bias >= least[:, None], distance, 0).amax(dim=1).tolist()


def _lists(layout: BlockLayout, q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float) -> Tensor:
    order = None if layout.order is None else layout.order.to(q.device)
    keep, documents = context.keys.keep, context.keys.documents
    bias = None
    if context.encoding.offsets is not None:
        bias = context.encoding.offsets(1 - k.shape[2], q.shape[2] - 1).bias
    if order is not None and bias is not None:
        layout = _plain_layout(layout, q, k, context)
        order = None
    if order is not None:
        q, k, v = (part[:, :, order] for part in (q, k, v))
        keep, documents = (None if part is None else part[:, order] for part in (keep, documents))
    numbers, masks = _masks(layout, context, q.shape[1])
    out, _ = block_attention(
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
        bias=_as(bias, q),
        scale=scale,
        softcap=context.softcap,
        dropout=context.dropout,
        want_lse=False,
    )
    return out if order is None else torch.empty_like(out).index_copy(2, order, out)


def _plain_layout(layout: BlockLayout, q: Tensor, k: Tensor, context: Context) -> BlockLayout:
    """The layout in the order of places, which tables by offset need."""
    assert isinstance(context.pattern, Pattern)
    known = facts(context)
    return context.pattern.blocks(
        layout.n, layout.block, layout.m, heads=q.shape[1], causal=context.causal, facts=known, reorder=False
    )


def _masks(layout: BlockLayout, context: Context, heads: int) -> tuple[Tensor | None, Tensor | None]:
    """The number of each entry's mask, -1 where every pair meets, and the masks of the others."""
    assert isinstance(context.pattern, Pattern)
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
    masks = context.pattern.allows(sample, head, q[:, :, None], k[:, None, :], facts(context))
    numbers = torch.full((len(layout.keys),), -1, device=device)
    numbers[some.to(device)] = torch.arange(count, device=device)
    return numbers, masks.expand(count, layout.block, layout.block)


def _global_slots(parts: Parts, context: Context, k: Tensor) -> Int[Tensor, "b g"] | None:
    """Slots of the global keys of each row, -1 where a row has fewer."""
    if not parts.tokens and not parts.flagged:
        return None
    keep, flags, (b, _, m, _) = context.keys.keep, context.keys.flags, k.shape
    keep = torch.ones(b, m, dtype=torch.bool, device=k.device) if keep is None else keep
    hub, length = torch.zeros_like(keep), keep.sum(dim=1, keepdim=True)
    for token in parts.tokens:
        place = torch.full_like(length, token) if token >= 0 else length + token
        real = (place >= 0) & (place < length)
        hub = hub | ((torch.arange(m, device=k.device) == place) & real)
    if parts.flagged and flags is not None:
        hub = hub | (flags & keep)
    most = int(hub.sum(dim=1).max()) if parts.flagged else len(parts.tokens)
    if not most:
        return None
    slots = left_order(hub)[:, :most]
    return torch.where(hub.gather(1, slots), slots, -1)


def _column_bias(slots: Int[Tensor, "b g"], q: Tensor, k: Tensor, context: Context) -> Float[Tensor, "b h n g"]:
    assert context.encoding.rebind is not None
    found = slots.clamp(min=0)
    encoding = context.encoding.rebind(context.queries, context.keys.take(found))
    assert encoding.logits is not None
    keys = _rows(repeat_heads(k, q.shape[1]), found)
    return encoding.logits(q, keys).to(q.dtype).expand(*q.shape[:3], slots.shape[1])


def _with_global_rows(
    out: Tensor, slots: Int[Tensor, "b g"], q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float
) -> Tensor:
    """`out` with the rows of the global queries, which meet every key, written over."""
    rows = slots - (k.shape[2] - q.shape[2])
    asked = (slots >= 0) & (rows >= 0)
    rows = rows.clamp(min=0)
    queries = replace(context.queries.take(rows), arithmetic=False, keep=None)
    encoding = context.encoding
    if encoding.rebind is not None:
        encoding = encoding.rebind(queries, context.keys)
    asking = _rows(q, rows)
    found, _ = dense(
        asking,
        k,
        v,
        allowed=pairs(replace(context, pattern=None, queries=queries), q.shape[1]),
        bias=None if encoding.logits is None else encoding.logits(asking, repeat_heads(k, q.shape[1])),
        scale=scale,
        softcap=context.softcap,
        dropout=context.dropout,
    )
    index = torch.where(asked, rows, out.shape[2])  # an extra row takes what nobody asked for
    padded = torch.cat([out, out.new_zeros(*out.shape[:2], 1, out.shape[3])], dim=2)
    return padded.scatter(2, index[:, None, :, None].expand_as(found), found)[:, :, :-1]


def _rows(x: Float[Tensor, "b h t d"], slots: Int[Tensor, "b g"]) -> Float[Tensor, "b h g d"]:
    b, h, _, d = x.shape
    return x.gather(2, slots[:, None, :, None].expand(b, h, slots.shape[1], d))


def _as(table: Tensor | None, like: Tensor) -> Tensor | None:
    return None if table is None else table.to(like.device, torch.promote_types(torch.float32, like.dtype))
