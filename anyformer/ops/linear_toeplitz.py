"""Linear attention whose weights have a factor of the offset: sums over keys by fast Fourier transforms, in O(n log^2 n) time.

With a curve c over offsets, sum_j c[j - i] (q_i . k_j) v_j is, for each channel of the keys and each of the values, a convolution
of their product with the curve. Near the diagonal pairs are multiplied out, for a transform costs as much as thousands of pairs;
and where no query may see a later key, transforms run between whole blocks of the past only: rounding would else bring the future
into the past.

Paper: Luo et al. 2021, 2106.12566.
"""

import math
from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from anyformer.ops.node import node
from anyformer.ops.skew import by_offset

Reach = Literal["both", "past", "future"]

ROWS = 128
"""Queries whose pairs are multiplied out at once."""

PAIRS = 1 << 22
"""Pairs, or numbers of a transform, that are in memory at once."""

WORTH = 60.0
"""Multiply-adds in the time that a transform takes for one number and one doubling of its length, measured on a CPU."""


def toeplitz_sums(
    q: Float[Tensor, "b h n f"],
    k: Float[Tensor, "b h n f"],
    v: Float[Tensor, "b h n v"],
    curve: Float[Tensor, "h r"],
    *,
    causal: bool,
    chunk: int | None = None,
) -> Float[Tensor, "b h n v"]:
    """out_i = sum_j curve[j - i] (q_i . k_j) v_j, over j <= i where `causal`.

    Gradients of all four, to any order, in the same time and O(n) memory. With ones for values it is the denominator.

    Args:
        curve: one factor for each head and offset from 1 - n to n - 1.
        chunk: tokens up to which pairs are multiplied out; None: as many as cost less than a transform. Changes speed and
            rounding only.

    Raises:
        ValueError: the curve has another number of offsets.
    """
    n = q.shape[2]
    if curve.shape[1] != max(2 * n - 1, 0):
        raise ValueError(f"curve: expected a factor for each of {max(2 * n - 1, 0)} offsets, got {curve.shape[1]}")
    reach = "past" if causal else "both"
    if torch.compiler.is_exporting():
        return toeplitz_dense(q, k, v, curve, causal=causal)
    size = _chunk(q.shape[3], v.shape[3]) if chunk is None else chunk
    return toeplitz_forward(q, k, v, curve, reach, size)


def toeplitz_dense(
    q: Float[Tensor, "b h n f"],
    k: Float[Tensor, "b h n f"],
    v: Float[Tensor, "b h n v"],
    curve: Float[Tensor, "h r"],
    *,
    causal: bool,
) -> Float[Tensor, "b h n v"]:
    """`toeplitz_sums` written out, in O(n^2) memory: the reference, and what is exported."""
    index = torch.arange(q.shape[2], device=q.device)
    offsets = index[None, :] - index[:, None]
    factors = curve[:, offsets + q.shape[2] - 1]
    factors = factors.masked_fill(offsets > 0, 0.0) if causal else factors
    return (q @ k.mT * factors) @ v


def run_forward(q: Tensor, k: Tensor, v: Tensor, curve: Tensor, reach: str, chunk: int) -> Tensor:
    """`toeplitz_sums` over the keys of `reach`."""
    if reach == "future":
        return run_forward(q.flip(2), k.flip(2), v.flip(2), curve.flip(1), "past", chunk).flip(2)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
    for part in _parts(q.shape[2], reach, chunk):
        if part.near:
            _near(part, q, k, v, curve, out)
        else:
            _far(part, q, k, v, curve, out)
    return out


def run_curve(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, reach: str, chunk: int) -> Tensor:
    """The gradient of the curve: sum_i (q_i . k_(i + r)) (d_out_i . v_(i + r)) for each offset r."""
    if reach == "future":
        return run_curve(q.flip(2), k.flip(2), v.flip(2), d_out.flip(2), "past", chunk).flip(1)
    grad = torch.zeros(q.shape[1], max(2 * q.shape[2] - 1, 0), dtype=q.dtype, device=q.device)
    for part in _parts(q.shape[2], reach, chunk):
        if part.near:
            _near_curve(part, q, k, v, d_out, grad)
        else:
            _far_curve(part, q, k, v, d_out, grad)
    return grad


