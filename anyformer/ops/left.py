"""Real tokens moved to the left: what methods do that index slots and continue from a cache.

A cache appends at the end of the whole batch, so padding may stand between the real tokens of a row.
"""

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from anyformer.side import Side, left_order, take


def leftmost(keys: Side, *parts: Shaped[Tensor, "b m ..."]) -> tuple[Side, list[Tensor]]:
    """The keys and what belongs to them with the real tokens of each row first, so that the slot of each is its place."""
    if keys.keep is None:
        return keys, list(parts)
    order = left_order(keys.keep)
    return keys.take(order), [take(part, order) for part in parts]


def newest(
    x: Shaped[Tensor, "b t *rest"], count: int, keep: Bool[Tensor, "b n"] | None
) -> Shaped[Tensor, "b count *rest"]:
    """The last `count` real tokens of each row, where x is `count` earlier tokens, then n with real ones first."""
    if keep is None:
        return x[:, x.shape[1] - count :].clone()  # a view would keep every token alive
    return take(x, keep.sum(dim=1, keepdim=True) + torch.arange(count, device=x.device))
