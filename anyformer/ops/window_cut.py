"""What a window is given, and how it is cut."""

from typing import NamedTuple

from jaxtyping import Bool, Int
from torch import Tensor

from anyformer.ops.tile import tiles_at_once
from anyformer.ops.window_slots import Strip


class Extras(NamedTuple):
    """The optional tensors of a window, see `window_attention`."""

    keep: Tensor | None
    documents: Tensor | None
    bias: Tensor | None
    query_table: Tensor | None
    value_table: Tensor | None
    key_table: Tensor | None
    global_keys: Tensor | None
    global_bias: Tensor | None
    full_rows: Tensor | None


class Chunk(NamedTuple):
    """The blocks `start` to `start + count` of a head, and of their windows the columns `skip` to `skip + span`.

    `slot` is the first slot of these, and `part` says which of the three parts of `Slots` holds them.
    """

    number: int
    start: int
    count: int
    skip: int
    span: int
    slot: int
    part: int


def block_rows(reach: int) -> int:
    """Rows of a block: a tile computes block + reach columns of which reach + 1 count, but short products are slow.

    A power of two, so that the lengths people use are whole blocks and rows are read and written in place.
    """
    return 32 if reach < 300 else 64 if reach < 800 else 128


def cut(strip: Strip, block: int, span: int, left: int, right: int, threads: int) -> list[Chunk]:
    """The chunks of windows of `span` slots, one each `block` slots, of which the outer `left` and `right` ones are not needed."""
    left = left // 16 * 16
    at_once = tiles_at_once(block * (span - left - right), threads)
    step = -(-span // block)  # `spread` goes in this many turns, best of equal size
    at_once = step * round(at_once / step) or at_once
    blocks = (strip.count - strip.globals - span) // block + 1
    first, last = (x + strip.shift - strip.globals for x in (strip.first, strip.last))  # columns of block 0 with a key
    chunks = []
    for number, start in enumerate(range(0, blocks, at_once)):
        count = min(at_once, blocks - start)
        skip, stop = left, span - right
        if not strip.globals:
            skip = max(skip, min(first - (start + count - 1) * block, span - 16) // 16 * 16)
            stop = max(min(stop, last - start * block), skip + 1)
        width = min(-(-(stop - skip) // 16) * 16, span - skip)
        slot = strip.globals + start * block + skip
        part = strip.part(slot, slot + (count - 1) * block + width)
        chunks.append(Chunk(number, start, count, skip, width, slot, part))
    return chunks


def shut_columns(keys: Int[Tensor, " g"], places: Int[Tensor, "c q 1"], left: int, right: int) -> Bool[Tensor, "c q g"]:
    """Where a row meets a global key in its window already, or may not meet it because it comes after it (right: beyond all)."""
    offsets = keys - places
    return (offsets >= -left) & (offsets <= right)
