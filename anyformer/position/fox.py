"""FoX: each token sets a forget gate, and a pair's weight shrinks by the gates of all tokens after the key, up to the query.

Paper: Lin, Nikishin, He and Courville 2025, 2503.02130.
Equation: s_ij = q_i . k_j / sqrt(d) + sum_(t = j+1..i) ln f_t, with f_t = sigmoid(w_h . x_t + b_h).
Cost: n c h for the gates, and one subtraction a pair.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.forms import Form
from anyformer.position.base import Position
from anyformer.side import Side
from anyformer.site import Site


class Fox(Position):
    """Lets each head forget by content: ALiBi with a slope that every token chooses. Positions themselves are not read.

    Causal only: a gate stands between a key and a later query.

    Args:
        start: the initial bias b of the gates; at 5 each forgets 0.7 per cent.
    """

    name = "fox"
    summary = "each token sets a forget gate for all that came before it"
    paper = "Lin et al. 2025, 2503.02130"
    family = ("since the survey", "alibi")
    reads_tokens = True

    def __init__(self, site: Site, *, start: float = 5.0) -> None:
        super().__init__(site)
        self.forms = ((Form.GATES,),)
        self.causal_only = True
        self.gate = nn.Linear(site.dim, site.heads)
        nn.init.constant_(self.gate.bias, start)

    def prepare(
        self, x: Float[Tensor, "b m c"], tokens: Side, state: dict[str, Tensor] | None
    ) -> Float[Tensor, "b m h"]:
        """GATES: `ln f`, in the wider of float32 and x's dtype."""
        return F.logsigmoid(self.gate(x).to(torch.promote_types(torch.float32, x.dtype)))
