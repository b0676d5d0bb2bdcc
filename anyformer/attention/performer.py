"""Performer: softmax attention estimated by random features, whose products are positive and right on average.

Paper: Choromanski et al. 2020, 2009.14794.
Equation: out_i = sum_j (phi(q_i) . phi(k_j)) v_j / sum_j phi(q_i) . phi(k_j), x' = sqrt(scale) x, and
    softmax     phi(x)_r = exp(w_r . x' - |x'|^2 / 2), so that the mean of phi(q) . phi(k) is f exp(scale q . k)
    hyperbolic  the same for w_r and for -w_r, f / 2 rows
    relu        phi(x)_r = max(w_r . x', 0) + 0.001, an estimate of no known kernel
    with rows w_r as long as standard normal ones and orthogonal in blocks of d.
Decoding: a state of f d + f numbers a key head.
Deviations: the authors add 0.0001 to each feature after dividing by its largest over all keys; then later keys move earlier
    outputs, padding moves all, and the sum is not scaled back. Here the largest is taken of each query only, and key features
    are bounded by a factor of their row (see `positive_queries`): nothing is added, and the division is exact.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.attention import _features
from anyformer.attention.base import Attention
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.ops.draws import orthogonal
from anyformer.ops.feature_maps import positive_keys, positive_queries
from anyformer.site import Site
from anyformer.typing import Size


class Performer(Attention):
    """Each query reads one sum over all keys, through features whose product estimates the softmax weight.

    The rows are drawn once from the site's seed, differently for each layer and key head, and saved with the weights. There are no
    weights to drop, so dropout acts on the output. In float32 heads may have up to 128 channels; beyond, features underflow.

    Args:
        features: number f of features.
        kernel: what is estimated; see the module's equation.

    Raises:
        SpecError: "hyperbolic" with an odd number of features.
    """

    name = "performer"
    summary = "softmax estimated by positive random features; keys and values are summed once"
    paper = "Choromanski et al. 2020, 2009.14794"
    family = ("order of the product", "performer")
    forms = (
        Form.ROTATE,
        Form.TURN,
        Form.GATES,
        Form.DECAY,
        Form.TOEPLITZ,
        Form.CLIPPED,
        Form.GRID,
        Form.BOXES,
        Form.AUGMENT,
        Form.EMBED,
    )
    absolute = frozenset({Form.ROTATE})
    fixed_width = True
    estimates = True
    refusal = _features.REFUSAL
    decodes = "state"
    keyed = _features.KEYED
    weights = False

    def __init__(
        self,
        site: Site,
        *,
        features: Size = 256,
        kernel: Literal["softmax", "hyperbolic", "relu"] = "softmax",
    ) -> None:
        super().__init__(site)
        if kernel == "hyperbolic" and features % 2:
            raise SpecError(f"performer: hyperbolic features come in pairs, expected an even number, got {features}")
        self.kernel = kernel
        self.rows: Tensor
        self.register_buffer(
            "rows", torch.empty(site.kv_heads, features // (1 + (kernel == "hyperbolic")), site.head_dim)
        )
        _features.draw(self.rows, orthogonal, site.seed, self.name, site.layer)

    def redraw(self) -> None:
        """Draw new rows from the global generator, for training that changes them now and then; never called by itself."""
        _features.draw(self.rows, orthogonal, _features.fresh_seed())

    def cost(self) -> Cost:
        """The features, keys times values, summed once, and queries times the sum."""
        return Cost(
            self.site,
            "2 features d (h n + k m)",
            memory="features (h n + k m + k d)",
            sizes={"features": self.rows.shape[1] * (1 + (self.kernel == "hyperbolic"))},
        )

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b k m d"], v: Float[Tensor, "b k m v"], context: Context
    ) -> Float[Tensor, "b h n v"]:
        """Outputs of the queries; see the module's equation."""
        raw, scale = (q, k), context.encoding.scale
        root = (q.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
        wide = torch.promote_types(torch.float32, q.dtype)
        rows = _features.widened(self.rows, q.shape[-1], self.site.seed, self.name, self.site.layer)
        q, k, rows = q.to(wide) * root, k.to(wide) * root, rows.to(wide)
        if self.kernel == "hyperbolic":
            rows = torch.cat([rows, -rows], dim=1)
        query_rows = rows.repeat_interleave(self.site.groups, dim=0)
        if self.kernel == "relu":
            q, k = (torch.relu(x @ of.mT) + 0.001 for x, of in ((q, query_rows), (k, rows)))
        else:
            q, k = positive_queries(q, query_rows), positive_keys(k, rows)
        return _features.attend(q, k, v, context, raw=raw, eps=1e-30)
