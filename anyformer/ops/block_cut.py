"""What lists of blocks are given as, and how they are cut."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

MOST_KNOWN = 2**16
"""Entries of lists up to which their chunks are remembered: about 1 MB. Cutting costs some per cent of a call."""


class Lists(NamedTuple):
    """Which key blocks each block of rows reads, and which pairs in them; see `block_attention`."""

    block: int
    offsets: Tensor
    keys: Tensor
    partial: Tensor | None
    masks: Tensor | None


class Chunk(NamedTuple):
    """C blocks of rows [C] and the W key blocks of each [C W], where short lists end in a block without keys."""

    blocks: Tensor
    keys: Tensor
    entries: Tensor
    """Flat indices into [C W] of the blocks that have a mask."""
    masks: Tensor
    """The masks of these blocks."""
    read: Tensor
    """The key blocks [C W] to read: short lists end in one that they hold already."""
    short: bool
    """Whether a list or a key block is shorter than its room."""
    run: int
    """The first key block when there is one list and it has no gaps, so that its keys are read in place; else -1."""
    first: int
    """The first block of rows when they follow each other, so that they are read and written in place; else -1."""


@lru_cache(maxsize=16)
def shared_chunks(
    shape: tuple[int, ...],
    offsets: bytes,
    keys: bytes,
    partial: bytes | None,
    m: int,
    block: int,
    at_once: int,
    device: torch.device,
) -> dict[int, list[Chunk]]:
    """One dictionary for all calls that would cut alike."""
    return {}
