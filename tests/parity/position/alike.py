"""A layer of ours beside a peer's."""

from collections.abc import Callable

import torch
from torch import Tensor


def assert_alike(
    ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], x: Tensor, probe: Tensor
) -> None:
    """Same outputs and same gradients of the input; those of the weights are left for the test to compare."""
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    outputs = ours(inputs[0]), theirs(inputs[1])
    torch.testing.assert_close(*outputs, rtol=2e-6, atol=2e-6)
    for output in outputs:
        (output * probe).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=2e-6, atol=2e-6)
