"""MLP-Mixer: tokens are mixed by a small network along the sequence, the same for every channel.

Paper: Tolstikhin et al. 2021, 2105.01601.
Equation, for every channel alone, over the places j of real tokens:

    out_i = sum_s U_is drop(gelu(sum_j W_js x_j + a_s)) + b_i

W and U are [max_length hidden], so an index is a place; the block's feed-forward is the paper's channel mixing. When causal, unit s
stands at place e_s = ceil((s + 1) max_length / hidden) - 1: W_js = 0 for j > e_s, and U_is = 0 for i < e_s.
Deviation: the causal form is not in the paper.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.mixer.base import Mixer
from anyformer.site import Site
from anyformer.typing import Size


class MLPMixer(Mixer):
    """Each output is a learned function of the whole sequence at its place; padding counts as 0.

    When causal, a unit reads the places up to its own and is read from there on, so with fewer units than places a token reaches
    the next only through a unit between them. Decoding keeps `hidden` numbers a channel.

    Args:
        hidden: units along the sequence; None: half of dim, or when causal one for each place.
        dropout: probability of dropping a unit of a channel in training.
    """

    name = "mlp_mixer"
    summary = "a small network along the sequence, the same for every channel, in place of attention"
    paper = "Tolstikhin et al. 2021, 2105.01601"
    family = ("new framework", "mlp")
    causal = True
    decodes = "state"
    ordered = True

    def __init__(self, site: Site, *, hidden: Size | None = None, dropout: float = 0.0) -> None:
        super().__init__(site)
        longest = site.max_length
        if hidden is None:
            hidden = longest if site.causal else max(1, site.dim // 2)
        self.limit = longest
        self.inward = nn.Parameter(torch.empty(longest, hidden))
        self.inward_bias = nn.Parameter(torch.zeros(hidden))
        self.outward = nn.Parameter(torch.empty(longest, hidden))
        self.outward_bias = nn.Parameter(torch.zeros(longest))
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.inward, std=longest**-0.5)
        nn.init.normal_(self.outward, std=hidden**-0.5)

    def cost(self) -> Cost:
        """Into the units and out of them; when causal a place reaches half of them on average."""
        return Cost(
            self.site,
            "n hidden c" if self.site.causal else "2 n hidden c",
            memory="n hidden + hidden c" if self.site.causal else "hidden c",
            sizes={"hidden": self.inward.shape[1]},
        )

    def mix(self, x: Float[Tensor, "b n c"], context: Context) -> Float[Tensor, "b n c"]:
        """The mixed sequence; see the module's equation."""
        if x.shape[1] == 0:
            return x
        cache = context.cache
        # slots are places, unless a cache has rows of several lengths
        places = torch.arange(x.shape[1], device=x.device)[None] if cache is None else context.queries.places
        inward, outward = self.inward[places], self.outward[places]  # b|1 n s
        if self.site.causal:
            at = unit_places(self.site.max_length, inward.shape[-1], x.device)
            inward = inward.masked_fill(places[..., None] > at, 0.0)
            outward = outward.masked_fill(places[..., None] < at, 0.0)
        # not `@`: it rounds broadcast products differently where a gradient is needed
        total = torch.einsum("bns,bnc->bsc", inward, x)
        if cache is not None:
            total = total.to(torch.promote_types(torch.float32, x.dtype))
            total = total + cache.state.get("total", 0.0)
            cache.state["total"] = total
            cache.forget(0)
        units = self.dropout(F.gelu(total.to(x.dtype) + self.inward_bias[:, None]))
        return torch.einsum("bns,bsc->bnc", outward, units) + self.outward_bias[places][..., None]


def unit_places(longest: int, units: int, device: torch.device) -> Int[Tensor, " s"]:
    """The place of each unit, spread evenly, the last unit at the last place."""
    return -(-(torch.arange(units, device=device) + 1) * longest // units) - 1
