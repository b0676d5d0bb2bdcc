"""Linear attention in one direction: how tokens are cut into chunks, and what fading makes of each.

With w_ij = exp(sum of the fades between j and i) over the keys that query i reads (earlier ones and its own, or with `reverse`
the later ones without its own), one pass computes

    num_i = sum_j w_ij (q_i . k_j) v_j,   den_i = sum_j w_ij (q'_i . k'_j)

Inside a chunk of C tokens the pairs are a tile [C C]; everything before the chunk is one state, S = sum_j w_j k_j v_j^T and
z = sum_j w_j k'_j, faded to the chunk's edge. T chunks are a *segment*: all that is in memory besides inputs and outputs, few
enough for the processor's cache. Every exponent is a sum of fades, so never above zero: nothing can overflow.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anyformer.ops.feature_maps import elu1
from anyformer.ops.tile import Scratch

CHUNK = 64
"""Tokens of a chunk: about the width of a head, where tile and state cost the same."""

SEGMENT = 32
"""Chunks of a segment."""

GONE = -1000.0
"""A fade below this counts as this: exp of it is 0 in every dtype, and sums of it keep their precision."""


LOG2_E = math.log2(math.e)


class Operands(NamedTuple):
    """q [b h n f], k [b g n f], v [b g n v], and what may be None: q_den [b h n e] and k_den [b g n e], features for the
    denominator; fade [b|1 h|1 n|1], the log of the factor on everything before a token; keep [b n], the keys that may be read.

    Fades that differ by head need g = h.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_den: Tensor | None
    k_den: Tensor | None
    fade: Tensor | None
    keep: Tensor | None


class Rule(NamedTuple):
    """`features`: "given", or "elu1" where q and k are still to be mapped. `denominator`: "none", "apart" (returned beside the
    numerator) or "divide". `eps` bounds a dividing denominator from below, or its magnitude where it is `signed`."""

    features: str
    reverse: bool
    denominator: str
    eps: float
    signed: bool
    chunk: int


class Weights(NamedTuple):
    """What the fades make of one segment, for B samples and H heads where these differ, else 1.

    tile [B H t|1 1 C C]: w_ij inside a chunk.
    into, onto [B H t 1 C 1]: from the state before a chunk to its queries, from its keys to the state after it.
    carry [B H t 1]: across each chunk.
    """

    tile: Tensor
    into: Tensor
    onto: Tensor
    carry: Tensor


def weights(fade: Tensor, chunk: int, reverse: bool, constant: bool, dtype: torch.dtype) -> Weights:
    """The weights of one segment from its fades [B H t*C]; with `constant`, one tile does for all chunks.

    Sums of fades are differences of running sums, kept in float64: float32 would lose a small one after a large one.
    """
    sums = fade.double().clamp(min=GONE).unfold(-1, chunk, chunk).cumsum(-1)  # [B H t C]
    carry = sums[..., -1:]
    before, after = sums, carry - sums
    inner = sums[:, :, :1] if constant else sums
    inner = inner[..., :, None] - inner[..., None, :]
    if reverse:
        before, after, inner = after, before, -inner
    tile = inner.masked_fill(~triangle(chunk, reverse, fade.device), -math.inf).exp().to(dtype)
    into, onto = (x.exp().to(dtype)[:, :, :, None, :, None] for x in (before, after))
    return Weights(tile[:, :, :, None], into, onto, carry.exp().to(dtype))


def triangle(size: int, reverse: bool, device: torch.device) -> Tensor:
    """Bool[size size]: the keys up to the query's own, or with `reverse` those after it."""
    ones = torch.ones(size, size, dtype=torch.bool, device=device)
    return ones.triu(1) if reverse else ones.tril()


class Block(NamedTuple):
    """Tokens start to stop - 1 of each row of a group: t chunks, those numbered from `chunk` on."""

    start: int
    stop: int
    chunk: int
    t: int


class Group(NamedTuple):
    """Rows that are computed at once: samples b0 to b1 and key heads h0 to h1."""

    b0: int
    b1: int
    h0: int
    h1: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.b1 - self.b0, self.h1 - self.h0

    def of(self, x: Tensor) -> Tensor:
        """The group's rows of x [b g ...], a view."""
        return x[self.b0 : self.b1, self.h0 : self.h1]