class _Part:
    """Blocks of `size` tokens: each with itself (near), or with the block before it, of every other pair of blocks."""

    def __init__(self, n: int, size: int, near: bool, causal: bool):
        self.n, self.size, self.near, self.causal = n, size, near, causal
        self.blocks = -(-n // size)

    def cut(self, x: Tensor) -> Tensor:
        """[b h n w] -> [b h t size w]."""
        x = F.pad(x, (0, 0, 0, self.blocks * self.size - self.n))
        return x.unflatten(2, (self.blocks, self.size))

    def halves(self, x: Tensor, which: int) -> Tensor:
        """[b h n w] -> the earlier (0) or later (1) block of each pair, [b h t w size]."""
        pairs = -(-self.n // (2 * self.size))
        x = F.pad(x, (0, 0, 0, 2 * pairs * self.size - self.n))
        return x.unflatten(2, (pairs, 2, self.size))[:, :, :, which].mT.to(torch.float64)


def _chunk(f: int, v: int) -> int:
    """The least block whose transforms cost less than its pairs."""
    size = 64
    while size * (f + v) < WORTH * f * v * math.log2(2 * size):
        size *= 2
    return size


def _parts(n: int, reach: str, chunk: int) -> Iterator[_Part]:
    if not n:
        return
    if reach == "both":
        yield _Part(n, n, n <= chunk, False)
        return
    yield _Part(n, min(chunk, n), True, True)
    size = chunk
    while size < n:
        yield _Part(n, size, False, True)
        size *= 2


def _near(part: _Part, q: Tensor, k: Tensor, v: Tensor, curve: Tensor, out: Tensor) -> None:
    for rows, columns, here in _tiles(part, q):
        tile = _factors(part, curve, rows, columns)
        for block in here:
            queries, keys = _slices(part, block, rows, columns)
            weights = q[:, :, queries] @ k[:, :, keys].mT
            tile_here = tile[:, : weights.shape[2], : weights.shape[3]]
            out[:, :, queries] += (weights * tile_here) @ v[:, :, keys]


def _near_curve(part: _Part, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, grad: Tensor) -> None:
    n, heads = part.n, q.shape[1]
    for rows, columns, here in _tiles(part, q):
        count = rows.stop - rows.start
        total = q.new_zeros(heads, count, columns)
        for block in here:
            queries, keys = _slices(part, block, rows, columns)
            moved = (q[:, :, queries] @ k[:, :, keys].mT) * (d_out[:, :, queries] @ v[:, :, keys].mT)
            total[:, : moved.shape[2], : moved.shape[3]] += moved.sum(0)
        if part.causal:
            total = total.tril(rows.start)
        sums = by_offset(total, q.new_empty(heads, count, count + columns - 1)).sum(1)
        least = n - rows.stop  # the column of the least offset
        grad[:, least : least + sums.shape[1]] += sums


def _tiles(part: _Part, q: Tensor) -> Iterator[tuple[slice, int, range]]:
    """Rows of a block, the number of columns that they see, and the blocks."""
    size = min(part.size, part.n)
    count = max(1, min(ROWS, PAIRS // max(q.shape[0] * q.shape[1] * size, 1)))
    for start in range(0, size, count):
        stop = min(start + count, size)
        yield slice(start, stop), stop if part.causal else size, range(part.blocks)


def _slices(part: _Part, block: int, rows: slice, columns: int) -> tuple[slice, slice]:
    start = block * part.size
    return slice(min(start + rows.start, part.n), min(start + rows.stop, part.n)), slice(
        start, min(start + columns, part.n)
    )


def _factors(part: _Part, curve: Tensor, rows: slice, columns: int) -> Tensor:
    """The curve's factors of rows and columns of a block, [h rows columns]."""
    first = part.n - rows.stop
    values = curve[:, first : first + rows.stop - rows.start + columns - 1]
    tile = values.unfold(1, columns, 1).flip(1)
    return tile.tril(rows.start) if part.causal else tile


def _far(part: _Part, q: Tensor, k: Tensor, v: Tensor, curve: Tensor, out: Tensor) -> None:
    n, size = part.n, part.size
    queries, keys, values, length = _ends(part, q, k, v)
    wave = torch.fft.rfft(_around(part, curve, length))[:, None, None, None]  # [h 1 1 1 w]
    sums = torch.zeros(*values.shape[:3], v.shape[3], size, dtype=torch.float64, device=q.device)
    for channels, columns in _slices_of(keys, values, length):
        made = keys[:, :, :, channels, None] * values[:, :, :, None, columns]
        moved = torch.fft.irfft(torch.fft.rfft(made, length) * wave, length)[..., :size]
        sums[:, :, :, columns] += (moved * queries[:, :, :, channels, None]).sum(3)
    sums = sums.mT.to(out.dtype)  # [b h t size v]
    if part.causal:
        sums = torch.stack([torch.zeros_like(sums), sums], dim=3).flatten(2, 4)
        out += sums[:, :, :n]
    else:
        out += sums[:, :, 0]


def _far_curve(part: _Part, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, grad: Tensor) -> None:
    queries, keys, values, length = _ends(part, q, k, v)
    asked = _ends(part, d_out, k, v)[0]
    total = torch.zeros(q.shape[1], length // 2 + 1, dtype=torch.complex128, device=q.device)
    for channels, columns in _slices_of(keys, values, length):
        told = torch.fft.rfft(keys[:, :, :, channels, None] * values[:, :, :, None, columns], length)
        heard = torch.fft.rfft(queries[:, :, :, channels, None] * asked[:, :, :, None, columns], length)
        total += (heard * told.conj()).sum((0, 2, 3, 4))
    around = torch.fft.irfft(total, length).to(grad.dtype)
    turns, offsets = _offsets(part, length, grad.device)
    grad.index_add_(1, offsets, around[:, turns])


def _ends(part: _Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Queries, keys and values [b h t w size] of the blocks that meet, in float64, and the length of their transforms."""
    if part.causal:
        return part.halves(q, 1), part.halves(k, 0), part.halves(v, 0), 2 * part.size
    q, k, v = (x.mT[:, :, None].to(torch.float64) for x in (q, k, v))
    return q, k, v, 1 << (2 * part.n - 2).bit_length()


def _offsets(part: _Part, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The places on the circle of a transform, and the column of the curve that each has."""
    steps = torch.arange(1 - part.size, part.size, device=device)  # of the query before the key, each in its block
    columns = part.n - 1 - steps - part.size * part.causal
    inside = columns >= 0
    return (steps % length)[inside], columns[inside]


def _around(part: _Part, curve: Tensor, length: int) -> Tensor:
    turns, columns = _offsets(part, length, curve.device)
    circle = torch.zeros(curve.shape[0], length, dtype=torch.float64, device=curve.device)
    circle[:, turns] = curve[:, columns].to(torch.float64)
    return circle


def _slices_of(keys: Tensor, values: Tensor, length: int) -> Iterator[tuple[slice, slice]]:
    """Channels of keys and of values whose products are transformed at once."""
    f, v = keys.shape[3], values.shape[3]
    fitting = max(1, PAIRS // max(keys.shape[0] * keys.shape[1] * keys.shape[2] * length, 1))
    columns = min(v, fitting)
    channels = min(f, max(1, fitting // columns))
    for i in range(0, f, channels):
        for j in range(0, v, columns):
            yield slice(i, i + channels), slice(j, j + columns)


def fake_forward(q: Tensor, k: Tensor, v: Tensor, curve: Tensor, reach: str, chunk: int) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


def fake_curve(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, reach: str, chunk: int) -> Tensor:
    return q.new_empty(q.shape[1], 2 * q.shape[2] - 1)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4])
    ctx.how = inputs[4:]


def _differentiate(ctx, d_out):
    q, k, v, curve = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    d_q, d_k, d_v = _by_operand(wanted, q, k, v, d_out, curve, *ctx.how)
    return d_q, d_k, d_v, toeplitz_curve(q, k, v, d_out, *ctx.how) if wanted[3] else None, None, None


def _differentiate_curve(ctx, d_curve):
    q, k, v, d_out = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    d_asked = toeplitz_forward(q, k, v, d_curve, *ctx.how) if wanted[3] else None
    return *_by_operand(wanted, q, k, v, d_out, d_curve, *ctx.how), d_asked, None, None


def _by_operand(wanted, q, k, v, asked, curve, reach, chunk):
    """Gradients of q, k and v in sum_i asked_i . out_i, where they are wanted."""
    back, other = curve.flip(1), {"both": "both", "past": "future", "future": "past"}[reach]
    calls = (asked, v, k, curve, reach), (v, asked, q, back, other), (k, q, asked, back, other)
    return [toeplitz_forward(*call, chunk) if want else None for call, want in zip(calls, wanted, strict=False)]


toeplitz_forward = node("toeplitz_forward", run_forward, fake_forward)
toeplitz_curve = node("toeplitz_curve", run_curve, fake_curve)
torch.library.register_autograd("anyformer::toeplitz_forward", _differentiate, setup_context=_save)
torch.library.register_autograd("anyformer::toeplitz_curve", _differentiate_curve, setup_context=_save)
