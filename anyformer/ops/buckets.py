"""T5's buckets of offsets: near distances have one each, far ones share, ever more to a bucket."""

import torch
from jaxtyping import Int
from torch import Tensor


def log_bucket(offset: Int[Tensor, "..."], starts: list[int], *, causal: bool) -> Int[Tensor, "..."]:
    """Number of the bucket of an offset of key minus query.

    Args:
        starts: the least distance of each bucket but the first, as `log_bucket_starts` makes them.
        causal: later keys count as distance 0; else they use as many buckets of their own, numbered on.
    """
    edges = torch.tensor(starts, device=offset.device)
    if causal:
        return torch.bucketize((-offset).clamp(min=0), edges, right=True)
    return torch.bucketize(offset.abs(), edges, right=True) + (len(starts) + 1) * (offset > 0)


def log_bucket_starts(side: int, max_distance: int) -> list[int]:
    """The least distance of each bucket but the first, in one direction of `side` buckets.

    Bucket e + t starts at the least a with a ** (side - e) * e ** t >= max_distance ** t * e ** (side - e): whole
    numbers, because logarithms in floating point put some distances into the wrong bucket.
    """
    exact = side // 2
    wide = side - exact
    starts = list(range(1, exact + 1))
    for step in range(1, wide):
        start = max(exact, int(exact * (max_distance / exact) ** (step / wide)) - 1)
        while start**wide * exact**step < max_distance**step * exact**wide:
            start += 1
        starts.append(start)
    return starts
