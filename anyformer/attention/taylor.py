"""Taylor attention: the exponential of softmax replaced by its expansion to second order, which is a product of features.

Paper: Arora et al. 2024, 2402.18668 (Based).
Equation: out_i = sum_j w_ij v_j / sum_j w_ij, w_ij = 1 + u + u^2 / 2 with u = scale q_i . k_j, always above 0.
Decoding: a state of f (d + 1) numbers a key head.
Deviations: products of channels are kept once, the paper keeps both orders (273 features for 16); the windows and short
    convolutions that surround it there are layers of their own here. Narrow queries and keys are a linear map of a head's.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.attention import _features
from anyformer.attention.base import Attention
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.forms import Form
from anyformer.ops.feature_maps import taylor2
from anyformer.site import Site
from anyformer.typing import Size


class Taylor(Attention):
    """Each query reads one sum over all keys, through features that give 1 + u + u^2 / 2 for the score u.

    There are no weights to drop, so dropout acts on the output.

    Args:
        width: channels of queries and keys, which a learned map makes of a head's; None, or as many as a head has or more: the
            head's own. Features grow with the square of it.
    """

    name = "taylor"
    summary = "softmax's exponential to second order; keys and values are summed once"
    paper = "Arora et al. 2024, 2402.18668"
    family = ("order of the product", "taylor")
    refusal = _features.REFUSAL
    decodes = "state"
    keyed = _features.KEYED
    weights = False

    def __init__(self, site: Site, *, width: Size | None = 16) -> None:
        super().__init__(site)
        narrow = width is not None and width < site.head_dim
        shape = site.head_dim, site.head_dim if width is None else width
        self.query_map = nn.Parameter(torch.empty(site.heads, *shape)) if narrow else None
        self.key_map = nn.Parameter(torch.empty(site.kv_heads, *shape)) if narrow else None
        for each in self.parameters():
            nn.init.normal_(each, std=site.head_dim**-0.5)
        self.forms = (
            Form.ROTATE,
            Form.TURN,
            Form.GATES,
            Form.DECAY,
            Form.TOEPLITZ,
            Form.CLIPPED,
            Form.GRID,
            Form.BOXES,
            *(() if narrow else (Form.AUGMENT,)),
            Form.EMBED,
        )
        if narrow:
            self.refusal = f"{self.refusal}; columns of queries and keys need width=None"
        self.absolute = frozenset({Form.ROTATE} if narrow else ())

    def cost(self) -> Cost:
        """Keys times values, summed once, and queries times the sum; before that queries and keys made narrow."""
        wide = self.site.head_dim if self.query_map is None else self.query_map.shape[-1]
        text = "features d (h n + k m)" + ("" if self.query_map is None else " + width d (h n + k m)")
        sizes = {"features": 1 + wide + wide * (wide + 1) // 2, "width": wide}
        return Cost(self.site, text, memory="features (h n + k m + k d)", sizes=sizes)

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b k m d"], v: Float[Tensor, "b k m v"], context: Context
    ) -> Float[Tensor, "b h n v"]:
        """Outputs of the queries; see the module's equation."""
        raw, scale = (q, k), context.encoding.scale
        if self.query_map is not None and self.key_map is not None:
            q, k = q @ self.query_map, k @ self.key_map
            scale = None
        root = (q.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
        wide = torch.promote_types(torch.float32, q.dtype)
        q, k = (taylor2(x.to(wide) * root) for x in (q, k))
        return _features.attend(q, k, v, context, raw=raw)
