"""A function of tensors as one node of a graph: traced, compiled and exported without a look inside."""

from collections.abc import Callable
from typing import Any

import torch


def node(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> torch._ops.OpOverload:
    """Register `function` under `anyformer::name` for every device, its schema read off its annotations.

    This is `torch.library.custom_op` without its wrapper, which loads the compiler on the first call: seconds, even for
    a program that never compiles. The function stays at hand as `.function`, for whoever counts the products in it.

    Args:
        fake: from the same arguments, results of the right shape and dtype whose values do not matter.
    """
    qualified = f"anyformer::{name}"
    torch.library.define(qualified, torch.library.infer_schema(function, mutates_args=()))
    torch.library.impl(qualified, "default", function)
    torch.library.register_fake(qualified, fake)
    made = getattr(torch.ops.anyformer, name).default
    made.function = function
    return made


def refuse_second_derivative(ctx: Any, *gradients: Any) -> None:
    """The derivative of a backward."""
    raise NotImplementedError(
        "the fast attention paths can be differentiated once; to differentiate twice, use window_attention_composite "
        "or block_attention_composite"
    )
