"""Useful floating point operations: what a method's equation asks for, whatever an implementation spends on it."""

import torch

from anyformer.compare.bench_record import Contender, Measure, Setting
from anyformer.model.build import slot
from anyformer.pattern import Facts
from anyformer.pattern.base import Pattern
from anyformer.pattern.read import pattern_of
from anyformer.spec import Spec

_BLOCK = 64  # side of the tiles that pairs are counted in
_MOST = 2**15  # tiles that are looked into pair by pair
_FORWARD = {"pairs": 2, "products": 1}
"""Products of queries with keys and weights with values; a product with a weight or a state once."""
_BACKWARD = {"pairs": 5, "products": 2}
"""The weights once more, and the gradients of values, weights, queries and keys; two gradients of a plain product."""


def useful(contender: Contender, setting: Setting, length: int) -> dict[Measure, float] | None:
    """Operations of each kind of call, a multiply-add as two; None where the method has no formula here.

    Softmax attention over P allowed pairs (all heads, all rows of the batch) takes 2 * 2 d P forward and 5 * 2 d P backward, the
    weights computed again there as every implementation without an n x n tensor does. A layer adds four projections.
    """
    if contender.role == "peer":
        return None
    pairs = products = 0.0
    rows = setting.batch * setting.heads
    name, knobs = ("softmax", {}) if contender.role == "dense" else _spec(contender.attention)
    if name == "softmax":
        found = knobs.get("pattern")
        if found is None:
            pairs = rows * (length * (length + 1) // 2 if setting.causal else length**2)
        else:
            assert isinstance(found, Spec)
            pairs = setting.batch * count(pattern_of(found), length, setting.heads, causal=setting.causal)
    elif name == "linear" and not knobs:  # another feature map may be wider
        products = 2 * rows * length * setting.head_dim**2
    elif name == "linformer":
        rank = knobs.get("rank", 64)
        assert isinstance(rank, int)
        pairs = rows * length * rank
        products = 2 * pairs * setting.head_dim
    else:
        return None
    if setting.what == "layer":
        products += 4 * setting.batch * length * setting.dim**2
    forward, backward = (
        2.0 * (share["pairs"] * pairs * setting.head_dim + share["products"] * products)
        for share in (_FORWARD, _BACKWARD)
    )
    return {"forward": forward, "forward_backward": forward + backward}


def count(pattern: Pattern, length: int, heads: int, *, causal: bool) -> int:
    """Allowed pairs of all heads, exactly: whole tiles by their size, the others pair by pair."""
    layout = pattern.blocks(length, _BLOCK, heads=heads, causal=causal)
    some = (~layout.whole).nonzero()[:, 0]
    if len(some) > _MOST:
        return round(pattern.density(length, heads=heads, causal=causal) * length * length * heads)
    group, row, column = layout.tiles()
    inside = [(length - part * _BLOCK).clamp(max=_BLOCK) for part in (row, column)]
    total = int((inside[0] * inside[1])[layout.whole].sum())
    order = torch.arange(length) if layout.order is None else layout.order
    facts, slots = Facts(length=length, causal=causal), torch.arange(_BLOCK)
    for part in some.split(1024):
        q, k = row[part, None] * _BLOCK + slots, column[part, None] * _BLOCK + slots
        real = (q < length)[:, :, None] & (k < length)[:, None, :]
        q, k = (order[each.clamp(max=length - 1)] for each in (q, k))
        head = group[part, None, None]
        met = pattern.allows(torch.zeros_like(head), head, q[:, :, None], k[:, None, :], facts)
        total += int((met & real).sum())
    return total * (heads // layout.heads)


def _spec(text: str) -> tuple[str, dict[str, object]]:
    spec = slot(text)[1]
    return spec.name, dict(spec.knobs)
