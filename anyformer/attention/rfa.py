"""Random feature attention: a Gaussian kernel of unit queries and keys estimated by random waves, with or without a gate.

Paper: Peng et al. 2021, 2103.02143.
Equation: out_i = sum_j w_ij v_j / sum_j w_ij, w_ij = phi(q_i / |q_i|) . phi(k_j / |k_j|), about exp(-|q - k|^2 / (2 tau^2)) or,
    up to a factor that cancels, exp(q . k / tau^2); phi(x) = [sin(w_r . x), cos(w_r . x)] / sqrt(r), rows w_r normal with a
    standard deviation of 1 / tau. Gated, with g_t = sigmoid(a . x_t + b) for each head:
    S_t = g_t S_(t-1) + (1 - g_t) phi(k_t) v_t^T, and the denominator the same.
Decoding: a state of 2 r (d + 1) numbers a head.
Deviations: the denominator may be negative, so its magnitude is kept at 0.001 or more and its sign with it; the authors' two code
    paths each do something else. Rows change only where training asks for it (`redraw`), not from a pool in every step. Gated and
    not causal, which the paper has not, a backward pass over the later tokens is added to the forward one.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.attention import _features, _gates
from anyformer.attention.base import Attention
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.forms import Form
from anyformer.ops.draws import normal
from anyformer.ops.feature_maps import waves
from anyformer.site import Site
from anyformer.typing import PositiveFloat, Size


class RFA(Attention):
    """Each query reads one sum over all keys, through sines and cosines of random projections.

    Rows are drawn once from the site's seed, differently for each layer and key head, and saved with the weights. There are no
    weights to drop, so dropout acts on the output.

    Args:
        features: number r of random rows; there are 2 r features.
        tau: width of the kernel; smaller is sharper, and needs more features.
        gate: whether a gate of each token, projected from it, says how much of the past it keeps. Biases start at 1 to 5, so that
            heads remember about 4 to 150 tokens.
    """

    name = "rfa"
    summary = (
        "a Gaussian kernel of unit queries and keys by random waves; keys and values are summed once, gated or not"
    )
    paper = "Peng et al. 2021, 2103.02143"
    family = ("order of the product", "rfa")
    forms = (
        Form.ROTATE,
        Form.TURN,
        Form.GATES,
        Form.DECAY,
        Form.TOEPLITZ,
        Form.CLIPPED,
        Form.GRID,
        Form.BOXES,
        Form.EMBED,
    )
    absolute = frozenset({Form.ROTATE})
    fixed_width = True
    decodes = "state"
    keyed = _features.KEYED
    weights = False

    def __init__(self, site: Site, *, features: Size = 64, tau: PositiveFloat = 1.0, gate: bool = False) -> None:
        super().__init__(site)
        self.tau = tau
        self.rows: Tensor
        self.register_buffer("rows", torch.empty(site.kv_heads, features, site.head_dim))
        _features.draw(self.rows, normal, site.seed, self.name, site.layer)
        self.gate = nn.Linear(site.dim, site.heads) if gate else None
        if self.gate is not None:
            self.gate.bias.data.copy_(torch.linspace(1.0, 5.0, site.heads))
        self.cross, self.ordered = not gate, gate
        self.reads = ("q", "k", "v", "x") if gate else ("q", "k", "v")
        if gate:
            self.forms, self.refusal = tuple(form for form in self.forms if form not in _features.KEYED), _gates.REFUSAL
        else:
            self.refusal = _features.REFUSAL

    def redraw(self) -> None:
        """Draw new rows from the global generator, for training that changes them now and then; never called by itself."""
        _features.draw(self.rows, normal, _features.fresh_seed())

    def cost(self) -> Cost:
        """The projections, keys times values, summed, and queries times the sum, with two features a row; gated and not causal, one
        pass for each direction."""
        sizes = {"features": self.rows.shape[1]}
        if self.gate is None:
            memory = "2 features (h n + k m + k d)"
            return Cost(self.site, "3 features d (h n + k m)", memory=memory, sizes=sizes)
        sums = 4 if self.site.causal else 8
        text = f"{sums} h n features d + (h + k) n features d + n c h"
        return Cost(self.site, text, memory=f"2 h features (2 n + {sums // 4} d)", sizes=sizes)

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b k m d"], v: Float[Tensor, "b k m v"], context: Context
    ) -> Float[Tensor, "b h n v"]:
        """Outputs of the queries; see the module's equation.

        Raises:
            SpecError: there is a gate, and the call brought no tokens for it.
        """
        raw, wide = (q, k), torch.promote_types(torch.float32, q.dtype)
        rows = self.rows.to(wide) / self.tau
        q = waves(F.normalize(q.to(wide), dim=-1), rows.repeat_interleave(self.site.groups, dim=0))
        k = waves(F.normalize(k.to(wide), dim=-1), rows)
        if self.gate is None:
            return _features.attend(q, k, v, context, raw=raw, eps=1e-3, signed=True)
        logits = self.gate(_gates.tokens(self.name, context)).to(wide).mT  # [b h m]
        k = k.repeat_interleave(self.site.groups, dim=1) * torch.sigmoid(-logits)[..., None]
        v = v.repeat_interleave(self.site.groups, dim=1)
        return _features.attend(q, k, v, context, log_decay=F.logsigmoid(logits), eps=1e-3, signed=True)
