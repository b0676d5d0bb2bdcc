"""DeltaNet: a state that is corrected at each key by the difference between what it holds there and the new value.

Paper: Schlag, Irie and Schmidhuber 2021, 2102.11174; in this form Yang et al. 2024, 2406.06484.
Equation: S_t = S_(t-1) + beta_t k_t (v_t - S_(t-1)^T k_t)^T, y_i = scale S_i^T q_i, with beta_t = sigmoid(W x_t) for each key
    head, queries and keys silu(.) divided by their length; out_i = y_i / rms(y_i). With a rotary encoding the state is read at
    R_t k_t as a query would, and written at k_t turned as a key: what is read depends on offsets only.
Decoding: a state of d^2 numbers a key head.
Deviations: the authors' short convolutions are layers of their own here (`conv`). rms has an epsilon of 1e-12, so that outputs do
    not depend on the scale and with it on the form of computing them. Not causal, which the paper has not, a backward pass over
    the later tokens is added to the forward one.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.attention import _gates
from anyformer.attention.base import Attention
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.forms import Form
from anyformer.ops.linear_delta import delta_rule, delta_rule_with_state
from anyformer.site import Site


class Delta(Attention):
    """Each key's value replaces what the state held at that key; each query reads the state.

    It knows the order of tokens by itself. There are no weights to drop, so dropout acts on the output.

    Args:
        negative: whether beta goes from 0 to 2 instead of 1, so that a key can also turn the state around.
        norm: whether each head's output is divided by its root mean square.
        gate: whether outputs are multiplied by silu(W x), W a projection of its own.
    """

    name = "delta"
    summary = "a state of fixed size that each key corrects where it points"
    paper = "Schlag et al. 2021, 2102.11174; Yang et al. 2024, 2406.06484"
    family = ("order of the product", "delta")
    forms = (Form.ROTATE, Form.TURN, Form.EMBED)
    refusal = (
        "each key corrects what the state holds of all earlier ones, so that no factor belongs to a pair, and a state that fades "
        "is another model; use an encoding that is added at the embedding or rotates, such as sinusoidal or rope, or gated_linear "
        "with alibi"
    )
    cross = False
    decodes = "state"
    reads = ("q", "k", "v", "x")
    rotates = "self"
    ordered = True
    weights = False

    def __init__(self, site: Site, *, negative: bool = False, norm: bool = True, gate: bool = False) -> None:
        super().__init__(site)
        self.most, self.norm = 2.0 if negative else 1.0, norm
        self.beta = nn.Linear(site.dim, site.kv_heads, bias=False)
        self.gate = nn.Linear(site.dim, site.heads * site.head_dim, bias=False) if gate else None

    def cost(self) -> Cost:
        """The state read at the key, corrected, and read by the query, not causal for each direction; beta, and the gate."""
        ways = "" if self.site.causal else "2 "
        text = f"{ways}(h + 2 k) n d^2 + n c k" + ("" if self.gate is None else " + n c h d")
        return Cost(self.site, text, memory=f"{ways}k d^2")

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b k m d"], v: Float[Tensor, "b k m v"], context: Context
    ) -> Float[Tensor, "b h n v"]:
        """Outputs of the queries; see the module's equation.

        Raises:
            SpecError: the call brought no tokens for beta.
        """
        encoding, cache, keys = context.encoding, context.cache, context.keys
        scale = q.shape[-1] ** -0.5 if encoding.scale is None else encoding.scale
        q, k = (F.normalize(F.silu(_gates.wide(x)), dim=-1) for x in (q, k))
        read = None
        if encoding.rotate is not None:
            read = encoding.rotate(k, k)[0]
            q, k = encoding.rotate(q, k)
            k = k / (read * k).sum(-1, keepdim=True).clamp(min=1e-6)  # 1 for rotations
        v = v if encoding.turn is None else encoding.turn(v)
        beta = self.most * torch.sigmoid(_gates.wide(self.beta(_gates.tokens(self.name, context)))).mT
        keep, documents = keys.keep, keys.documents
        if cache is None:
            out = delta_rule(q * scale, k, v, beta, causal=context.causal, read=read, keep=keep, documents=documents)
        else:
            out, cache.state["s"] = delta_rule_with_state(
                q * scale, k, v, beta, state=cache.state.get("s"), read=read, keep=keep, documents=documents
            )
        out = out if encoding.turn_back is None else encoding.turn_back(out)
        return _gates.finished(self.name, out, self.norm, self.gate, context)
