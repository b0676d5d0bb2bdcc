"""aMLP: gMLP with a tiny attention added to its gate.

Paper: Liu et al. 2021, 2105.08050, section 4.3.
Equation, with W [max_length max_length], so that an index is a place, and j over real tokens (j <= i when causal):

    [u; z] = gelu(W_1 x + b_1),   a_i = W_a sum_j softmax_j(q_i . k_j / sqrt(tiny)) v_j + b_a
    g_i = sum_j W_ij norm(z_j) + b_i + a_i,   out_i = W_2 drop(u_i * g_i) + b_2

with one head of `tiny` channels, q, k and v linear in x.
"""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.context import Context
from anyformer.cost import Cost, meetings
from anyformer.mixer._gate import SpatialGate
from anyformer.mixer.base import Mixer
from anyformer.ops.softmax import fused
from anyformer.pattern.pairs import pairs
from anyformer.site import Site
from anyformer.typing import Size


class AMLP(Mixer):
    """Each token's channels are multiplied by a gate: a learned mixture of all tokens by place, plus what one small head reads.

    It is the feed-forward of its block too, which adds none. When causal, a cache keeps the normalised tokens, keys and values.

    Args:
        width: channels of each half, u and z; None: three times dim.
        tiny: channels of the head.
        toeplitz: whether W_ij depends on j - i only.
        bias: whether the linear layers have a bias.
        dropout: probability of dropping a gated channel before it is projected, in training.
    """

    name = "amlp"
    summary = "gmlp with one small attention head in its gate"
    paper = "Liu et al. 2021, 2105.08050"
    family = ("new framework", "mlp")
    unscored = "adds what one small head reads to a gate over places, so no pair has one score"
    causal = True
    decodes = "cache"
    ordered = True
    feed_forward = True

    def __init__(
        self,
        site: Site,
        *,
        width: Size | None = None,
        tiny: Size = 64,
        toeplitz: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(site)
        width = 3 * site.dim if width is None else width
        self.limit = site.max_length
        self.i = nn.Linear(site.dim, 2 * width, bias=bias)
        self.gate = SpatialGate(site, width, toeplitz=toeplitz)
        self.q, self.k, self.v = (nn.Linear(site.dim, tiny, bias=bias) for _ in range(3))
        self.read = nn.Linear(tiny, width, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.o = nn.Linear(width, site.dim, bias=bias)

    def cost(self) -> Cost:
        """The mixture of the tokens, the one head, and the linear layers."""
        return Cost(
            self.site,
            "pairs (width + 2 tiny) + 3 n c width + n tiny (3 c + width)",
            memory="2 pairs + 2 n width",
            sizes={"width": self.o.in_features, "tiny": self.q.out_features},
            pairs=lambda n, m: meetings(n, m, causal=self.site.causal),
        )

    def mix(self, x: Float[Tensor, "b n c"], context: Context) -> Float[Tensor, "b n c"]:
        """The mixed sequence; see the module's equation."""
        if x.shape[1] == 0:
            return x
        u, z = F.gelu(self.i(x)).chunk(2, dim=-1)
        return self.o(self.dropout(u * (self.gate(z, context) + self.read(self._attended(x, context)))))

    def _attended(self, x: Tensor, context: Context) -> Tensor:
        """What the one head reads, in the tokens' order."""
        q, k, v = self.q(x), self.k(x), self.v(x)
        if context.cache is not None:
            k, v = context.cache.extend("k", k), context.cache.extend("v", v)
        plain = context.plainly_causal
        out = fused(
            *(part[:, None] for part in (q, k, v)),
            allowed=None if plain else pairs(context, 1),
            lower_triangle=plain,
            scale=q.shape[-1] ** -0.5,
        )
        return out[:, 0]
