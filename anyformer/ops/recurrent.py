"""Recurrences over rows of different lengths, real tokens first in each row."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def last(
    hidden: Float[Tensor, "b n w"], keep: Bool[Tensor, "b n"] | None, start: Float[Tensor, "b w"] | None
) -> Float[Tensor, "b w"]:
    """The state after each row's last real token; `start` (None: zeros) where it has none. Real tokens come first."""
    if keep is None:
        return hidden[:, -1].clone()  # a view would keep every state alive
    start = torch.zeros_like(hidden[:, 0]) if start is None else start
    states = torch.cat([start[:, None], hidden], dim=1)
    return states[torch.arange(len(states), device=states.device), keep.sum(dim=1)]


def backwards(hidden: Float[Tensor, "b n w"], keep: Bool[Tensor, "b n"] | None) -> Int[Tensor, "b n"]:
    """The slots of each row with its real tokens in reverse and padding where it was; its own inverse."""
    b, n = hidden.shape[:2]
    slots = torch.arange(n, device=hidden.device).expand(b, n)
    lengths = n if keep is None else keep.sum(dim=1, keepdim=True)
    return torch.where(slots < lengths, lengths - 1 - slots, slots)
