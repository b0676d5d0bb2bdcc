"""Random structure without a random generator: a hash of integers, and distinct draws made from it.

Everything is int64 arithmetic that never overflows, so a draw is the same number on every device, in every process, in
training and in evaluation. Tensors may have any shape, none included.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

Number = TypeVar("Number", int, Tensor)

_BITS = 0xFFFFFFFF
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)  # below 2**31 in size: a product with 32 bits fits into int64
_START = 0x9E3779B9


def mix(x: Number) -> Number:
    """A bijection of 32-bit numbers that spreads every input bit over all output bits.

    Source: the constants of `lowbias32`, C. Wellons, Hash Prospector, 2018.
    """
    x = x & _BITS
    x = ((x ^ (x >> 16)) * _FIRST) & _BITS
    x = ((x ^ (x >> 15)) * _SECOND) & _BITS
    return x ^ (x >> 16)


def row_key(root: tuple[int, ...], head: Int[Tensor, "..."], row: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """One 32-bit key for each row of each head.

    Args:
        root: whole numbers that the draws are to depend on: what is drawn, seeds, the layer.
        head, row: numbers of the head and of the row; they broadcast.
    """
    key = mix(_START)
    for part in root:
        key = mix(key ^ (part & _BITS))
    return mix(mix(key ^ head.long()) ^ (row.long() & _BITS))


def pick(key: Int[Tensor, "..."], count: int, span: Int[Tensor, "..."]) -> list[Tensor]:
    """`count` different numbers of range(span), every set of them equally likely; all of them where span <= count.

    Floyd's sampling: draw i is uniform on 0..j with j = span - count + i, and a number drawn before is replaced by j,
    which no earlier draw can have been. (R. Floyd in J. Bentley, Programming Pearls, 1987.)

    Args:
        key: 32-bit key of each row.
        count: how many draws.
        span: size of the range, at most 2**31; broadcasts with `key`.

    Returns:
        `count` tensors, one a draw; -1 where there is nothing left to draw.
    """
    chosen: list[Tensor] = []
    for i in range(count):
        newest = span - count + i
        draw = (mix(key ^ (i + 1)) * (newest + 1).clamp(min=0)) >> 32
        for earlier in chosen:
            draw = torch.where(draw == earlier, newest, draw)
        chosen.append(torch.where(newest < 0, -1, draw))
    return chosen


def pick_outside(
    key: Int[Tensor, "..."],
    count: int,
    low: int,
    high: Int[Tensor, "..."],
    holes: Sequence[tuple[Tensor, Tensor]] = (),
) -> list[Tensor]:
    """`pick` from low..high, both included, without the numbers inside `holes`.

    Args:
        holes: (start, width) of ranges inside low..high, ascending and disjoint; a width of 0 is no hole.
    """
    span = high - low + 1
    for _, width in holes:
        span = span - width
    found = []
    for draw in pick(key, count, span.clamp(min=0)):
        target = draw + low
        for start, width in holes:
            target = torch.where(target >= start, target + width, target)
        found.append(torch.where(draw < 0, -1, target))
    return found


def any_equal(targets: list[Tensor], k: Int[Tensor, "..."]) -> Bool[Tensor, "..."]:
    """Whether k is one of the targets; a target of -1 is none."""
    if _table_pays(targets, k):
        return _looked_up(targets, k)
    met = k.new_zeros((), dtype=torch.bool)
    for target in targets:
        met = met | ((target == k) & (target >= 0))
    return met


def _table_pays(targets: list[Tensor], k: Int[Tensor, "..."]) -> bool:
    """Whether every target is asked for a whole row of numbers, so that marking them once is cheaper than as many comparisons."""
    if len(targets) < 2 or not k.dim() or k.shape[-1] < 64 or torch.compiler.is_compiling() or type(k) is not Tensor:
        return False
    return k.numel() == k.shape[-1] and not k.is_meta and all(each.dim() and each.shape[-1] == 1 for each in targets)


def _looked_up(targets: list[Tensor], k: Int[Tensor, "..."]) -> Bool[Tensor, "..."]:
    numbers = k.flatten()
    low, high = (int(each) for each in numbers.aminmax())
    drawn = torch.cat(torch.broadcast_tensors(*targets), dim=-1) - low
    drawn = torch.where((drawn >= 0) & (drawn <= high - low) & (drawn + low >= 0), drawn, high - low + 1)
    marked = torch.zeros(*drawn.shape[:-1], high - low + 2, dtype=torch.bool, device=k.device)
    marked.scatter_(-1, drawn, True)
    found = marked.index_select(-1, numbers - low)
    return found.view(*(1,) * (k.dim() - found.dim()), *found.shape)
