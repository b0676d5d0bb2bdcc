"""Passes of running states as nodes of a graph, with a gradient that can be differentiated again.

A pass maps queries [b h n f], keys [b g n f], values [b g n v], other tensors of tokens and a first state [b g f v], then
`reverse` and `chunk`, to outputs [b h n v] and the states [b g s f v] before each segment and after the last.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyformer.ops.node import expressed, node
from anyformer.ops.scan_tiles import states_of

Composite = Callable[..., tuple[Tensor, Tensor]]


def scan_node(
    name: str,
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., list[Tensor]],
    composite: Composite,
    without_gradient: tuple[int, ...] = (),
) -> torch._ops.OpOverload:
    """Register a pass under `anyformer::{name}_forward`, and its gradient under `anyformer::{name}_backward`.

    Args:
        backward: from the gradients of outputs and states (or None), the tensors given with all states in place of the first,
            `reverse` and `chunk`, those of the tensors given.
        composite: the outputs and the last state from the same arguments, out of ordinary operators.
        without_gradient: which of the tensors have none, or may be None; `backward` gives an empty one for each.
    """

    def fake_backward(d_out, d_states, *others):
        *inputs, states, _, _ = others
        first = states[:, :, 0]
        return [d_out.new_empty(0 if i in without_gradient else x.shape) for i, x in enumerate((*inputs, first))]

    run_forward = node(f"{name}_forward", _in_full_precision(forward), _fake_forward)
    run_backward = node(f"{name}_backward", _in_full_precision(backward), fake_backward)

    def save(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        *tensors, ctx.reverse, ctx.chunk = inputs
        ctx.save_for_backward(*tensors, *output)

    def differentiate(ctx, d_out, d_states):
        *inputs, out, states = ctx.saved_tensors
        if torch.is_grad_enabled():
            d_last = None if d_states is None else d_states[:, :, -1]
            again = expressed(composite(*inputs, ctx.reverse, ctx.chunk), (d_out, d_last), inputs)
            return (*again, None, None)
        d_out = torch.zeros_like(out) if d_out is None else d_out
        grads = run_backward(d_out, d_states, *inputs[:-1], states, ctx.reverse, ctx.chunk)
        return (*[None if i in without_gradient else grad for i, grad in enumerate(grads)], None, None)

    torch.library.register_autograd(f"anyformer::{name}_forward", differentiate, setup_context=save)
    return run_forward


def _in_full_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """Autocast would take the sums in half precision."""

    @functools.wraps(function)
    def run(*arguments):
        first = next(x for x in arguments if x is not None)
        with torch.autocast(first.device.type, enabled=False):
            return function(*arguments)

    return run


def _fake_forward(q, k, v, *others):
    *_, state, _, chunk = others
    return v.new_empty(*q.shape[:3], v.shape[3]), states_of(k, state, chunk)
