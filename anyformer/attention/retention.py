"""Retention: linear attention without a denominator, whose state fades at a fixed rate for each head.

Paper: Sun et al. 2023, 2307.08621 (RetNet).
Equation: S_t = gamma S_(t-1) + k_t v_t^T, y_i = scale q_i . S_i = sum_(j <= i) gamma^(i - j) scale (q_i . k_j) v_j, with
    gamma = 1 - 2^(-5 - h) for head h; out_i = silu(W x_i) * y_i / rms(y_i), the root mean square over the channels of a head.
Decoding: a state of d^2 numbers a head.
Deviations: rms has an epsilon of 1e-12, so that outputs do not depend on the scale and with it on the form of computing them.
    The paper's rotation is the layer's position encoding: `rope`, or `xpos` where causal. Not causal, which the paper has not, a
    backward pass over the later tokens is added to the forward one.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.attention import _features, _gates
from anyformer.attention.base import Attention
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.forms import Form
from anyformer.site import Site


class Retention(Attention):
    """Each query reads a sum over the past that fades at its head's own rate.

    It knows distances by itself. There are no weights to drop, so dropout acts on the output.

    Args:
        norm: whether each head's output is divided by its root mean square.
        gate: whether outputs are multiplied by silu(W x), W a projection of its own.
    """

    name = "retention"
    summary = "a running sum that fades at a fixed rate for each head, normalised and gated"
    paper = "Sun et al. 2023, 2307.08621"
    family = ("order of the product", "retention")
    forms = (Form.ROTATE, Form.TURN, Form.GATES, Form.DECAY, Form.TOEPLITZ, Form.AUGMENT, Form.CLIPPED, Form.EMBED)
    refusal = (
        "the weight of a pair is q . k times a factor that fades from token to token, so that a term of the pair must be a factor "
        "by token or by offset along the sequence; use an encoding that is added at the embedding, rotates, fades, or has a bias "
        "by offset or vectors of clipped offsets, such as sinusoidal, rope, alibi, t5 or shaw"
    )
    cross = False
    decodes = "state"
    keyed = _features.KEYED
    ordered = True
    weights = False

    def __init__(self, site: Site, *, norm: bool = True, gate: bool = True) -> None:
        super().__init__(site)
        self.norm = norm
        self.reads = ("q", "k", "v", "x") if gate else ("q", "k", "v")
        self.gate = nn.Linear(site.dim, site.heads * site.head_dim, bias=False) if gate else None

    def cost(self) -> Cost:
        """Keys times values, summed, and queries times the sum, not causal for each direction; and the gate."""
        text = f"{2 if self.site.causal else 4} h n d^2" + ("" if self.gate is None else " + n c h d")
        return Cost(self.site, text, memory="h d^2" if self.site.causal else "2 h d^2")

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b k m d"], v: Float[Tensor, "b k m v"], context: Context
    ) -> Float[Tensor, "b h n v"]:
        """Outputs of the queries; see the module's equation.

        Raises:
            SpecError: there is a gate, and the call brought no tokens for it.
        """
        scale = context.encoding.scale
        raw = q, k
        q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
        heads = torch.arange(q.shape[1], dtype=torch.float64, device=q.device)
        fade = torch.log1p(-torch.exp2(-5.0 - heads))
        out = _features.attend(q, k, v, context, raw=raw, log_decay=fade, normalise=False)
        return _gates.finished(self.name, out, self.norm, self.gate, context)
