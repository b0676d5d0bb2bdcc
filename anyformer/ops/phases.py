"""Angles of geometrically spaced frequencies, shared by every encoding made of sines and cosines."""

import torch
from jaxtyping import Float64, Int
from torch import Tensor


def phases(positions: Int[Tensor, "*p"], width: int, base: float) -> Float64[Tensor, "*p f"]:
    """Angles in radians, `positions * base ** (-2 l / width)` for 0 <= l < width / 2 (rounded up).

    In float64, because float32 is wrong by 0.05 radians at position 1,000,000 and bfloat16 holds integers to 256 only.
    Elementwise, because autocast would run a matrix product in half precision.

    Args:
        width: channels that the angles fill, two to an angle.
        base: the slowest wave turns once in about 2 pi * base positions.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / -width
    return positions[..., None] * base**exponents
