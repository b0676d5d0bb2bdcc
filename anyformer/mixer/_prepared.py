"""What an encoding reads of tokens besides their position, made once for each token and kept beside its key."""

from jaxtyping import Float
from torch import Tensor

from anyformer.context import LayerCache
from anyformer.mixer.base import put_back
from anyformer.position.base import Position
from anyformer.side import Side, left_order, take

_STATE = "position "


def prepared(
    position: Position, x: Float[Tensor, "b t c"], tokens: Side, cache: LayerCache | None, *, slots: bool
) -> Float[Tensor, "b m w"] | None:
    """The facts of the tokens of x, after those of earlier tokens where a cache holds keys; None where none are read.

    Args:
        x: what keys are made of, padding as zeros.
        slots: whether the cache remembers keys.
    """
    if not position.reads_tokens:
        return None
    order = None if tokens.keep is None else left_order(tokens.keep)
    if order is not None:
        x, tokens = take(x, order), tokens.take(order)
    held = {} if cache is None else cache.state
    state = {name.removeprefix(_STATE): part for name, part in held.items() if name.startswith(_STATE)}
    facts = position.prepare(x, tokens, None if cache is None else state)
    if order is not None:
        facts = put_back(facts, order)
    if cache is not None:
        cache.state |= {_STATE + name: part for name, part in state.items()}
        facts = cache.extend("facts", facts) if slots else facts
    return facts
