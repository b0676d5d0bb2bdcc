"""Layers to be counted, and what their formulas say; patterns, and causal forms that are counted by hand."""

from collections.abc import Callable

import pytest
import torch

from anyformer.attention.base import Attention
from anyformer.mixer.base import Mixer
from anyformer.mixer.mlp_mixer import unit_places
from anyformer.model.build import build_mixer
from anyformer.site import Site

D, H = 64, 2


def layer_of(spec: str, n: int, *, causal: bool = False, kv_heads: int = H) -> Mixer:
    return build_mixer(spec, "none", Site(D * H, H, causal=causal, kv_heads=kv_heads, max_length=n), bias=False).eval()


def near(operations: float, declared: float) -> None:
    assert operations / 2 == pytest.approx(declared, rel=0.05)


def said(layer: Mixer | Attention, n: int, m: int | None = None) -> int:
    cost = layer.cost()
    assert cost is not None
    return cost.multiply_adds(n, m)


PATTERNS = {
    "softmax": "Full()",
    "local": "local(7)",
    "strided": "strided(8)",
    "dilated": "dilated(4, 4, 3)",
    "block_local": "block_local(8)",
    "global_tokens": "global_tokens([0, 5])",
    "random": "random(5)",
    "per_head": "per_head((Local(7), 1), (Strided(8), 1))",
    "bigbird": "bigbird(block=8, random=1)",
    "sparse_transformer": "sparse_transformer",
    "a union": "Local(3) | Strided(16) | Global([0]) | Random(2)",
}
"""Counted row by row."""


def _aft(n: int, rank: int) -> int:
    return sum(2 * (i + 1) * D * H + n * rank for i in range(n))


def _compressed(n: int, stride: int) -> int:
    """The convolutions, and for each token the slots that end at it or before, and the learned one."""
    return 2 * H * n * D**2 + sum(2 * H * D * ((i + 1) // stride + 1) for i in range(n))


def _sinkhorn(n: int, block: int) -> int:
    """For each token its own block up to itself and, after the first, a sorted one, mixed from the blocks before."""
    reads = sum(2 * H * D * (i % block + 1 + block * (i >= block)) for i in range(n))
    return reads + sum(2 * H * row * block * D for row in range(n // block))


def _learned_blocks(n: int, group: int, keep: int) -> int:
    """For each token its own group up to itself and up to keep - 1 groups before; for each group a score of those before."""
    reads = sum(2 * H * D * (i % group + 1 + group * min(keep - 1, i // group)) for i in range(n))
    return reads + sum(H * row * D + 2 * H * D**2 for row in range(n // group))


def _mlp_mixer(n: int, units: int) -> int:
    """For each unit the places up to its own, and for each place the units up to its own."""
    at = unit_places(n, units, torch.device("cpu")).tolist()
    return D * H * sum((place + 1) + (n - place) for place in at)


BY_HAND: dict[str, Callable[[int], int]] = {
    "aft(rank=8)": lambda n: _aft(n, 8),
    "aft(variant=conv)": lambda n: _aft(n, 0),
    "compressed": lambda n: _compressed(n, 4),
    "sinkhorn(block=8)": lambda n: _sinkhorn(n, 8),
    "learned_blocks(group=8, keep=3)": lambda n: _learned_blocks(n, 8, 3),
    "mlp_mixer": lambda n: _mlp_mixer(n, n),
}
"""Causal forms that run under a mask, or numbers without a matrix: what is left when the equation is read term by term."""
