"""The part of a block that works on every token alone.

Paper: Vaswani et al. 2017, 1706.03762; gelu: Hendrycks and Gimpel 2016, 1606.08415; swiglu: Shazeer 2020, 2002.05202.
Equation: gelu: W_d gelu(W_u x), hidden width 4 c; swiglu: W_d (silu(W_g x) * W_u x), hidden width 8/3 c rounded up to a multiple of
8, so that both have the same number of weights. No biases.
"""

from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class FeedForward(nn.Module):
    """Two layers with a non-linearity between them.

    Args:
        dim: width of the model.
        kind: "swiglu" (gated) or "gelu".
    """

    def __init__(self, dim: int, kind: Literal["swiglu", "gelu"]) -> None:
        super().__init__()
        hidden = 4 * dim if kind == "gelu" else 8 * -(-dim // 3)
        self.gate = nn.Linear(dim, hidden, bias=False) if kind == "swiglu" else None
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        """See the module's equation."""
        up = self.up(x)
        return self.down(F.gelu(up) if self.gate is None else F.silu(self.gate(x)) * up)
