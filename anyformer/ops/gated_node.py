"""The pass of `gated_pass` as one node of a graph, with its gradient."""

import torch
from torch import Tensor

from anyformer.ops import gated_pass
from anyformer.ops.gated_composite import pass_composite
from anyformer.ops.scan_node import scan_node


def run_pass(
    q: Tensor, k: Tensor, v: Tensor, fade: Tensor, state: Tensor, reverse: bool, chunk: int
) -> tuple[Tensor, Tensor]:
    """out [b h n v] and the last state [b g f v]; in `torch.export` the composite, of ordinary operators only."""
    if torch.compiler.is_exporting():
        return pass_composite(q, k, v, fade, state, reverse, chunk)
    out, states = gated_forward(q, k, v, fade, state, reverse, chunk)
    return out, states[:, :, -1].clone()  # a view would keep the states of all segments alive


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, fade: Tensor, state: Tensor, reverse: bool, chunk: int
) -> tuple[Tensor, Tensor]:
    """`gated_pass.forward`."""
    return gated_pass.forward(q, k, v, fade, state, reverse, chunk)


def run_backward(
    d_out: Tensor,
    d_states: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fade: Tensor,
    state: Tensor,
    states: Tensor,
    reverse: bool,
    chunk: int,
) -> list[Tensor]:
    """`gated_pass.backward`."""
    return list(gated_pass.backward(d_out, d_states, q, k, v, fade, states, reverse, chunk))


gated_forward = scan_node("gated", run_forward, run_backward, pass_composite)
