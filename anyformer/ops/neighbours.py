"""Convolutions over tokens that need not fill a rectangle: each token's neighbours by slot, in a line or on a grid."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from anyformer.side import take

Padding = Literal["zeros", "reflect", "circular"]
"""What lies beyond the ends of a line: nothing, the line mirrored (its end not repeated), or its other end."""


def in_line(
    length: int,
    back: int,
    ahead: int,
    *,
    real: Int[Tensor, "b 1"],
    padding: Padding = "zeros",
) -> Int[Tensor, "b n t"]:
    """Slots of the neighbours `back` before to `ahead` after each of `length` tokens, -1 where there is none.

    Args:
        real: how many tokens each row has, the first ones.
    """
    device = real.device
    slot = torch.arange(length, device=device)[:, None] + torch.arange(-back, ahead + 1, device=device)  # [n t]
    count = real[:, :, None]
    inside = (slot >= 0) & (slot < count)
    if padding == "circular":
        return torch.where(count > 0, slot % count.clamp(min=1), -1)
    if padding == "reflect":
        period = (2 * count - 2).clamp(min=1)
        folded = slot % period
        return torch.where(count > 0, torch.minimum(folded, period - folded).clamp(max=count - 1), -1)
    return torch.where(inside, slot, -1)


def on_grid(positions: Int[Tensor, "b n 2"], reach: int, present: Bool[Tensor, "b n"]) -> Int[Tensor, "b n t"]:
    """Slots of the tokens up to `reach` rows and columns away, row by row, -1 where no present token has that place.

    Of several tokens in one place any one is read.
    """
    n = present.shape[1]
    step = torch.arange(-reach, reach + 1, device=positions.device)
    if not n:
        return positions.new_zeros(len(present), 0, len(step) ** 2)
    row, column = (part - part.amin(dim=1, keepdim=True) + reach for part in positions.long().unbind(-1))
    width = column.amax(dim=1, keepdim=True) + reach + 1  # so wide that no neighbour wraps around
    place = row * width + column
    ordered, order = torch.where(present, place, -1).sort(dim=1)
    wanted = place[:, :, None] + (step[:, None] * width[:, :, None] + step).flatten(1)[:, None]
    found = torch.searchsorted(ordered, wanted.flatten(1)).clamp(max=n - 1)
    hit = ordered.gather(1, found) == wanted.flatten(1)
    return torch.where(hit, order.gather(1, found), -1).unflatten(1, (n, -1))


def gathered(x: Float[Tensor, "b n c"], slots: Int[Tensor, "b m t"]) -> Float[Tensor, "b m t c"]:
    """The tokens of the given slots, 0 for -1."""
    if not x.shape[1]:
        return x.new_zeros(len(x), slots.shape[1], slots.shape[2], x.shape[2])
    found = take(x, slots.clamp(min=0).flatten(1)).unflatten(1, slots.shape[1:])
    return found.masked_fill(slots[..., None] < 0, 0.0)


def real_tokens(x: Shaped[Tensor, "b n *rest"], keep: Bool[Tensor, "b n"] | None) -> Int[Tensor, "b 1"]:
    """How many tokens each row has."""
    if keep is not None:
        return keep.sum(dim=1, keepdim=True)
    return torch.full((len(x), 1), x.shape[1], device=x.device)
