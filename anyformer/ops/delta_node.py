"""The pass of `delta_pass` as one node of a graph, with its gradient."""

import torch
from torch import Tensor

from anyformer.ops import delta_pass
from anyformer.ops.delta_composite import pass_composite
from anyformer.ops.scan_node import scan_node


def run_pass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    read: Tensor,
    cuts: Tensor | None,
    state: Tensor,
    reverse: bool,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """out [b h n v] and the last state [b g f v]; in `torch.export` the composite, of ordinary operators only."""
    if torch.compiler.is_exporting():
        return pass_composite(q, k, v, beta, read, cuts, state, reverse, chunk)
    out, states = delta_forward(q, k, v, beta, read, cuts, state, reverse, chunk)
    return out, states[:, :, -1].clone()  # a view would keep the states of all segments alive


delta_forward = scan_node("delta", delta_pass.forward, delta_pass.backward, pass_composite, without_gradient=(5,))
