"""Channels turned pair by pair, shared by every rotary encoding."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Pairing = Literal["half", "interleaved"]
"""Which channels turn together: "half" (l, l + d/2) as in Llama and NeoX, "interleaved" (2l, 2l + 1) as in the paper."""


def turned(
    x: Float[Tensor, "b h n d"], cos: Float[Tensor, "#b #h n f"], sin: Float[Tensor, "#b #h n f"], pairing: Pairing
) -> Float[Tensor, "b h n d"]:
    """The first 2 f channels of x turned pair by pair, in the dtype of cos and sin; the result has x's dtype."""
    width = 2 * cos.shape[-1]
    rotated = x[..., :width].to(cos.dtype)
    first, second = pairs_of(rotated, pairing)
    pair = first * cos - second * sin, first * sin + second * cos
    out = (torch.cat(pair, dim=-1) if pairing == "half" else torch.stack(pair, dim=-1).flatten(-2)).to(x.dtype)
    return out if width == x.shape[-1] else torch.cat([out, x[..., width:]], dim=-1)


def pairs_of(x: Float[Tensor, "*t d"], pairing: Pairing) -> tuple[Float[Tensor, "*t f"], Float[Tensor, "*t f"]]:
    """The first and the second channels of the pairs."""
    first, second = x.chunk(2, dim=-1) if pairing == "half" else x.unflatten(-1, (-1, 2)).unbind(-1)
    return first, second
