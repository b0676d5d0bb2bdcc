"""Softmax attention under a pattern with terms that only pairs know, a few rows of logits at a time.

An encoding that is no table over offsets (FIRE's bias, two axes, positions of the user's own, FoX's gates) gives a number for
each pair. A piece of rows asks it for the keys that the pattern leaves these rows and no others, and the backward asks again: time
follows the blocks kept, and no tensor of all pairs is made.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from anyformer.attention._rows import piece, weigh_by_softmax
from anyformer.context import Context
from anyformer.forms import Form
from anyformer.ops.gates import last_seen
from anyformer.ops.softmax import repeat_heads
from anyformer.pattern.base import Pattern
from anyformer.pattern.layout import BlockLayout
from anyformer.pattern.pairs import facts
from anyformer.side import Side

_BLOCK = 64
_MOST_ROWS = 512
_PAIRS = 2**22  # logits held at once, all heads and rows of the batch
_OF_ONE = 2**18  # and those of one head, because an encoding may hold dozens of numbers for each pair
_WORTH = 2**20  # pairs of one head below which all of them at once are small enough


def pays(q: Tensor, k: Tensor, context: Context) -> bool:
    """Whether "auto" takes pieces: where a term of pairs would need a large tensor of all of them, and can be cut."""
    encoding, pattern, (n, m) = context.encoding, context.pattern, (q.shape[2], k.shape[2])
    if not isinstance(pattern, Pattern) or n * m < _WORTH or torch.compiler.is_compiling():
        return False
    if context.cache is not None or not context.aligned:
        return False
    if encoding.row is not None and not context.causal:
        return False  # it reads the keys up to that of the last query
    on_pairs = any(term is not None for term in (encoding.logits, encoding.values, encoding.row))
    cut = encoding.rebind is not None or encoding.between is not None or _gates_alone(context)
    return on_pairs and cut


def run(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b k m d"],
    v: Float[Tensor, "b k m v"],
    context: Context,
    scale: float,
    most: int | None = None,
) -> Float[Tensor, "b h n v"]:
    """The same as the dense reference; keys and values of padding are 0 already.

    Args:
        most: logits held at once; None: 4 million.
    """
    pattern, (b, h, n, _), m = context.pattern, q.shape, k.shape[2]
    assert isinstance(pattern, Pattern)
    layout = pattern.blocks(n, _BLOCK, m, heads=h, causal=context.causal, facts=facts(context), reorder=False)
    encoding = replace(context.encoding, scale=scale)
    sums = _gate_sums(context) if Form.GATES in encoding.forms else None
    k, v = repeat_heads(k, h), repeat_heads(v, h)
    weigh = weigh_by_softmax if context.sink is None else partial(_weigh_with_sink, context.sink)
    outs = []
    for start, stop, slots in _cut(layout, min(_OF_ONE, (_PAIRS if most is None else most) // (b * h))):
        if context.causal:
            slots = slots[slots < stop + m - n]
        if encoding.between is not None and len(slots):  # its pattern leaves no gap
            slots = torch.arange(int(slots[0]), stop + m - n)

        def attend(
            q: Tensor, k: Tensor, v: Tensor, start: int = start, stop: int = stop, slots: Tensor = slots
        ) -> Tensor:
            part = _part(replace(context, encoding=encoding), start, stop, slots, h, sums)
            return piece(q[:, :, start:stop], k[:, :, slots], v[:, :, slots], part, weigh)

        if torch.is_grad_enabled():
            preserve = bool(context.dropout)
            outs.append(checkpoint(attend, q, k, v, use_reentrant=False, preserve_rng_state=preserve))
        else:
            outs.append(attend(q, k, v))
    return torch.cat(outs, dim=2)


def _cut(layout: BlockLayout, most: int) -> Iterator[tuple[int, int, Int[Tensor, "s"]]]:
    """Rows start..stop-1, whole blocks of them, and the slots of the keys that any head or sample of them may meet."""
    offsets, blocks = layout.offsets, -(-layout.n // _BLOCK)
    met = torch.zeros(-(-layout.m // _BLOCK), dtype=torch.bool)
    inside, first = torch.arange(_BLOCK), 0
    for block in range(blocks):
        more = met.clone()
        for low, high in offsets[:, block : block + 2].tolist():
            more[layout.keys[low:high].long()] = True
        rows = (block + 1 - first) * _BLOCK
        if block > first and (rows > _MOST_ROWS or rows * int(more.sum()) * _BLOCK > most):
            yield first * _BLOCK, block * _BLOCK, _slots(met, inside, layout.m)
            first, more = block, more & False
            for low, high in offsets[:, block : block + 2].tolist():
                more[layout.keys[low:high].long()] = True
        met = more
    yield first * _BLOCK, layout.n, _slots(met, inside, layout.m)


def _slots(met: Bool[Tensor, "blocks"], inside: Int[Tensor, "block"], m: int) -> Int[Tensor, "s"]:
    slots = (met.nonzero() * _BLOCK + inside).flatten()
    return slots[slots < m]


def _part(
    context: Context, start: int, stop: int, slots: Int[Tensor, "s"], heads: int, sums: tuple[Tensor, Tensor] | None
) -> Context:
    """The facts of queries start..stop-1 and the keys of these slots, pattern and causality as a mask."""
    slots = slots.to(context.keys.places.device)
    queries, keys = context.queries.part(start, stop), _taken(context.keys, slots)
    allowed = _allowed(context, queries, keys, heads)
    own, bias = (None if x is None else _rows_and_columns(x, start, stop, slots) for x in (context.mask, context.bias))
    encoding = context.encoding
    if encoding.between is not None:
        start = int(slots[0]) if len(slots) else 0
        encoding = replace(encoding.between(queries, keys, start), scale=encoding.scale)
    elif sums is not None:
        of_queries, of_keys = sums[0][:, :, start:stop, None], sums[1][:, :, None, slots]
        encoding = replace(
            encoding, logits=lambda q, k: (of_queries - of_keys).to(torch.promote_types(torch.float32, q.dtype))
        )
    elif encoding.rebind is not None:
        encoding = replace(encoding.rebind(queries, keys), scale=encoding.scale)
    return replace(
        context,
        pattern=None,
        causal=False,
        queries=queries,
        keys=keys,
        mask=allowed if own is None else allowed & own,
        bias=bias,
        encoding=encoding,
        tokens=None,
        x=None,
    )


def _allowed(context: Context, queries: Side, keys: Side, heads: int) -> Bool[Tensor, "#b #h n m"]:
    """The pairs that the pattern leaves, causality included; what it knows is of all tokens."""
    assert isinstance(context.pattern, Pattern)
    q, k = queries.places[:, None, :, None], keys.places[:, None, None, :]
    batch = torch.arange(max(queries.batch, keys.batch), device=q.device)[:, None, None, None]
    head = torch.arange(heads, device=q.device)[:, None, None]
    return context.pattern.allows(batch, head, q, k, facts(context))


def _weigh_with_sink(sink: Float[Tensor, " h"], logits: Float[Tensor, "b h n m"]) -> Float[Tensor, "b h n m"]:
    column = sink.to(logits.dtype)[:, None, None].expand(*logits.shape[:3], 1)
    return weigh_by_softmax(torch.cat([logits, column], dim=-1))[..., :-1]


def _taken(tokens: Side, slots: Int[Tensor, "s"]) -> Side:
    return tokens.take(slots.expand(tokens.batch, -1))


def _rows_and_columns(x: Tensor, start: int, stop: int, slots: Int[Tensor, "s"]) -> Tensor:
    return x[:, :, start:stop][..., slots]


def _gates_alone(context: Context) -> bool:
    """Whether gates are the only term of pairs, of tokens that all have a position."""
    encoding = context.encoding
    others = encoding.forms - {Form.GATES, Form.EMBED, Form.SHIFT, Form.ROTATE, Form.TURN}
    placed = context.queries.without is None and context.keys.without is None
    return encoding.gates is not None and not others and placed


def _gate_sums(context: Context) -> tuple[Float[Tensor, "b h n"], Float[Tensor, "b h m"]]:
    """Sums of the gates up to each query and each key, in float64; see `gate_sums`, which subtracts them for all pairs."""
    assert context.encoding.gates is not None
    sums = context.encoding.gates.to(torch.float64).cumsum(dim=-1)
    if context.queries is context.keys:
        return sums, sums
    last = last_seen(context.queries.places, context.keys.places).clamp(min=0)[:, None]
    return sums.gather(-1, last.expand(*sums.shape[:2], -1)), sums
