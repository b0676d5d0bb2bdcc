"""Inducing points: a few learned queries read the keys, and the real queries read what these found.

Paper: Lee et al. 2019, 1810.00825 (induced set attention); the two reads without layers of their own: Ma et al. 2021, 2106.01540.
Equation, with P the learned points [points d] of each key head:

    W = softmax(scale * P K^T) [points m],   K' = W K,   V' = W V,   out = softmax(scale * Q K'^T) V'

Deviation: the papers give the second read projections of its own, and the first also a residual, norms and a feed-forward; here
both reads share the layer's keys and values, and the block around the layer has the rest.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.attention.base import Attention
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.forms import Form
from anyformer.ops import softmax as ops
from anyformer.site import Site
from anyformer.typing import Size


class Inducing(Attention):
    """Each query reads `points` mixtures of the keys, whose weights are what learned points find in them.

    Mixtures depend on the content only, so without an encoding the layer is blind to order, and any length works. Dropout acts on
    the second read. A sample without real keys gives 0.

    Args:
        points: number of learned points, for each key head.

    Raises:
        IncompatibleError: the site is causal.
    """

    name = "inducing"
    summary = "a few learned points read the keys, and the queries read the points"
    paper = "Lee et al. 2019, 1810.00825; Ma et al. 2021, 2106.01540"
    family = ("fewer keys", "inducing points")
    forms = (Form.ROTATE, Form.TURN, Form.AUGMENT, Form.EMBED)
    absolute = frozenset({Form.ROTATE, Form.TURN, Form.AUGMENT})
    refusal = (
        "its points mix all keys, so no score belongs to one pair of query and key and there is nothing to bias; "
        "use an encoding added at the embedding, such as sinusoidal or learned; rope runs too, but mixed"
    )
    causal = False
    causal_refusal = "its points read every place, the future too; use linear, compressed or softmax for causal models"
    documents = False
    rotates = "self"

    def __init__(self, site: Site, *, points: Size = 32) -> None:
        super().__init__(site)
        self.points = nn.Parameter(torch.empty(site.kv_heads, points, site.head_dim))
        nn.init.normal_(self.points)

    def cost(self) -> Cost:
        """What the points read of keys and of values, each with its own weights, and what the queries read of that."""
        return Cost(
            self.site,
            "4 k m points d + 2 h n points d",
            memory="points (k m + h n + 2 k d)",
            sizes={"points": self.points.shape[1]},
        )

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b k m d"], v: Float[Tensor, "b k m v"], context: Context
    ) -> Float[Tensor, "b h n v"]:
        """Outputs of the queries; see the module's equation. The points compare the keys as they are before they are placed."""
        keep, encoding = context.keys.keep, context.encoding
        if keep is not None:
            k, v = (torch.where(keep[:, None, :, None], part, torch.zeros_like(part)) for part in (k, v))
        q, placed = (q, k) if encoding.rotate is None else encoding.rotate(q, k)
        v = v if encoding.turn is None else encoding.turn(v)
        scale = self.site.head_dim**-0.5 if encoding.scale is None else encoding.scale
        allowed = None if keep is None else keep[:, None, None, :]
        points = self.points.to(k.dtype).expand(k.shape[0], -1, -1, -1)
        # twice, for the fused kernel is fast for values as wide as keys only
        keys, values = (ops.fused(points, k, part, allowed=allowed, scale=scale) for part in (placed, v))
        out = ops.fused(q, keys, values, scale=scale, dropout=context.dropout)
        return out if encoding.turn_back is None else encoding.turn_back(out)