class Cut:
    """How [b g n] tokens are cut into groups of rows, segments, and chunks of C tokens; the last chunk may be short."""

    def __init__(self, k: Tensor, chunk: int):
        self.batch, self.heads, self.n = k.shape[:3]
        self.chunks = -(-self.n // chunk)
        self.chunk = -(-self.n // max(self.chunks, 1)) or 1
        self.slight = self.chunks <= SEGMENT // 2 and k.shape[3] <= CHUNK

    def groups(self, device: torch.device) -> Iterator[Group]:
        """Enough rows at once to keep all threads busy, few enough to stay in the cache."""
        tiles = 16 * torch.get_num_threads() if device.type == "cpu" else 4096
        if self.slight:  # so little work a row that calls would cost more than what leaves the cache
            tiles = max(tiles, 64)
        rows = max(1, tiles // max(1, min(self.chunks, SEGMENT)))
        samples, heads = max(1, rows // self.heads), min(rows, self.heads)
        for b0 in range(0, self.batch, samples):
            for h0 in range(0, self.heads, heads):
                yield Group(b0, min(b0 + samples, self.batch), h0, min(h0 + heads, self.heads))

    def blocks(self, reverse: bool) -> Iterator[Block]:
        """The segments in the order in which the state meets them."""
        firsts = range(0, self.chunks, SEGMENT)
        for first in reversed(firsts) if reverse else firsts:
            t = min(SEGMENT, self.chunks - first)
            yield Block(first * self.chunk, min((first + t) * self.chunk, self.n), first, t)


class Tiles:
    """A group's rows of a tensor [b g n w], or [b h n w] with `ratio` heads a row, read and written as tiles [R*t ratio*C w].

    Features are mapped while they are read, into the buffer `name`; what hidden tokens hold is read as 0, and written as 0.
    """

    def __init__(
        self,
        x: Tensor,
        cut: Cut,
        group: Group,
        work: Scratch,
        keep: Tensor | None = None,
        features: str = "given",
        name: str = "features",
    ):
        dtype = work.dtype
        self.work, self.name = work, name
        self.ratio = x.shape[1] // cut.heads
        self.x = x[group.b0 : group.b1, group.h0 * self.ratio : group.h1 * self.ratio]
        self.hidden = None if keep is None else ~keep[group.b0 : group.b1, None, :, None]
        self.rows, self.chunk, self.dtype, self.features = group.shape, cut.chunk, dtype, features
        even = cut.n % cut.chunk == 0 and (self.rows == (1, 1) or cut.chunks <= SEGMENT)
        in_place = even and self.ratio == 1 and x.dtype == dtype and self.x.is_contiguous()
        self.tiles = self.x.view(-1, cut.chunk, x.shape[-1]) if in_place else None
        """All tiles as a view, where there is one."""

    def load(self, block: Block) -> Tensor:
        """The block's tiles, a view where possible; what follows the last token is 0."""
        if self.tiles is not None and self.hidden is None:
            return self._mapped(self._mine(block, self.tiles))
        x = self._mapped(self.x[:, :, block.start : block.stop].to(self.dtype))
        if self.hidden is not None:
            x = x.masked_fill(self.hidden[:, :, block.start : block.stop], 0.0)
        x = F.pad(x, (0, 0, 0, block.t * self.chunk - x.shape[2]))
        if self.ratio > 1:
            x = x.unflatten(2, (-1, self.chunk)).unflatten(1, (-1, self.ratio)).transpose(2, 3)
        return x.reshape(-1, self.ratio * self.chunk, x.shape[-1])

    def target(self, block: Block, work: Scratch, name: str) -> Tensor:
        """Where to write the block's tiles: in the tensor itself where possible."""
        if self.tiles is not None:
            return self._mine(block, self.tiles)
        samples, heads = self.rows
        return work.take(name, samples * heads * block.t, self.ratio * self.chunk, self.x.shape[-1])

    def store(self, tiles: Tensor, block: Block) -> None:
        """Bring tiles to their place, unless they were written there."""
        if self.tiles is not None:
            mine = self._mine(block, self.tiles)
            if mine.data_ptr() != tiles.data_ptr():
                mine.copy_(tiles)
            if self.hidden is None:
                return
        part = self.x[:, :, block.start : block.stop]
        if self.tiles is None:
            tiles = tiles.view(*self.rows, block.t, self.ratio, self.chunk, -1).transpose(2, 3)
            part.copy_(tiles.reshape(*self.x.shape[:2], -1, self.x.shape[-1])[:, :, : part.shape[2]])
        if self.hidden is not None:
            part.masked_fill_(self.hidden[:, :, block.start : block.stop], 0.0)

    def _mapped(self, x: Tensor) -> Tensor:
        """`mapped`, at half the price of elu and without a gradient."""
        if self.features == "given":
            return x
        fading, above = (self.work.take(name, *x.shape) for name in (self.name, "above"))
        torch.clamp(x, max=0.0, out=fading).mul_(LOG2_E).exp2_()
        return torch.maximum(fading, torch.add(x, 1.0, out=above), out=fading)

    def _mine(self, block: Block, tiles: Tensor) -> Tensor:
        return tiles[block.chunk : block.chunk + block.t] if self.rows == (1, 1) else tiles


def mapped(x: Tensor, features: str) -> Tensor:
    """The features of queries or keys."""
    return elu1(x) if features == "elu1" else x


def bounded(den: Tensor, rule: Rule) -> Tensor:
    """The denominator kept away from 0."""
    if rule.signed:
        return torch.where(den < 0, den.clamp_max(-rule.eps), den.clamp_min(rule.eps))
    return den.clamp_min(rule.eps)


def working(x: Operands) -> torch.dtype:
    """The dtype of sums: the widest of float32 and the operands'."""
    dtype = torch.promote_types(
        torch.promote_types(x.q.dtype, x.k.dtype), torch.promote_types(x.v.dtype, torch.float32)
    )
    return dtype if x.q_den is None else torch.promote_types(dtype, x.q_den.dtype)


def results(x: Operands, rule: Rule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised results of a pass.

    out [b h n v] in v's dtype, den [b h n] ([b h 0] for "none"), and s [b g segments+1 f v] and z [b g segments+1 e], the states
    before each segment, in the order of the pass, and after the last.
    """
    (batch, heads, n, width), groups, dtype = x.q.shape, x.k.shape[1], working(x)
    states = -(-n // (rule.chunk * SEGMENT)) + 1
    den = x.q.new_empty(batch, heads, 0 if rule.denominator == "none" else n, dtype=dtype)
    s = x.q.new_empty(batch, groups, states, width, x.v.shape[3], dtype=dtype)
    z = x.q.new_empty(batch, groups, states, (x.q if x.q_den is None else x.q_den).shape[3], dtype=dtype)
    return x.v.new_empty(batch, heads, n, x.v.shape[3]), den, s, z
