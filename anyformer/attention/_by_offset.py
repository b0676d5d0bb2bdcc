"""Weights that are products of features times a factor of the offset: summed on a line, where every offset is a distance."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from anyformer.attention._lines import Line, line
from anyformer.attention._pairwise import pairwise
from anyformer.attention._products import Products, divided
from anyformer.context import Context, Encoding
from anyformer.ops.linear_banded import Terms, banded_sums
from anyformer.ops.linear_boxes import box_sums
from anyformer.ops.linear_toeplitz import toeplitz_sums
from anyformer.ops.softmax import repeat_heads


def on_a_line(x: Products, context: Context, *, apart: bool = True) -> Line | None:
    """The line on which to sum, where one fits: few new queries of a long sequence are cheaper pair by pair."""
    continued = context.cache is not None and x.q.shape[2] < x.k.shape[2]
    steady = x.log_decay is None or (x.log_decay.dim() == 1 and context.encoding.arithmetic)
    return line(context, apart=apart) if steady and not continued else None


def by_curve(x: Products, context: Context) -> Float[Tensor, "b h n v"]:
    """The outputs with TOEPLITZ or GRID."""
    where = on_a_line(x, context)
    if where is None:
        return pairwise(x, context)
    heads, (n, m) = x.q.shape[1], (x.q.shape[2], x.k.shape[2])
    x = x.ready()
    curve = _curve(where, context, x)
    k, v = (where.of_keys(repeat_heads(y, heads)) for y in (x.k, x.v.to(x.k.dtype)))
    q, count = where.of_queries(x.q), x.rule.denominator != "none"
    there = where.of_keys(x.k.new_ones(x.k.shape[0], heads, m, 1)) if count else None
    if there is not None and x.counted is None:
        v = torch.cat([v, there], dim=-1)
    out = where.back(toeplitz_sums(q, k, v, curve, causal=context.causal), n)
    if there is None:
        return divided(out, None, x.rule, x.v)
    if x.counted is None:
        return divided(out[..., :-1], out[..., -1], x.rule, x.v)
    q, k = where.of_queries(x.counted[0]), where.of_keys(repeat_heads(x.counted[1], heads))
    den = where.back(toeplitz_sums(q, k, there, curve, causal=context.causal), n)
    return divided(out, den[..., 0], x.rule, x.v)


def by_band(x: Products, context: Context) -> Float[Tensor, "b h n v"]:
    """The outputs with CLIPPED."""
    where, clip = on_a_line(x, context), context.encoding.clip
    if where is None or torch.compiler.is_exporting():
        return pairwise(x, context)
    assert clip is not None, "bound without CLIPPED"
    heads, (n, m), device = x.q.shape[1], (x.q.shape[2], x.k.shape[2]), x.q.device
    x = x.ready()
    k, v, told = (where.of_keys(repeat_heads(y, heads)) for y in (x.k, x.v.to(x.k.dtype), x.raw[1]))
    terms = Terms(context.encoding.scale or 1.0, where.of_queries(x.raw[0]), told, fade=x.log_decay)
    if m:
        assert context.encoding.offsets is not None, "bound without CLIPPED"
        tables = vars(context.encoding.offsets(-clip[0], clip[1]))
        terms = terms._replace(**{name: None if table is None else table.to(device) for name, table in tables.items()})
    left, right = clip
    num, den = banded_sums(where.of_queries(x.q), k, v, terms, left=left, right=right, causal=context.causal)
    num, den = where.back(num, n), where.back(den.unsqueeze(-1), n).squeeze(-1)
    return divided(num, den if x.rule.denominator != "none" else None, x.rule, x.v)


def by_boxes(x: Products, context: Context) -> Float[Tensor, "b h n v"]:
    """The outputs with BOXES."""
    encoding, heads, (n, m) = context.encoding, x.q.shape[1], (x.q.shape[2], x.k.shape[2])
    assert encoding.boxes is not None, "bound without BOXES"
    boxes, (f, width) = encoding.boxes(), (x.q.shape[3], x.v.shape[3])
    worth = m * (f + width) > len(boxes.edges) * f * width  # a rectangle costs as much as so many pairs
    where = on_a_line(x, context, apart=False) if worth else None
    if where is None or not where.width:
        return pairwise(x, context)
    x, scale = x.ready(), encoding.scale or 1.0
    rows = -(-where.length // where.width)

    def gridded(y: Tensor) -> Tensor:
        return F.pad(y, (0, 0, 0, rows * where.width - where.length)).unflatten(2, (rows, where.width))

    def factors(y: Tensor, table: Tensor | None) -> Tensor | None:
        return None if table is None else (scale * (gridded(y).to(x.q.dtype) @ table.to(x.q.dtype).mT[:, None])).exp()

    k, v, told = (where.of_keys(repeat_heads(y, heads)) for y in (x.k, x.v.to(x.k.dtype), x.raw[1]))
    of_query, of_key = factors(where.of_queries(x.raw[0]), boxes.keys), factors(told, boxes.queries)
    q, values = gridded(where.of_queries(x.q)), boxes.values
    num, den = box_sums(q, gridded(k), gridded(v), boxes.edges, of_query, of_key, values, causal=context.causal)
    num, den = (where.back(y.flatten(2, 3)[:, :, : where.length], n) for y in (num, den.unsqueeze(-1)))
    return divided(num, den[..., 0] if x.rule.denominator != "none" else None, x.rule, x.v)


def _curve(where: Line, context: Context, x: Products) -> Float[Tensor, "h r"]:
    """exp of the encoding's term for the offsets 1 - length to length - 1; 0 for later keys where causal."""
    most = where.length - 1
    if most < 0:
        return x.q.new_zeros(x.q.shape[1], 0)
    last = 0 if context.causal else most
    logs = _logs(where, context.encoding, -most, last, x.q.device)
    if x.log_decay is not None:
        logs = logs + x.log_decay[:, None] * torch.arange(-most, last + 1, device=x.q.device).abs()
    return F.pad(logs.exp().to(x.q.dtype), (0, most - last))


def _logs(where: Line, encoding: Encoding, low: int, high: int, device: torch.device) -> Float[Tensor, "h r"]:
    if encoding.grid is not None:
        return encoding.grid(where.offsets(low, high, device))
    assert encoding.offsets is not None, "bound without a term by offset"
    logs = encoding.offsets(low, high).bias
    assert logs is not None, "bound without a term by offset"
    return logs.to(device)
