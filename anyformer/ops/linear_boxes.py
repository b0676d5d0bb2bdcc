"""Linear attention on a grid with terms that are alike for all offsets within a rectangle: sums over rectangles from running sums.

Within a rectangle of offsets the factor exp(t_ij) of a pair falls apart into one of the query and one of the key, and a sum over a
rectangle of keys is four entries of their running sums over rows and columns. Time O(n f v) for each rectangle, memory O(n).
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.ops.recomputed import recomputed

NUMBERS = 1 << 24
"""Numbers of sums over rectangles, in float64, that are in memory at once."""


def box_sums(
    q: Float[Tensor, "b h y x f"],
    k: Float[Tensor, "b h y x f"],
    v: Float[Tensor, "b h y x v"],
    edges: Int[Tensor, "r 4"],
    of_query: Float[Tensor, "b h y x r"] | None,
    of_key: Float[Tensor, "b h y x r"] | None,
    values: Float[Tensor, "h r v"] | None = None,
    *,
    causal: bool,
) -> tuple[Float[Tensor, "b h y x v"], Float[Tensor, "b h y x"]]:
    """sum_j w_ij (v_j + values[r]) and sum_j w_ij for w_ij = (q_i . k_j) of_query[i, r] of_key[j, r], r the rectangle of j - i.

    Running sums are kept in float64, for what is read of them are differences. Keys that do not count are 0.

    Args:
        edges: for each rectangle the first and the last row and the first and the last column of the offsets of key minus query;
            they do not overlap, and where `causal` offset 0 lies on none but corners of them.
        of_query, of_key: factors of each token; None: 1.
        values: added to the values of the keys in a rectangle; None: nothing.
        causal: whether keys of earlier rows and of earlier or the same columns of the same row only, row by row.
    """
    v = torch.cat([v, v.new_ones(*v.shape[:4], 1)], dim=-1)
    boxes = [(r, tuple(each)) for r, each in enumerate(edges.tolist()) if not causal or _past(*each)]
    of_channel = k[..., 0].numel() * v.shape[4] * len(boxes)  # the backward of a part holds all of its rectangles
    channels, out = max(1, NUMBERS // max(of_channel, 1)), torch.zeros_like(v)
    for first in range(0, k.shape[4], channels):
        part = slice(first, first + channels)
        out = out + recomputed(_summed, q[..., part], k[..., part], v, boxes, of_query, of_key, values)
    return out[..., :-1], out[..., -1]


def _past(first_row: int, last_row: int, first_column: int, last_column: int) -> bool:
    return last_row < 0 or (first_row == last_row == 0 and last_column <= 0)


def _summed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    boxes: list[tuple[int, tuple[int, int, int, int]]],
    of_query: Tensor | None,
    of_key: Tensor | None,
    values: Tensor | None,
) -> Tensor:
    """The part of the sums that some channels of the features have, [b h y x v]."""
    out = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    whole, band, rows = (None if of_key is not None else _running(k, v)), None, None
    for r, (first, last, left, right) in boxes:
        sums = whole if of_key is None else _running(k * of_key[..., r, None], v)
        assert sums is not None
        if of_key is not None or band is None or rows != (first, last):
            band, rows = _between(sums, first, last, 2), (first, last)
        box = _between(band, left, right, 3)  # [b h y x f v]
        found = (q.unsqueeze(-2).to(box.dtype) @ box).squeeze(-2)
        found = found if of_query is None else found * of_query[..., r, None]
        out = out + found
        if values is not None:  # the last channel is the sum of the weights
            out = out + F.pad(found[..., -1:] * values[:, r, None, None].to(found.dtype), (0, 1))
    return out.to(v.dtype)


def _running(k: Tensor, v: Tensor) -> Tensor:
    """The sums of k_j v_j^T over all tokens above and left of each corner of the grid, [b h y+1 x+1 f v]."""
    products = k.to(torch.float64).unsqueeze(-1) * v.to(torch.float64).unsqueeze(-2)
    return F.pad(products.cumsum(2).cumsum(3), (0, 0, 0, 0, 1, 0, 1, 0))


def _between(sums: Tensor, first: int, last: int, axis: int) -> Tensor:
    """The sums over the offsets first to last of an axis, for each token on it."""
    count = sums.shape[axis] - 1
    index = torch.arange(count, device=sums.device)
    start, stop = (index + first).clamp(0, count), (index + last + 1).clamp(0, count)
    return sums.index_select(axis, stop) - sums.index_select(axis, start)
