"""gMLP: a feed-forward whose channels are gated by a learned mixture of the tokens.

Paper: Liu et al. 2021, 2105.08050.
Equation, with W [max_length max_length], so that an index is a place, and j over real tokens (j <= i when causal):

    [u; z] = gelu(W_1 x + b_1),   g_i = sum_j W_ij norm(z_j) + b_i,   out_i = W_2 drop(u_i * g_i) + b_2

"""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.context import Context
from anyformer.cost import Cost, meetings
from anyformer.mixer._gate import SpatialGate
from anyformer.mixer.base import Mixer
from anyformer.site import Site
from anyformer.typing import Size


class GMLP(Mixer):
    """Each token's channels are multiplied by a gate that a fixed, learned matrix mixes from all tokens.

    It is the feed-forward of its block too, which adds none. When causal, a cache keeps the normalised tokens.

    Args:
        width: channels of each half, u and z; None: three times dim.
        toeplitz: whether W_ij depends on j - i only.
        bias: whether the linear layers have a bias.
        dropout: probability of dropping a gated channel before it is projected, in training.
    """

    name = "gmlp"
    summary = "a feed-forward gated by a learned mixture of the tokens, in place of attention"
    paper = "Liu et al. 2021, 2105.08050"
    family = ("new framework", "mlp")
    causal = True
    decodes = "cache"
    ordered = True
    feed_forward = True

    def __init__(
        self,
        site: Site,
        *,
        width: Size | None = None,
        toeplitz: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(site)
        width = 3 * site.dim if width is None else width
        self.limit = site.max_length
        self.i = nn.Linear(site.dim, 2 * width, bias=bias)
        self.gate = SpatialGate(site, width, toeplitz=toeplitz)
        self.dropout = nn.Dropout(dropout)
        self.o = nn.Linear(width, site.dim, bias=bias)

    def cost(self) -> Cost:
        """The mixture of the tokens, and the linear layers."""
        return Cost(
            self.site,
            "pairs width + 3 n c width",
            memory="pairs + 2 n width",
            sizes={"width": self.o.in_features},
            pairs=lambda n, m: meetings(n, m, causal=self.site.causal),
        )

    def mix(self, x: Float[Tensor, "b n c"], context: Context) -> Float[Tensor, "b n c"]:
        """The mixed sequence; see the module's equation."""
        if x.shape[1] == 0:
            return x
        u, z = F.gelu(self.i(x)).chunk(2, dim=-1)
        return self.o(self.dropout(u * self.gate(z, context)))
