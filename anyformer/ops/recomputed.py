"""Memory for time: a result whose parts are worked out once more in the backward."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """`function(*arguments)`, of which the backward keeps the arguments only; the function draws nothing at random."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function(*arguments)
    out = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(out, Tensor)
    return out
