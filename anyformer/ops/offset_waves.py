"""Queries that meet a projection of the offset's sinusoids, `x_i . W R(i - j)` with R(t) = [sin t w | cos t w].

By offset it costs s h d (c + n) for the s offsets there are. By the identity, with g = W^T x_i = [g_s | g_c],

    x_i . W R(i - j) = psi_i . R(j),    psi_i = [g_c sin iw - g_s cos iw | g_s sin iw + g_c cos iw],

it costs n h c (d + m), and each side knows one position only.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.ops.phases import phases


def waves(positions: Int[Tensor, "*p"], width: int, base: float, dtype: torch.dtype) -> Float[Tensor, "*p c"]:
    """R(positions), of an even width."""
    angles = phases(positions, width, base)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)


def offset_keys(weight: Float[Tensor, "h d c"], offsets: Int[Tensor, "r"], base: float) -> Float[Tensor, "h r d"]:
    """`W R(-offset)` of each head, for offsets of key minus query; in the wider of float32 and the weight's dtype."""
    wide = torch.promote_types(torch.float32, weight.dtype)
    return waves(-offsets, weight.shape[-1], base, wide) @ weight.to(wide).mT


def offset_columns(
    x: Float[Tensor, "b h n d"], weight: Float[Tensor, "h d c"], q_pos: Int[Tensor, "#b n"], base: float
) -> Float[Tensor, "b h n c"]:
    """psi of the identity."""
    g_sin, g_cos = (x @ weight.to(x.dtype)).chunk(2, dim=-1)
    sin, cos = waves(q_pos, weight.shape[-1], base, x.dtype)[:, None].chunk(2, dim=-1)
    return torch.cat([g_cos * sin - g_sin * cos, g_sin * sin + g_cos * cos], dim=-1)


def offset_products(
    x: Float[Tensor, "b h n d"],
    weight: Float[Tensor, "h d c"],
    q_pos: Int[Tensor, "#b n"],
    k_pos: Int[Tensor, "#b m"],
    base: float,
    clip: int | None = None,
) -> Float[Tensor, "b h n m"]:
    """`x_i . W R(i - j)` of every pair, the cheaper way.

    Args:
        clip: bound of the offset in both directions; None: none. The identity does not hold with one.
    """
    span = cheap_span(x, weight.shape[-1], q_pos, k_pos) if clip is None else (-clip, clip)
    if span is None:
        return offset_columns(x, weight, q_pos, base) @ waves(k_pos, weight.shape[-1], base, x.dtype)[:, None].mT
    low, high = span
    keys = offset_keys(weight, torch.arange(low, high + 1, device=x.device), base).to(x.dtype)
    index = (k_pos[:, None, None, :] - q_pos[:, None, :, None]).clamp(low, high) - low
    return (x @ keys.mT).gather(-1, index.long().expand(*x.shape[:3], k_pos.shape[1]))


def cheap_span(
    x: Float[Tensor, "b h n d"], width: int, q_pos: Int[Tensor, "#b n"], k_pos: Int[Tensor, "#b m"]
) -> tuple[int, int] | None:
    """The least and greatest offset of key minus query, where going by offset costs less than the identity."""
    (b, _, n, d), m = x.shape, k_pos.shape[1]
    if n * m == 0 or torch.compiler.is_compiling() or q_pos.is_meta:  # sizes must not come from values there
        return None
    low, high = int(k_pos.min() - q_pos.max()), int(k_pos.max() - q_pos.min())
    by_offset = (high - low + 1) * d * (width + b * n)
    return (low, high) if by_offset < b * n * width * (d + m) else None
