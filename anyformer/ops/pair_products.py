"""Products and weighted sums over listed pairs of a query and a key: no vector is copied for a pair, memory is one number a pair.

The three functions are each other's gradients, so what is made of them can be differentiated as often as one likes.
"""

import warnings
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

_NUMBERS = 1 << 20  # of copied vectors that are held at once where they must be


class PairLists(NamedTuple):
    """As many keys for each row, by row and by key.

    Args:
        keys: the key of each pair.
        slots: number of keys.
        order: pairs, counted row after row, in the order of their keys.
        starts: where in that order the pairs of each key begin, and the end.
    """

    keys: Int[Tensor, "rows r"]
    slots: int
    order: Int[Tensor, " pairs"]
    starts: Int[Tensor, " edges"]


def pair_lists(keys: Int[Tensor, "rows r"], slots: int) -> PairLists:
    """The lists of the given keys, of the numbers 0..slots-1."""
    ordered, order = keys.flatten().sort()
    starts = torch.searchsorted(ordered, torch.arange(slots + 1, device=keys.device))
    return PairLists(keys.int(), slots, order.int(), starts.int())


def products(q: Float[Tensor, "rows d"], k: Float[Tensor, "slots d"], lists: PairLists) -> Float[Tensor, "rows r"]:
    """`q_i . k_j` for each key j of row i."""
    return _Products.apply(q, k, lists)


def sums(w: Float[Tensor, "rows r"], v: Float[Tensor, "slots d"], lists: PairLists) -> Float[Tensor, "rows d"]:
    """`sum_j w_ij v_j` over the keys j of row i."""
    return _Sums.apply(w, v, lists)


def sums_by_key(w: Float[Tensor, "rows r"], x: Float[Tensor, "rows d"], lists: PairLists) -> Float[Tensor, "slots d"]:
    """`sum_i w_ij x_i` over the rows i that list key j."""
    return _SumsByKey.apply(w, x, lists)


class _OverPairs(torch.autograd.Function):
    """A function of two tensors and the lists."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.lists = inputs[2]


class _Products(_OverPairs):
    @staticmethod
    def forward(q: Tensor, k: Tensor, lists: PairLists) -> Tensor:
        (rows, r), device = lists.keys.shape, q.device
        if not torch.backends.mkl.is_available():  # without it torch has no such product on a processor
            count = max(1, _NUMBERS // max(1, r * q.shape[1]))
            pieces = zip(q.split(count), lists.keys.split(count), strict=True)
            return torch.cat([torch.einsum("id,ird->ir", rows, k[keys.long()]) for rows, keys in pieces])
        _silence()
        ends = torch.arange(0, rows * r + 1, r, dtype=lists.keys.dtype, device=device)
        shape, room = (rows, lists.slots), q.new_zeros(rows * r)
        pattern = torch.sparse_csr_tensor(ends, lists.keys.flatten(), room, shape, check_invariants=False)
        return torch.sparse.sampled_addmm(pattern, q, k.t(), beta=0.0).values().view(rows, r)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        q, k = ctx.saved_tensors
        return sums(grad, k, ctx.lists), sums_by_key(grad, q, ctx.lists), None


class _Sums(_OverPairs):
    @staticmethod
    def forward(w: Tensor, v: Tensor, lists: PairLists) -> Tensor:
        return F.embedding_bag(lists.keys, v, mode="sum", per_sample_weights=w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        w, v = ctx.saved_tensors
        return products(grad, v, ctx.lists), sums_by_key(w, grad, ctx.lists), None


class _SumsByKey(_OverPairs):
    @staticmethod
    def forward(w: Tensor, x: Tensor, lists: PairLists) -> Tensor:
        order = lists.order
        rows, by_key = torch.div(order, w.shape[1], rounding_mode="floor"), w.flatten().index_select(0, order)
        return F.embedding_bag(rows, x, lists.starts, mode="sum", per_sample_weights=by_key, include_last_offset=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        w, x = ctx.saved_tensors
        return products(x, grad, ctx.lists), sums(w, grad, ctx.lists), None


@lru_cache(maxsize=1)
def _silence() -> None:
    """Make the first tensor of this layout, at which torch warns that their interface may change: users cannot help it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), [], (0, 0))
