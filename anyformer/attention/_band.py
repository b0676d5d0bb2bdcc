"""Softmax attention in a band, with global tokens, through tiles."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.attention._rows import known_to_be_none
from anyformer.context import Context, Offsets
from anyformer.ops.composite import window_attention_composite
from anyformer.ops.softmax import dense, repeat_heads
from anyformer.ops.window import window_attention
from anyformer.pattern import Parts
from anyformer.pattern.pairs import facts, pairs
from anyformer.side import Side, left_order

_VANISHES = {torch.float32: 104.0, torch.float64: 746.0}  # exp of minus this is 0


@dataclass(frozen=True)
class Window:
    """A band, and global tokens that all queries meet."""

    left: int
    right: int
    parts: Parts


def band(
    path: Window,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: Context,
    scale: float,
    *,
    want_lse: bool,
    global_rows: bool = False,
) -> tuple[Float[Tensor, "b h n v"], Float[Tensor, "b h lse"]]:
    """Output and log-sum-exp (`[b h 0]` unless wanted) of every query over its band and the global keys.

    Args:
        global_rows: whether the queries among the global tokens meet every key.
    """
    tables = Offsets() if context.encoding.offsets is None else context.encoding.offsets(-path.left, path.right)
    slots = global_slots(path.parts, context, k)
    columns = rows = row_bias = None
    if slots is not None and context.encoding.logits is not None:
        columns = _column_bias(slots, q, k, context)
    if slots is not None and global_rows:
        whole = _whole_rows(slots, q, k, context)
        rows, row_bias = torch.where(whole.asked, whole.rows, -1), whole.bias
        row_bias = None if row_bias is None else row_bias.expand(*row_bias.shape[:2], rows.shape[1], k.shape[2])
    shifted = q if tables.shift is None else q + tables.shift[:, None].to(q.dtype)
    facts = {
        "left": path.left,
        "right": path.right,
        "causal": context.causal,
        "keep": context.keys.keep,
        "documents": context.keys.documents,
        "bias": as_wide(tables.bias, q),
        "query_table": as_wide(tables.keys, q),
        "value_table": as_wide(tables.values, q),
        "key_table": as_wide(tables.queries, q),
        "global_keys": slots,
        "global_bias": columns,
        "full_rows": rows,
        "full_bias": row_bias,
        "scale": scale,
        "softcap": context.softcap,
        "dropout": context.dropout,
    }
    if torch.compiler.is_exporting():
        return window_attention_composite(shifted, k, v, **facts)
    reach = _reach(path, tables, shifted, k, context, scale)
    return window_attention(shifted, k, v, reach=reach, want_lse=want_lse, **facts)


def with_global_rows(
    parts: Parts, out: Tensor, q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float
) -> Float[Tensor, "b h n v"]:
    """`out` with the rows of the global queries, which meet every key, written over."""
    slots = None if context.causal else global_slots(parts, context, k)
    return out if slots is None else written_over(out, slots, q, k, v, context, scale)


def _reach(path: Window, tables: Offsets, q: Tensor, k: Tensor, context: Context, scale: float) -> list[int] | None:
    """For each head, the distance beyond which a bias makes every weight 0.

    A query sees itself, with a logit of -s + bias[0] at least, where s bounds the products; a pair whose bias is so far below
    bias[0] that exp rounds to 0 is as good as absent. None: nothing is known, as where a query need not see itself.
    """
    bias, hidden = tables.bias, context.keys.keep is not None or path.parts.tokens or path.parts.flagged
    by_vectors = tables.keys is not None or tables.queries is not None
    if bias is None or by_vectors or hidden or torch.compiler.is_compiling() or q.shape[2] > k.shape[2]:
        return None
    bias = bias.detach()
    longest = [x.detach().norm(dim=-1).amax(dim=(0, 2)).to(bias) for x in (q, repeat_heads(k, q.shape[1]))]
    bound = longest[0] * longest[1] * abs(scale)
    least = bias[:, path.left] - 2 * bound - _VANISHES[torch.promote_types(torch.float32, q.dtype)]
    distance = torch.arange(-path.left, path.right + 1, device=bias.device).abs()
    return torch.where(bias >= least[:, None], distance, 0).amax(dim=1).tolist()


def global_slots(parts: Parts, context: Context, k: Tensor) -> Int[Tensor, "b g"] | None:
    """Slots of the global keys of each row, -1 where a row has fewer."""
    if not parts.tokens and not parts.flagged:
        return None
    keep, flags, places, (b, _, m, _) = context.keys.keep, context.keys.flags, context.keys.places, k.shape
    batch = torch.arange(b, device=k.device)[:, None]
    hub, end = torch.zeros(b, m, dtype=torch.bool, device=k.device), facts(context).length_of(batch, batch)
    for token in parts.tokens:
        place = torch.full_like(end, token) if token >= 0 else end + token
        hub = hub | ((places == place) & (place < end))
    if parts.flagged and flags is not None:
        hub = hub | (flags if keep is None else flags & keep)
    most = int(hub.sum(dim=1).max()) if parts.flagged and b else len(parts.tokens)
    if not most:
        return None
    hub = F.pad(hub, (0, most))  # room for all of them at any length that an exported program meets
    slots = left_order(hub)[:, :most]
    return torch.where(hub.gather(1, slots), slots, -1)


def _column_bias(slots: Int[Tensor, "b g"], q: Tensor, k: Tensor, context: Context) -> Float[Tensor, "b h n g"]:
    assert context.encoding.rebind is not None
    found = slots.clamp(min=0)
    encoding = context.encoding.rebind(context.queries, context.keys.take(found))
    assert encoding.logits is not None
    keys = _rows(repeat_heads(k, q.shape[1]), found)
    return encoding.logits(q, keys).to(q.dtype).expand(*q.shape[:3], slots.shape[1])


def written_over(
    out: Tensor, slots: Int[Tensor, "b g"], q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float
) -> Tensor:
    """`out` with the rows of the queries at these slots of keys, distinct ones or -1, which meet every key, written over."""
    rows, asked, asking, queries, bias = _whole_rows(slots, q, k, context)
    found, _ = dense(
        asking,
        k,
        v,
        allowed=pairs(replace(context, pattern=None, queries=queries), q.shape[1]),
        bias=bias,
        scale=scale,
        softcap=context.softcap,
        dropout=context.dropout,
        sink=context.sink,
    )
    if known_to_be_none(~asked):
        return out.scatter_(2, rows[:, None, :, None].expand_as(found), found)  # `out` is this forward's own
    index = torch.where(asked, rows, out.shape[2])  # an extra row takes what nobody asked for
    padded = torch.cat([out, out.new_zeros(*out.shape[:2], 1, out.shape[3])], dim=2)
    return padded.scatter(2, index[:, None, :, None].expand_as(found), found)[:, :, :-1]


class _WholeRows(NamedTuple):
    """Queries that meet every key: their numbers, which of these are asked for, themselves, their side, a term of the scores."""

    rows: Int[Tensor, "b g"]
    asked: Bool[Tensor, "b g"]
    asking: Float[Tensor, "b h g d"]
    side: Side
    bias: Float[Tensor, "#b #h g m"] | None


def _whole_rows(slots: Int[Tensor, "b g"], q: Tensor, k: Tensor, context: Context) -> _WholeRows:
    rows = slots - (k.shape[2] - q.shape[2])
    asked = (slots >= 0) & (rows >= 0)
    rows = rows.clamp(min=0)
    queries = replace(context.queries.take(rows), arithmetic=False, keep=None)
    encoding = context.encoding
    if encoding.rebind is not None:
        encoding = encoding.rebind(queries, context.keys)
    asking = _rows(q, rows)
    bias = None if encoding.logits is None else encoding.logits(asking, repeat_heads(k, q.shape[1]))
    return _WholeRows(rows, asked, asking, queries, bias)


def _rows(x: Float[Tensor, "b h t d"], slots: Int[Tensor, "b g"]) -> Float[Tensor, "b h g d"]:
    b, h, _, d = x.shape
    return x.gather(2, slots[:, None, :, None].expand(b, h, slots.shape[1], d))


def as_wide(table: Tensor | None, like: Tensor) -> Tensor | None:
    return None if table is None else table.to(like.device, torch.promote_types(torch.float32, like.dtype))
