"""What a method costs by its formula, and by counting, beside dense softmax."""

from dataclasses import dataclass
from functools import partial

import torch

from anyformer.attention.base import Attention
from anyformer.compare.counted import counted
from anyformer.context import Context
from anyformer.cost import LEGEND, Cost, symbols
from anyformer.mixer.base import Mixer
from anyformer.model.build import build_attention, build_mixer, slot
from anyformer.model.initial import seeded
from anyformer.side import side
from anyformer.site import Site
from anyformer.spec import Spec

WIDTH = 64
"""Channels of a head."""
COUNTED = 2048
"""Most tokens of a forward that is counted: it runs for that."""


@dataclass(frozen=True)
class Costing:
    """One method at one length.

    Args:
        layer: whether its projections are included, as those of a mixer are.
        cost: None where it does not say.
        operations, dense_operations: by formula, a multiply-add as two; of dense softmax in the same frame.
        numbers, dense_numbers: made between inputs and outputs.
        counted: operations of one forward; None where it is too long.
    """

    layer: bool
    cost: Cost | None
    operations: int
    dense_operations: int
    numbers: int
    dense_numbers: int
    counted: int | None


def costing(spec: Spec, n: int, heads: int, *, causal: bool) -> Costing:
    """The costs of a method of the attention slot, built for n tokens."""
    site = Site(WIDTH * heads, heads, causal=causal, max_length=n)
    with torch.device("meta"):
        method, dense = _built(spec, site), _built(spec, site, dense=True)
    layer, (own, theirs) = isinstance(method, Mixer), (method.cost(), dense.cost())
    assert theirs is not None
    both = [each(n) for cost in (own or theirs, theirs) for each in (cost.multiply_adds, cost.numbers)]
    found = _counted(spec, site, n) if n <= COUNTED else None
    return Costing(layer, own, 2 * both[0], 2 * both[2], both[1], both[3], found)


def symbols_of(cost: Cost) -> dict[str, str]:
    """What the symbols of its formulas stand for, with the value of those that are no lengths."""
    known = cost.values
    found = {}
    for symbol in sorted(symbols(cost.products) | symbols(cost.memory), key=lambda each: (each not in LEGEND, each)):
        value = f" = {known[symbol]:g}" if symbol in known else ""
        found[symbol] = LEGEND.get(symbol, "knob") + value
    return found


def _built(spec: Spec, site: Site, *, dense: bool = False) -> Attention | Mixer:
    """The attention or mixer; dense softmax in the same frame."""
    if slot(spec)[0].kind == "mixer":
        return build_mixer("softmax" if dense else spec, "none", site, bias=False)
    return build_attention("softmax" if dense else spec, site)


def _counted(spec: Spec, site: Site, n: int) -> int:
    with seeded(0, "cost"):
        method = _built(spec, site).eval()
        x, q, k, v = torch.randn(1, n, site.dim), *torch.randn(3, 1, site.heads, n, site.head_dim)
    if isinstance(method, Mixer):
        flags = torch.zeros(1, n, dtype=torch.bool) if method.flag_ids else None  # a sample has no ids
        return counted(partial(method, x, global_mask=flags))
    tokens = side(n, x.device)
    context = Context(causal=site.causal, queries=tokens, keys=tokens, x=x)
    return counted(lambda: method(q, q if method.shares else k, v, context))
