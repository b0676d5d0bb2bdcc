"""A gated recurrent unit: the reference line of recurrence without attention.

Paper: Cho et al. 2014, 1406.1078.
Equation:

    z = sigmoid(W_z x + U_z h),  r = sigmoid(W_r x + U_r h),  g = tanh(W_h x + r * (U_h h)),  h' = (1 - z) * g + z * h

with a bias in each of the six products. When causal, out_i = W_o h_i + b_o; else out_i = W_o [h_i; back_i] + b_o, where
`back` are the states of a second unit that reads from the last real token to the first.
Deviation: the reset gate acts after the product U_h h, as in torch and cuDNN; the paper has it before.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.mixer.base import Mixer, take
from anyformer.ops.recurrent import backwards, last
from anyformer.site import Site
from anyformer.typing import Size


class GRU(Mixer):
    """One recurrent unit over the tokens when causal, else one in each direction, and a projection of their states.

    Args:
        width: channels of the state of one direction; None: dim.
        dropout: probability of dropping a channel of the state before it is projected, in training.
    """

    name = "gru"
    summary = "a gated recurrent unit in place of attention; two directions where not causal"
    paper = "Cho et al. 2014, 1406.1078"
    family = ("reference line", "recurrence")
    causal = True
    decodes = "state"
    ordered = True

    def __init__(self, site: Site, *, width: Size | None = None, dropout: float = 0.0) -> None:
        super().__init__(site)
        width = site.dim if width is None else width
        self.ahead = nn.GRU(site.dim, width, batch_first=True)
        self.back = None if site.causal else nn.GRU(site.dim, width, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.o = nn.Linear(width if site.causal else 2 * width, site.dim)

    def cost(self) -> Cost:
        """The three gates from token and state, not causal for each direction, and the last projection."""
        text = "n width (4 c + 3 width)" if self.back is None else "2 n width (4 c + 3 width)"
        return Cost(
            self.site,
            text,
            memory="4 n width" if self.back is None else "8 n width",
            sizes={"width": self.ahead.hidden_size},
        )

    def mix(self, x: Float[Tensor, "b n c"], context: Context) -> Float[Tensor, "b n c"]:
        """The mixed sequence; see the module's equation."""
        if x.shape[1] == 0:
            return x
        keep = context.queries.keep
        start = None if context.cache is None else context.cache.state.get("hidden")
        hidden = self.ahead(x, None if start is None else start[None])[0]
        if context.cache is not None:
            context.cache.state["hidden"] = last(hidden, keep, start)
            context.cache.forget(0)
        if self.back is not None:
            order = backwards(hidden, keep)
            hidden = torch.cat([hidden, take(self.back(take(x, order))[0], order)], dim=-1)
        return self.o(self.dropout(hidden))
