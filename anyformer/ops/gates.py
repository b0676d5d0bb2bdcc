"""Factors that tokens put on all pairs they stand between, as a term on the logits."""

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor


def last_seen(q_places: Int[Tensor, "#b n"], k_places: Int[Tensor, "#b m"]) -> Int[Tensor, "#b n"]:
    """The last key at or before the place of each query, -1 where there is none; places of keys never fall."""
    b = max(len(q_places), len(k_places))
    queries, keys = (places.expand(b, -1).contiguous() for places in (q_places, k_places))
    return torch.searchsorted(keys, queries, right=True) - 1


def gate_sums(gates: Float[Tensor, "b h m"], last: Int[Tensor, "#b n"] | None) -> Float64[Tensor, "b h n m"]:
    """The sum of the gates after key j up to key last[i], for every query i; below 0 where j comes first.

    In float64, because sums over a long sequence are large beside their differences.

    Args:
        last: the last key that each query sees; None: its own index.
    """
    sums = gates.to(torch.float64).cumsum(dim=-1)
    of_queries = sums
    if last is not None:
        if not sums.shape[-1]:
            return sums.new_zeros(*sums.shape[:2], last.shape[1], 0)
        index = last.clamp(min=0)[:, None].expand(*sums.shape[:2], -1)
        of_queries = sums.gather(-1, index)
    return of_queries[..., :, None] - sums[..., None, :]
