"""What attentions share whose weights are products of features: how the terms of positions join them."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.attention._by_offset import by_band, by_boxes, by_curve
from anyformer.attention._fading import by_distance, running
from anyformer.attention._pairwise import pairwise
from anyformer.attention._products import Products
from anyformer.context import Context
from anyformer.forms import Form
from anyformer.ops.draws import generator
from anyformer.ops.linear_tiles import CHUNK, Rule

KEYED = frozenset({Form.TOEPLITZ, Form.GRID, Form.CLIPPED, Form.BOXES})
"""Forms whose factors change with every new query, so that nothing less than all keys continues a sequence."""

REFUSAL = (
    "the weight of a pair is a product of features, so that a term of the pair must fall apart into few factors of query, key and "
    "offset; use an encoding that is added at the embedding, rotates, fades, or has a bias by offset or vectors of clipped "
    "offsets, such as sinusoidal, rope, alibi, t5 or shaw"
)


def attend(
    q: Float[Tensor, "b h n f"],
    k: Float[Tensor, "b k m f"],
    v: Float[Tensor, "b k m v"],
    context: Context,
    *,
    raw: tuple[Float[Tensor, "b h n d"], Float[Tensor, "b k m d"]] | None = None,
    log_decay: Float[Tensor, " h"] | Float[Tensor, "#b #h m"] | None = None,
    q_den: Float[Tensor, "b h n e"] | None = None,
    k_den: Float[Tensor, "b k m e"] | None = None,
    normalise: bool = True,
    eps: float = 1e-6,
    signed: bool = False,
    elu1: bool = False,
) -> Float[Tensor, "b h n v"]:
    """Linear attention over the pairs of the context, each weight times exp of the encoding's terms, between TURN and its way back.

    Args:
        raw: queries and keys as the encoding's terms read them; None: q and k.
        elu1: whether q and k are still to be mapped to elu(x) + 1.
    """
    encoding = context.encoding
    v = v if encoding.turn is None else encoding.turn(v)
    counted = None if q_den is None or k_den is None else (q_den, k_den)
    rule = Rule("elu1" if elu1 else "given", False, "divide" if normalise else "none", eps, signed, CHUNK)
    x = Products(q, k, v, (q, k) if raw is None else raw, counted, log_decay, rule)
    x = x if encoding.gates is None else x.fading(encoding.gates)
    out = _summed(x, context)
    return out if encoding.turn_back is None else encoding.turn_back(out)


def _summed(x: Products, context: Context) -> Float[Tensor, "b h n v"]:
    """The outputs, by the way of summing that the encoding's form has."""
    if context.encoding.forms & {Form.TOEPLITZ, Form.GRID}:
        return by_curve(x, context)
    if context.encoding.clip is not None:
        return by_band(x, context)
    if context.encoding.boxes is not None:
        return by_boxes(x, context)
    if context.encoding.rates is None:
        return running(x, context)
    fade = by_distance(context, x.k.shape[2])
    return pairwise(x, context) if fade is None else running(x.fading(fade), context)


def widened(rows: Float[Tensor, "k r d"], width: int, seed: int, *role: object) -> Float[Tensor, "k r w"]:
    """Random rows with standard normal columns for what an encoding appends to queries and keys, each time the same."""
    count = width - rows.shape[2]
    if rows.is_meta or not count:
        return rows if not count else rows.new_empty(*rows.shape[:2], width)
    drawn = [
        torch.randn(rows.shape[1], count, generator=generator(seed, *role, "columns", head))
        for head in range(len(rows))
    ]
    return torch.cat([rows, torch.stack(drawn).to(rows)], dim=2)


@torch.no_grad()
def draw(
    rows: Float[Tensor, "k r d"], make: Callable[[int, int, torch.Generator], Tensor], seed: int, *role: object
) -> None:
    """Draw the random rows of each head in place; on the meta device there is nothing to draw."""
    if not rows.is_meta:
        for head, own in enumerate(rows):
            own.copy_(make(own.shape[0], own.shape[1], generator(seed, *role, head)))


def fresh_seed() -> int:
    """A seed from the global generator, for rows that training wants to draw anew."""
    return int(torch.randint(2**62, ()))
