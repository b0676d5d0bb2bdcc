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


gated_forward = scan_node("gated", gated_pass.forward, gated_pass.backward, pass_composite)
