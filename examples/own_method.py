"""A method of your own: one class, registered, held to every law."""

import torch
from torch import Tensor

import anyformer as af
from anyformer.attention.base import Attention
from anyformer.context import Context
from anyformer.forms import Form
from anyformer.ops.softmax import repeat_heads
from anyformer.pattern.pairs import pairs
from anyformer.site import Site
from anyformer.testing import laws
from anyformer.typing import PositiveFloat


class Sigmoid(Attention):
    """out_i = sum_j sigmoid(s q_i . k_j - shift) v_j over the pairs that may meet.

    Args:
        shift: how far below 0 a pair's logit starts.
    """

    name = "sigmoid"
    summary = "every pair is weighed for itself, without a normaliser"
    paper = "Ramapuram et al. 2024, 2409.04431"
    family = ("full",)
    forms = (Form.ROTATE,)
    refusal = "it reads rotated queries and keys only; use rope"
    takes_pattern = True
    decodes = "cache"

    def __init__(self, site: Site, *, shift: PositiveFloat = 2.0) -> None:
        super().__init__(site)
        self.shift = shift

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        weights = torch.sigmoid(q @ k.mT * q.shape[-1] ** -0.5 - self.shift)
        weights = torch.nn.functional.dropout(weights, context.dropout)
        allowed = pairs(context, q.shape[1])
        return (weights if allowed is None else weights.masked_fill(~allowed, 0.0)) @ v


af.register(Sigmoid)
for result in laws.examine(laws.Case("sigmoid(shift=3.0)", "rope", causal=True)):
    if result.status != "silent":
        print(result.law.name, result.status, result.law.title)
