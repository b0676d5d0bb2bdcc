"""How one pass of a running state cuts its tokens: into chunks of C tokens, and chunks into segments.

Tiles of a segment lie one chunk after the other, all rows of a chunk side by side: [t*R C w] for t chunks of R key heads, and for
queries [t*R C*r w], the r query heads of a key head next to each other at every token.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TOKENS = 2048
"""Tokens of a segment of one row."""

TILES = 32
"""Tiles computed at once on a CPU: few enough for its cache."""


class Segment(NamedTuple):
    """Chunks start to stop - 1 of rows first to last - 1; segment `number` in the order of the pass."""

    first: int
    last: int
    start: int
    stop: int
    number: int


class Layout:
    """Rows [b*g n w] of tokens in chunks of C, less where there are fewer; the last chunk is filled up with zeros."""

    def __init__(self, k: Tensor, chunk: int, reverse: bool):
        self.batch, self.groups, self.n = k.shape[:3]
        self.rows, self.reverse = self.batch * self.groups, reverse
        self.chunk = min(chunk, 1 << max(self.n - 1, 0).bit_length())
        self.chunks = -(-self.n // self.chunk)
        self.length = _length(chunk)
        at_once = TILES * torch.get_num_threads() if k.device.type == "cpu" else 4096
        self.at_once = max(1, at_once // max(1, min(self.chunks, self.length)))

    def segments(self, backward: bool = False) -> Iterator[list[Segment]]:
        """For each group of rows its segments, in the order of the pass, or with `backward` of its gradient."""
        starts = list(range(0, self.chunks, self.length))
        starts = starts[::-1] if self.reverse else starts
        order = list(enumerate(starts))
        for first in range(0, self.rows, self.at_once):
            last = min(first + self.at_once, self.rows)
            cut = [Segment(first, last, at, min(at + self.length, self.chunks), number) for number, at in order]
            yield cut[::-1] if backward else cut

    def steps(self, t: int, backward: bool = False) -> range:
        """A segment's t chunks in the order of the pass, or with `backward` of its gradient."""
        return range(t - 1, -1, -1) if self.reverse != backward else range(t)

    def tokens(self, x: Tensor) -> Tensor:
        """[b g*r n w] -> [b*g T C*r w], a view where possible."""
        batch, heads, n, width = x.shape
        ratio = heads // self.groups
        short = self.chunks * self.chunk - n
        if ratio > 1:
            x = x.unflatten(1, (self.groups, ratio)).transpose(2, 3).reshape(batch, self.groups, n * ratio, width)
        x = F.pad(x, (0, 0, 0, short * ratio)) if short else x
        return x.reshape(self.rows, self.chunks, self.chunk * ratio, width)

    def room(self, x: Tensor) -> Tensor:
        """Room for what `tokens` makes of x."""
        ratio = x.shape[1] // self.groups
        return x.new_empty(self.rows, self.chunks, self.chunk * ratio, x.shape[3])

    def heads(self, tiles: Tensor, ratio: int = 1) -> Tensor:
        """The inverse of `tokens`."""
        x = tiles.view(self.batch, self.groups, self.chunks * self.chunk, ratio, tiles.shape[-1])
        x = x[:, :, : self.n]
        return x.squeeze(3).contiguous() if ratio == 1 else x.transpose(2, 3).flatten(1, 2)


def states_of(k: Tensor, state: Tensor, chunk: int) -> Tensor:
    """Room for the states [b g segments+1 f v] before each segment of the keys k [b g n f] and after the last."""
    segments = -(-k.shape[2] // (chunk * _length(chunk)))
    return state.new_empty(*k.shape[:2], segments + 1, *state.shape[2:])


def _length(chunk: int) -> int:
    """Chunks of a segment."""
    return max(1, TOKENS // chunk)


def load(tokens: Tensor, s: Segment) -> Tensor:
    """A segment's tiles, a view where possible."""
    part = tokens[s.first : s.last, s.start : s.stop]
    return part.transpose(0, 1).reshape(-1, *part.shape[2:])


def store(tiles: Tensor, tokens: Tensor, s: Segment) -> None:
    """Bring a segment's tiles to their place."""
    part = tokens[s.first : s.last, s.start : s.stop]
    part.copy_(tiles.view(part.shape[1], part.shape[0], *part.shape[2:]).transpose(0, 1))
