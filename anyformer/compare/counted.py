"""Floating point operations that a call really does, counted while it runs."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


class _Inside(TorchDispatchMode):
    """Runs our own operators where a counter sees the products that they are made of."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return (func.function if func.namespace == "anyformer" else func)(*args, **(kwargs or {}))


def counted(call: Callable[[], object]) -> int:
    """Operations of all products of vectors and matrices in the call, a multiply-add as two.

    Attention without a pattern is counted as it is written out, all pairs of a mask included: the fused kernel of a CPU counts as
    nothing. What is no product of matrices is not seen: Fourier transforms, sums, triangular systems.
    """
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter, _Inside():
        call()
    return counter.get_total_flops()
