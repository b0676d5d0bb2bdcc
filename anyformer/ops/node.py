"""A function of tensors as one node of a graph: traced, compiled and exported without a look inside."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


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


def constant(function: Function) -> Function:
    """Mark a function whose result, while a graph is traced, is taken as it comes out.

    This is what `torch.compiler.assume_constant_result` sets: calling that would load the compiler on import.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def expressed(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of the inputs as an expression that can be differentiated again; None where there is none.

    Args:
        outputs: made of the inputs by ordinary operators.
        gradients: of each output; None: nobody asks.
    """
    given = [(y, d) for y, d in zip(outputs, gradients, strict=True) if d is not None and y.requires_grad]
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    ys, ds = zip(*given, strict=True)
    grads = iter(torch.autograd.grad(ys, wanted, ds, create_graph=True, allow_unused=True))
    return [next(grads) if x is not None and x.requires_grad else None for x in inputs]


def refuse_second_derivative(ctx: Any, *gradients: Any) -> None:
    """The derivative of a backward."""
    raise NotImplementedError(
        "the fast attention paths can be differentiated once; to differentiate twice, use window_attention_composite "
        "or block_attention_composite"
    )
