"""A gated depthwise convolution: the reference line of fixed local mixing without attention.

Paper: Dauphin et al. 2017, 1612.08083 (gated convolution); Wu et al. 2019, 1901.10430 (one filter a channel).
Equation: [u; g] = W_i x + b_i, out_i = W_o (SiLU(g_i) * (sum_t f_t * u_(i + t - left) + b)) + b_o over t = 0..width-1,
with one filter f [width] a channel and u = 0 beyond the sequence and on padding; `left` is width - 1 when causal, else
width // 2.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.mixer.base import Mixer, blank
from anyformer.ops.left import newest
from anyformer.site import Site
from anyformer.typing import Size


class Conv(Mixer):
    """Each channel is a weighted sum of its last `width` tokens (of those around it where not causal), times a gate.

    Args:
        width: tokens that a filter covers, the token itself included: it and the width - 1 before it when causal;
            otherwise width // 2 before it and (width - 1) // 2 after it.
        dropout: probability of dropping a gated channel before it is projected, in training.
    """

    name = "conv"
    summary = "a gated convolution with one filter a channel in place of attention"
    paper = "Dauphin et al. 2017, 1612.08083; Wu et al. 2019, 1901.10430"
    family = ("reference line", "convolution")
    causal = True
    decodes = "state"
    ordered = True

    def __init__(self, site: Site, *, width: Size = 7, dropout: float = 0.0) -> None:
        super().__init__(site)
        self.left = width - 1 if site.causal else width // 2
        self.i = nn.Linear(site.dim, 2 * site.dim)
        self.filter = nn.Conv1d(site.dim, site.dim, width, groups=site.dim)
        self.dropout = nn.Dropout(dropout)
        self.o = nn.Linear(site.dim, site.dim)

    def cost(self) -> Cost:
        """The projections and the filter."""
        width = self.filter.weight.shape[-1]
        return Cost(self.site, "3 n c^2 + n c width", memory="2 n c", sizes={"width": width})

    def mix(self, x: Float[Tensor, "b n c"], context: Context) -> Float[Tensor, "b n c"]:
        """The mixed sequence; see the module's equation."""
        if x.shape[1] == 0:
            return x
        keep, cache = context.queries.keep, context.cache
        u, gate = self.i(x).chunk(2, dim=-1)
        if keep is not None:  # the bias of the projection made padding non-zero
            u = blank(u, keep)
        width = self.filter.weight.shape[-1]
        tail = None if cache is None else cache.state.get("tail")
        u = F.pad(u, (0, 0, self.left, 0)) if tail is None else torch.cat([tail, u], dim=1)
        if cache is not None:
            cache.state["tail"] = newest(u, width - 1, keep)
            cache.forget(0)
        u = F.pad(u, (0, 0, 0, width - 1 - self.left))
        mixed = F.conv1d(u.transpose(1, 2), self.filter.weight, self.filter.bias, groups=self.site.dim).transpose(1, 2)
        return self.o(self.dropout(F.silu(gate) * mixed))
