"""Gated linear attention: a state whose channels fade at rates that the tokens choose.

Paper: Yang et al. 2023, 2312.06635 (GLA).
Equation: S_t = diag(a_t) S_(t-1) + k_t v_t^T, y_i = scale q_i . S_i, a_t = sigmoid(W2 W1 x_t + b) ** (1 / temperature), one rate
    for each channel of a key head; out_i = silu(W x_i) * y_i / rms(y_i), the root mean square over the channels of a head.
Decoding: a state of d^2 numbers a key head.
Deviations: rms has an epsilon of 1e-12, so that outputs do not depend on the scale and with it on the form of computing them. Not
    causal, which the paper has not, a backward pass over the later tokens is added to the forward one.
"""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.attention import _gates
from anyformer.attention.base import Attention
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.forms import Form
from anyformer.ops.linear_gated import gated_linear_attention, gated_linear_attention_with_state
from anyformer.site import Site
from anyformer.typing import PositiveFloat, Size


class GatedLinear(Attention):
    """Each query reads a sum over the past, each channel of which fades as the tokens in between ask for.

    It knows the order of tokens by itself. There are no weights to drop, so dropout acts on the output.

    Args:
        rank: channels between the two projections that make the rates.
        temperature: root taken of the rates; the larger, the slower they fade.
        norm: whether each head's output is divided by its root mean square.
        gate: whether outputs are multiplied by silu(W x), W a projection of its own.
    """

    name = "gated_linear"
    summary = "a running sum whose channels fade at rates that the tokens choose, normalised and gated"
    paper = "Yang et al. 2023, 2312.06635"
    family = ("order of the product", "gated_linear")
    forms = (Form.ROTATE, Form.TURN, Form.GATES, Form.DECAY, Form.EMBED)
    absolute = frozenset({Form.ROTATE})
    fixed_width = True
    refusal = _gates.REFUSAL
    cross = False
    decodes = "state"
    reads = ("q", "k", "v", "x")
    ordered = True
    weights = False

    def __init__(
        self, site: Site, *, rank: Size = 16, temperature: PositiveFloat = 16.0, norm: bool = True, gate: bool = True
    ) -> None:
        super().__init__(site)
        self.rank, self.temperature, self.norm = rank, temperature, norm
        self.rate = nn.Sequential(nn.Linear(site.dim, rank, bias=False), nn.Linear(rank, site.kv_heads * site.head_dim))
        self.gate = nn.Linear(site.dim, site.heads * site.head_dim, bias=False) if gate else None

    def cost(self) -> Cost:
        """Keys times values, summed, and queries times the sum, not causal for each direction; the rates, and the gate."""
        ways = "" if self.site.causal else "2 "
        text = f"{ways}(h + k) n d^2 + n rank (c + k d)" + ("" if self.gate is None else " + n c h d")
        return Cost(self.site, text, memory=f"{ways}k d^2 + k n d", sizes={"rank": self.rank})

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b k m d"], v: Float[Tensor, "b k m v"], context: Context
    ) -> Float[Tensor, "b h n v"]:
        """Outputs of the queries; see the module's equation.

        Raises:
            SpecError: the call brought no tokens for the rates.
        """
        encoding, cache, keys = context.encoding, context.cache, context.keys
        q = q * (q.shape[-1] ** -0.5 if encoding.scale is None else encoding.scale)
        v = v if encoding.turn is None else encoding.turn(v)
        logits = _gates.by_head(self.rate(_gates.tokens(self.name, context)), self.site.kv_heads)
        fade = F.logsigmoid(_gates.wide(logits)) / self.temperature
        k, v, fade = _gates.fading(self.name, k, v, fade, context, q.shape[1])
        if cache is None:
            out = gated_linear_attention(q, k, v, fade, causal=context.causal, keep=keys.keep, documents=keys.documents)
        else:
            out, cache.state["s"] = gated_linear_attention_with_state(
                q, k, v, fade, state=cache.state.get("s"), keep=keys.keep, documents=keys.documents
            )
        out = out if encoding.turn_back is None else encoding.turn_back(out)
        return _gates.finished(self.name, out, self.norm, self.gate, context)
