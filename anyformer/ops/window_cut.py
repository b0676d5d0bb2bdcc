"""What a window is given, and how it is cut."""

from typing import NamedTuple

from jaxtyping import Bool, Int
from torch import Tensor


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


class Chunk(NamedTuple):
    """The blocks `start` to `start + count` of a head, and of their windows the columns `skip` to `skip + span`."""

    number: int
    start: int
    count: int
    skip: int
    span: int


def block_rows(reach: int) -> int:
    """Rows of a block: a tile computes block + reach columns of which reach + 1 count, but short products are slow.

    A power of two, so that the lengths people use are whole blocks and rows are read and written in place.
    """
    return 32 if reach < 300 else 64 if reach < 800 else 128


def shut_columns(keys: Int[Tensor, " g"], places: Int[Tensor, "c q 1"], left: int, right: int) -> Bool[Tensor, "c q g"]:
    """Where a row meets a global key in its window already, or may not meet it because it comes after it (right: beyond all)."""
    offsets = keys - places
    return (offsets >= -left) & (offsets <= right)
