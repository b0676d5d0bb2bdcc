"""Attention over all pairs with weights of a method's own, a few rows of logits at a time."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from anyformer.context import Context
from anyformer.forms import Form
from anyformer.ops.softmax import repeat_heads
from anyformer.pattern.pairs import pairs

FORMS = (
    Form.ROTATE,
    Form.TURN,
    Form.TOEPLITZ,
    Form.BIAS,
    Form.TABLE,
    Form.SCORE,
    Form.GATES,
    Form.ROW,
    Form.VALUE,
    Form.EMBED,
)
"""The forms of position that `attend_rows` reads, best first."""

_PAIRS = 2**22  # logits held at once, all heads and rows of the batch
_HELD = 2**23  # logits up to which the weights of all pieces are kept for the backward


def attend_rows(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b k m d"],
    v: Float[Tensor, "b k m v"],
    context: Context,
    weigh: Callable[[Tensor], Tensor],
    most: int = _PAIRS,
) -> Float[Tensor, "b h n v"]:
    """Outputs sum_j w_ij v_j with `w_i = weigh(s_i)` of the logits that softmax attention has.

    Queries are taken in pieces, and in training many pieces are computed again in the backward, so memory grows with n + m. An
    encoding that knows more of the tokens than their side cannot be cut: then there is one piece.

    Args:
        weigh: maps logits `[b h n m]`, -inf where a pair may not meet, to weights, 0 there; in the wider of float32 and the
            input's dtype.
        most: logits held at once.
    """
    encoding, keep = context.encoding, context.keys.keep
    if keep is not None:  # 0 times NaN would reach the output
        k, v = (torch.where(keep[:, None, :, None], part, torch.zeros_like(part)) for part in (k, v))
    v = v if encoding.turn is None else encoding.turn(v)
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    b, h, n = q.shape[:3]
    size = max(1, most // max(1, b * h * k.shape[2]))
    on_pairs = encoding.logits, encoding.row, encoding.values
    if size >= n or (encoding.rebind is None and any(part is not None for part in on_pairs)):
        out = piece(q, k, v, context, weigh)
    else:
        outs = []
        again = torch.is_grad_enabled() and b * h * n * k.shape[2] > _HELD
        for start in range(0, n, size):
            stop = min(start + size, n)
            reach = stop if context.plainly_causal else k.shape[2]
            part = _part(context, start, stop, reach)
            given = q[:, :, start:stop], k[:, :, :reach], v[:, :, :reach], part, weigh
            if again:
                outs.append(checkpoint(piece, *given, use_reentrant=False))
            else:
                outs.append(piece(*given))
        out = torch.cat(outs, dim=2)
    return out if encoding.turn_back is None else encoding.turn_back(out)


def weigh_by_softmax(logits: Float[Tensor, "... m"]) -> Float[Tensor, "... m"]:
    """Softmax over the last axis; a row of -inf only gives zeros, with zero gradient."""
    empty = logits.detach().amax(dim=-1, keepdim=True) == -torch.inf
    if known_to_be_none(empty):
        return torch.softmax(logits, dim=-1)
    return torch.softmax(logits.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)


def keep_from(logits: Float[Tensor, "... m"], least: Float[Tensor, "... 1"]) -> Float[Tensor, "... m"]:
    """Softmax over the logits from `least` on.

    Those that fall short of it by no more than rounding count as equal to it: a token that stands twice in a row has two equal
    keys, and no order of summation may decide between them.
    """
    held = logits.detach()
    lowest, largest = held.aminmax(dim=-1, keepdim=True)
    if not known_to_be_none(lowest == -torch.inf):
        lowest, largest = held.masked_fill(held == -torch.inf, 0.0).aminmax(dim=-1, keepdim=True)
    largest = torch.maximum(-lowest, largest).clamp(min=1.0)
    slack = 64 * torch.finfo(logits.dtype).eps * largest
    return weigh_by_softmax(logits.masked_fill(held < least - slack, -torch.inf))


def known_to_be_none(rows: Bool[Tensor, "..."]) -> bool:
    """Whether no row is, where a look costs nothing: on the CPU, and not in a trace. It saves passes over all logits."""
    return rows.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(rows.any())


def _part(context: Context, start: int, stop: int, reach: int) -> Context:
    """The same facts for queries start..stop-1 and the first `reach` keys."""
    queries, keys, encoding = context.queries.part(start, stop), context.keys.part(0, reach), context.encoding
    pair = (slice(None), slice(None), slice(start, stop), slice(0, reach))
    return replace(
        context,
        queries=queries,
        keys=keys,
        encoding=encoding if encoding.rebind is None else encoding.rebind(queries, keys),
        mask=None if context.mask is None else context.mask[pair],
        bias=None if context.bias is None else context.bias[pair],
    )


def piece(q: Tensor, k: Tensor, v: Tensor, context: Context, weigh: Callable[[Tensor], Tensor]) -> Tensor:
    """Outputs of all queries at once; keys and values come once for each query head."""
    encoding = context.encoding
    wide = torch.promote_types(torch.float32, q.dtype)
    scale = q.shape[-1] ** -0.5 if encoding.scale is None else encoding.scale
    logits = torch.einsum("bhnd,bhmd->bhnm", q.to(wide) * scale, k.to(wide))
    if context.softcap is not None:
        logits = context.softcap * torch.tanh(logits / context.softcap)
    if encoding.logits is not None:
        logits = logits + encoding.logits(q, k).to(wide)
    if context.bias is not None:
        logits = logits + context.bias.to(wide)
    allowed = pairs(context, q.shape[1])
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    if not logits.shape[-1]:
        return q.new_zeros(*q.shape[:-1], v.shape[-1])
    if encoding.row is not None:
        logits = encoding.row(q, k, logits)
        logits = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
    weights = F.dropout(weigh(logits), context.dropout)
    out = torch.einsum("bhnm,bhmv->bhnv", weights, v.to(wide))
    if encoding.values is not None:
        out = out + encoding.values(weights)
    return out.to(q.dtype)
