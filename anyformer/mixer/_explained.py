"""What mixers with heads tell of one forward: the weights of the asked rows, and the terms of their scores."""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.context import Boxes, Context, Offsets
from anyformer.forms import Form
from anyformer.ops.softmax import repeat_heads
from anyformer.pattern.pairs import pairs


def implied(
    attend: Callable[[Tensor], Tensor],
    v: Float[Tensor, "b k m v"],
    slots: Int[Tensor, "b r"],
    real: Bool[Tensor, "b n"] | None,
) -> Float[Tensor, "b h r m"] | None:
    """The weights w of `attend(v)_i = sum_j w_ij v_j` for the asked slots i: what it makes of values that name their key.

    No tensor of all pairs is made. None: what it makes of v is no such sum.

    Args:
        attend: maps values `[b k m v]` to outputs `[b h n v]`.
        real: which outputs count; None: all.
    """
    b, kv_heads, m, width = v.shape
    told = rows_of(attend(v), slots)
    parts = []
    for start in range(0, m, width):
        names = v.new_zeros(m, width)
        names[start : start + width] = torch.eye(width, dtype=v.dtype, device=v.device)[: m - start]
        parts.append(rows_of(attend(names.expand(b, kv_heads, m, width)), slots)[..., : m - start])
    found = torch.cat(parts, dim=-1) if parts else v.new_zeros(*told.shape[:3], 0)
    wrong = (found @ repeat_heads(v, told.shape[1]) - told).abs()
    if real is not None:
        count = real.gather(1, slots)[:, None, :, None]
        wrong, told = wrong * count, told * count
    if found.numel() and wrong.max() > 1e-3 * told.abs().max().clamp(min=1e-6):
        return None
    return found


def score_terms(
    score: Callable[[Tensor, Tensor], Tensor],
    bare: tuple[Float[Tensor, "b h n d"], Float[Tensor, "b k m d"]],
    placed: tuple[Float[Tensor, "b h n w"], Float[Tensor, "b k m w"]],
    context: Context,
    slots: Int[Tensor, "b r"],
) -> dict[str, Float[Tensor, "b h r m"]]:
    """The terms of the softmax logits of the asked slots, before any mask: "content", "rotation", "bias", "row".

    Args:
        score: maps queries and keys of all heads to what their product counts, for example `products(scale)`.
        bare: queries and keys without a position.  placed: those that meet, rotated or widened where the encoding does that.
        context: that of the attention; its pattern counts for terms by the keys between only.
    """
    encoding = context.encoding
    q, k = placed[0], repeat_heads(placed[1], placed[0].shape[1])
    found = {"content": score(rows_of(bare[0], slots), repeat_heads(bare[1], q.shape[1]))}
    if encoding.rotate is not None:
        found["rotation"] = score(rows_of(q, slots), k) - found["content"]
    if encoding.logits is not None:
        found["bias"] = _added(q, k, context, slots)
    if encoding.row is not None:
        allowed, logits = pairs(context, q.shape[1]), score(q, k)
        logits = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
        added = encoding.row(q, k, logits) - logits  # of pairs that may not meet: infinity less infinity
        found["row"] = rows_of(added.nan_to_num(nan=0.0), slots)
    return found


def _added(q: Tensor, k: Tensor, context: Context, slots: Tensor) -> Tensor:
    """What the encoding adds to the logits of the asked rows; of all rows where it cannot be bound to some."""
    encoding, asked = context.encoding, replace(context.queries.take(slots), arithmetic=False)
    logits, rows = encoding.logits, rows_of(q, slots)
    if encoding.rebind is not None:
        logits = encoding.rebind(asked, context.keys).logits
        assert logits is not None, "some queries have what all have"
        return logits(rows, k).expand(*rows.shape[:3], k.shape[2])
    assert logits is not None, "asked for where something is added"
    return rows_of(logits(q, k).expand(*q.shape[:3], k.shape[2]), slots)


def products(scale: float, softcap: float | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    """Scaled products of queries and keys, capped as softmax caps them."""

    def score(q: Tensor, k: Tensor) -> Tensor:
        found = scale * q @ k.mT
        return found if softcap is None else softcap * torch.tanh(found / softcap)

    return score


def weighing(context: Context) -> Context:
    """The same without dropout and without what the encoding does to values, which are no part of the weights."""
    encoding = context.encoding
    offsets, boxes = encoding.offsets, encoding.boxes

    def logits_only(low: int, high: int) -> Offsets:
        assert offsets is not None
        return replace(offsets(low, high), values=None)

    def boxes_on_logits() -> Boxes:
        assert boxes is not None
        return replace(boxes(), values=None)

    encoding = replace(
        encoding,
        forms=encoding.forms - {Form.VALUE, Form.TURN},
        turn=None,
        turn_back=None,
        values=None,
        offsets=None if offsets is None else logits_only,
        boxes=None if boxes is None else boxes_on_logits,
    )
    return replace(context, encoding=encoding, dropout=0.0)


def rows_of(x: Float[Tensor, "b h n w"], slots: Int[Tensor, "b r"]) -> Float[Tensor, "b h r w"]:
    """The vectors of the asked slots."""
    return x.gather(2, slots[:, None, :, None].expand(x.shape[0], x.shape[1], slots.shape[1], x.shape[3]))
